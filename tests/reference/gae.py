"""Advantages from a critic's values (specification, sections 2.1 to 2.4): one trajectory, loops over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[np.floating]
Flags = Sequence[bool] | NDArray[np.bool_]
Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def recursion(values: list[float], rewards: list[float], gamma: float, lam: float, bootstrap: float) -> list[float]:
    """GAE over n steps; the value after the last one is `bootstrap`."""
    advantages = [0.0] * len(values)
    next_value, next_advantage = bootstrap, 0.0
    for j in reversed(range(len(values))):
        delta = rewards[j] + gamma * next_value - values[j]
        advantages[j] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[j], advantages[j]
    return advantages


def skip_observation(values: Numbers, rewards: Numbers, mask: Flags, gamma: float, lam: float, bootstrap: float) -> Pair:
    """Steps are the action tokens (SAO). (advantages, returns A + V), [L] each, 0 on observations."""
    return _token_level(values, rewards, mask, gamma, lam, bootstrap, [t for t in range(len(mask)) if mask[t]])


def through_observations(values: Numbers, rewards: Numbers, mask: Flags, gamma: float, lam: float, bootstrap: float) -> Pair:
    """Steps are all tokens from the first to the last action token. (advantages, returns A + V), [L], 0 on observations."""
    actions = [t for t in range(len(mask)) if mask[t]]
    steps = list(range(actions[0], actions[-1] + 1)) if actions else []
    return _token_level(values, rewards, mask, gamma, lam, bootstrap, steps)


def _token_level(
    values: Numbers, rewards: Numbers, mask: Flags, gamma: float, lam: float, bootstrap: float, steps: list[int]
) -> Pair:
    found = recursion([float(values[t]) for t in steps], [float(rewards[t]) for t in steps], gamma, lam, float(bootstrap))
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for t, advantage in zip(steps, found, strict=True):
        if mask[t]:
            advantages[t] = advantage
            returns[t] = advantage + float(values[t])
    return advantages, returns


def step_level(
    values: Numbers,
    rewards: Numbers,
    turn_ids: Sequence[int] | NDArray[np.integer],
    gamma: float,
    lam: float,
    bootstrap: float,
    kind: Literal["average", "last"],
) -> Pair:
    """Steps are turns; a turn's value is the mean over its tokens or the value at its last token; A, G on all its tokens."""
    advantages, returns = np.zeros(len(turn_ids)), np.zeros(len(turn_ids))
    turns: list[list[int]] = []
    for t in range(len(turn_ids)):
        if turn_ids[t] >= 0 and (not turns or turn_ids[turns[-1][-1]] != turn_ids[t]):
            turns.append([])
        if turn_ids[t] >= 0:
            turns[-1].append(t)
    step_values, step_rewards = [], []
    for tokens in turns:
        numbers = [float(values[t]) for t in tokens]
        step_values.append(sum(numbers) / len(numbers) if kind == "average" else numbers[-1])
        step_rewards.append(sum(float(rewards[t]) for t in tokens))
    found = recursion(step_values, step_rewards, gamma, lam, float(bootstrap))
    for tokens, value, advantage in zip(turns, step_values, found, strict=True):
        for t in tokens:
            advantages[t] = advantage
            returns[t] = advantage + value
    return advantages, returns


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """The policy's lambda of a trajectory of `length` steps."""
    return max(0.0, 1.0 - 1.0 / max(alpha * length, 1.0))
