"""Advantages from rewards alone (specification, section 5.1): one number per episode, loops in order of completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _std(numbers: Sequence[float], ddof: int) -> float:
    mean = _mean(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof)) if len(numbers) > ddof else 0.0


def _group(rewards: Sequence[float], prompts: Sequence[str], i: int) -> list[float]:
    return [r for r, prompt in zip(rewards, prompts, strict=True) if prompt == prompts[i]]


def grpo(rewards: Sequence[float], prompts: Sequence[str], std: Literal["population", "sample"]) -> list[float]:
    """(R - group mean) / (group std + 1e-6)."""
    found = []
    for i, reward in enumerate(rewards):
        group = _group(rewards, prompts, i)
        found.append((reward - _mean(group)) / (_std(group, 0 if std == "population" else 1) + 1e-6))
    return found


def rloo(rewards: Sequence[float], prompts: Sequence[str]) -> list[float]:
    """R - mean of the others of the group; 0 where there is no other."""
    found = []
    for i, reward in enumerate(rewards):
        group = _group(rewards, prompts, i)
        others = (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else reward
        found.append(reward - others)
    return found


def dr_grpo(rewards: Sequence[float], prompts: Sequence[str]) -> list[float]:
    """R - group mean."""
    return [reward - _mean(_group(rewards, prompts, i)) for i, reward in enumerate(rewards)]


def batch_norm(rewards: Sequence[float]) -> list[float]:
    """(R - batch mean) / (population std of the batch + 1e-8)."""
    return [(reward - _mean(rewards)) / (_std(rewards, 0) + 1e-8) for reward in rewards]


@dataclass
class RunningMean:
    """R - mean of the last `window` rewards, of the prompt or of all; exclusive: earlier rewards only, inclusive: R too."""

    window: int
    per_prompt: bool
    inclusive: bool
    initial: float
    average: float = field(init=False)
    """EMA .95 of all rewards so far: the baseline where there is no earlier reward."""
    seen: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.average = self.initial

    def step(self, reward: float, prompt: str) -> float:
        """The advantage of the next episode."""
        history = self.seen.setdefault(prompt if self.per_prompt else "all", [])
        if self.inclusive:
            history.append(reward)
        recent = history[-self.window :]
        baseline = _mean(recent) if recent else self.average
        if not self.inclusive:
            history.append(reward)
        self.average = 0.95 * self.average + 0.05 * reward
        return reward - baseline


@dataclass
class SpoTracker:
    """A Beta distribution of one prompt's success, forgotten by half when the policy has moved by `d_half` nats."""

    d_half: float
    rho_min: float
    rho_max: float
    v0: float
    alpha: float = field(init=False)
    beta: float = field(init=False)

    def __post_init__(self) -> None:
        pseudo = 1.0 / (1.0 - self.rho_min)
        self.alpha, self.beta = pseudo * self.v0, pseudo * (1.0 - self.v0)

    def step(self, reward: float, moved: float) -> float:
        """The advantage of this visit, `moved` nats after the one before: R - v before the update."""
        before = self.alpha / (self.alpha + self.beta)
        rho = min(max(2.0 ** (-moved / self.d_half), self.rho_min), self.rho_max)
        self.alpha = rho * self.alpha + reward
        self.beta = rho * self.beta + 1.0 - reward
        return reward - before


def return_to_go(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> NDArray[np.float64]:
    """Discounted sum of this and all later rewards of one trajectory, a step per action token; [L], 0 on observations."""
    found, after = np.zeros(len(mask)), 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            after = float(rewards[t]) + gamma * after
            found[t] = after
    return found


def whiten(advantages: Sequence[float], centre: bool = True) -> list[float]:
    """(A - mean, or A) / sqrt(sample variance + 1e-8) over action tokens; unchanged where there are fewer than two."""
    if len(advantages) < 2:
        return list(advantages)
    scale = math.sqrt(_std(advantages, 1) ** 2 + 1e-8)
    mean = _mean(advantages) if centre else 0.0
    return [(a - mean) / scale for a in advantages]
