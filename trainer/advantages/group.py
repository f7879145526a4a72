"""Baselines from the other episodes of the same prompt in the batch; R_i are the rewards of one group of G.

    group_normalised   A_i = (R_i - mean) / (std + 1e-6)           GRPO, DeepSeekMath, arXiv 2402.03300, 4.1.2
    leave_one_out      A_i = R_i - mean of the other G - 1         RLOO, arXiv 2402.14740
    group_centred      A_i = R_i - mean                            Dr. GRPO, arXiv 2503.20783

Our choices: the population std (the paper does not say which; "sample" divides by G - 1), and a group is the episodes that
arrived in one batch, whatever their number. A group of equal rewards gives exactly 0 in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from trainer.advantages.types import Outcomes, State

EPS = 1e-6


def group_normalised(
    outcomes: Outcomes, state: State, *, std: Literal["population", "sample"] = "population"
) -> tuple[Tensor, State]:
    """(R - mean) / (std + 1e-6); 0 for a group of one."""

    def normalised(rewards: Tensor) -> Tensor:
        centred = rewards - mean(rewards)
        degrees = len(rewards) - (std == "sample")
        return centred / ((centred.square().sum() / max(degrees, 1)).sqrt() + EPS)

    return per_group(outcomes, normalised), state


def leave_one_out(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """R minus the mean of the others. Raises `ValueError` for a group of one, which has no others."""

    def left_out(rewards: Tensor) -> Tensor:
        n = len(rewards)
        if n < 2:
            raise ValueError("leave-one-out needs at least two episodes of every prompt in a batch, and one has a single one")
        return (rewards - mean(rewards)) * (n / (n - 1))

    return per_group(outcomes, left_out), state


def group_centred(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """R - mean; 0 for a group of one."""
    return per_group(outcomes, lambda rewards: rewards - mean(rewards)), state


def mean(x: Tensor) -> Tensor:
    """Mean of [n], as [1] ([0] if n = 0). Around x[0], so that equal numbers have exactly that mean, whatever rounding does."""
    return x[:1] + (x - x[:1]).mean()


def per_group(outcomes: Outcomes, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f of the rewards of each prompt's episodes, put back in order, [E] fp64."""
    members: dict[str, list[int]] = {}
    for episode, prompt in enumerate(outcomes.prompts):
        members.setdefault(prompt, []).append(episode)
    rewards = outcomes.rewards.double()
    out = torch.empty_like(rewards)
    for episodes in members.values():
        out[episodes] = f(rewards[episodes])
    return out
