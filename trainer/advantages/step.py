"""Step-level GAE (SAO, arXiv 2607.07508, App. A.1), in two forms; a step S_i is the action tokens of one turn.

    V(S_i)  = mean of v over the step ("average"), or v before the step's last token ("last")
    delta_i = R_i + gamma * V(S_{i+1}) - V(S_i)          R_i = sum of the step's rewards, V(S_n) = bootstrap
    A_i     = delta_i + gamma * lambda * A_{i+1}         one factor gamma * lambda per step

A_i is given to every action token of its step, and l is the number of steps. The critic is trained on all action tokens
(average) or on the last of each step (last). Our choice: its target is G_i = A_i + V(S_i), which with lambda = 1 is the return
from step i on, the same for all tokens of the step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainer.advantages.gae import action_rewards, per_trajectory, scatter, solve
from trainer.advantages.types import AdvantageInput, CriticEstimator, Estimate


def _estimate(inputs: AdvantageInput, lam: float | Tensor, *, average: bool) -> Estimate:
    actions, first = _turns(inputs)
    step = first.cumsum(0) - 1
    starts = actions[first]
    token_v = inputs.values.detach()[actions].double()
    v = _sums(token_v, step, starts) / _sums(torch.ones_like(token_v), step, starts) if average else token_v[_last(first)]
    u = _sums(action_rewards(inputs.rewards, actions).double(), step, starts)
    advantages = solve(v, u, starts, inputs.cu_seqlens, inputs.gamma, lam, inputs.bootstrap)
    returns = advantages + v
    return Estimate(scatter(actions, advantages[step], inputs.mask), scatter(actions, returns[step], inputs.mask))


def _turns(inputs: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Positions of the n action tokens, int64, and whether each is the first of its step, bool; each [n]."""
    actions = inputs.mask.nonzero().squeeze(1)
    turn = inputs.turn_ids[actions]
    trajectory = torch.searchsorted(inputs.cu_seqlens, actions, right=True)
    first = torch.ones_like(actions, dtype=torch.bool)
    first[1:] = (turn.diff() != 0) | (trajectory.diff() != 0)
    return actions, first


def _last(first: Tensor) -> Tensor:
    """Whether each token is the last of its step, [n] bool."""
    last = torch.ones_like(first)
    last[:-1] = first[1:]
    return last


def _sums(x: Tensor, step: Tensor, like: Tensor) -> Tensor:
    return x.new_zeros(len(like)).index_add_(0, step, x)


def _length(inputs: AdvantageInput) -> Tensor:
    actions, first = _turns(inputs)
    return per_trajectory(actions[first], inputs.cu_seqlens)


def _last_tokens(inputs: AdvantageInput) -> Tensor:
    actions, first = _turns(inputs)
    return torch.zeros_like(inputs.mask).index_fill_(0, actions[_last(first)], True)


STEP_AVERAGE = CriticEstimator(partial(_estimate, average=True), _length, supervised=lambda inputs: inputs.mask)
STEP_LAST = CriticEstimator(partial(_estimate, average=False), _length, supervised=_last_tokens)
