"""Outcomes normalised over the batch: A = (R - mean) / (std + 1e-8) over all episodes of all prompts.

The critic-free control of SAO's public reproductions: one rollout per prompt, DIS, no value model. Not in the paper (arXiv
2607.07508). Our choices: the population std, and exactly 0 for a batch of equal rewards.
"""

from __future__ import annotations

from torch import Tensor

from trainer.advantages.group import mean
from trainer.advantages.types import Outcomes, State

EPS = 1e-8


def batch_normalised(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """(R - mean) / (std + 1e-8), [E] fp64."""
    rewards = outcomes.rewards.double()
    centred = rewards - mean(rewards)
    return centred / (centred.square().mean().sqrt() + EPS), state
