"""REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the global batch instead of per prompt.

    A_t = sum_{k >= t} gamma^(k - t) u_k - b          then whitened over the action tokens of the global batch

b = 0 (REINFORCE++), or the mean reward of the prompt's group (REINFORCE++ with baseline). The caller subtracts b at each action
token and whitens (`trainer.advantages.whiten`). Our choices: gamma counts action tokens only, as everywhere here; no KL penalty
in the reward; b is the mean of undiscounted rewards and so fits gamma = 1, the paper's case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.advantages.gae import value_targets
from trainer.advantages.group import mean, per_group
from trainer.advantages.types import Outcomes, State


def return_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each action token on, [N] fp32; zero on observation tokens."""
    return value_targets(torch.zeros_like(rewards), rewards, mask, cu_seqlens, gamma=gamma, lam=1.0)


def no_baseline(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """Zeros, [E] fp64."""
    return torch.zeros_like(outcomes.rewards, dtype=torch.float64), state


def group_baseline(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """The mean reward of the episodes of the same prompt in the batch, [E] fp64."""
    return per_group(outcomes, lambda rewards: mean(rewards).expand(len(rewards))), state
