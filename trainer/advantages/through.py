"""Token-level GAE through observations: the control that isolates what skipping them does.

The recursion of GAE (arXiv 1506.02438, Eq. 16) over every token from a trajectory's first to its last action token:

    delta_t = u_t + gamma * v_{t+1} - v_t
    A_t     = delta_t + gamma * lambda * A_{t+1}

so an observation of n tokens between two actions costs n + 1 factors gamma * lambda, and its values are read. SAO (arXiv
2607.07508) argues against this form without a controlled table. Our choices: the prompt and observations after the last action
are no steps; observation tokens get A = G = 0, as neither the policy nor the critic is trained there; l counts all steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.advantages.gae import action_rewards, per_trajectory, scatter, solve
from trainer.advantages.types import AdvantageInput, CriticEstimator, Estimate


def _estimate(inputs: AdvantageInput, lam: float | Tensor) -> Estimate:
    action_rewards(inputs.rewards, inputs.mask.nonzero().squeeze(1))
    steps = _steps(inputs)
    v = inputs.values.detach()[steps].double()
    advantages = solve(v, inputs.rewards[steps], steps, inputs.cu_seqlens, inputs.gamma, lam, inputs.bootstrap)
    acted = inputs.mask[steps]
    actions, advantages, v = steps[acted], advantages[acted], v[acted]
    return Estimate(scatter(actions, advantages, inputs.mask), scatter(actions, advantages + v, inputs.mask))


def _steps(inputs: AdvantageInput) -> Tensor:
    """Positions with an action of their trajectory at or before them and one at or after them, [n] int64."""
    upto = torch.nn.functional.pad(inputs.mask.cumsum(0), (1, 0))
    lengths = inputs.cu_seqlens.diff()
    starts = torch.repeat_interleave(upto[inputs.cu_seqlens[:-1]], lengths, output_size=len(inputs.mask))
    ends = torch.repeat_interleave(upto[inputs.cu_seqlens[1:]], lengths, output_size=len(inputs.mask))
    return ((upto[1:] > starts) & (upto[:-1] < ends)).nonzero().squeeze(1)


def _length(inputs: AdvantageInput) -> Tensor:
    return per_trajectory(_steps(inputs), inputs.cu_seqlens)


THROUGH_OBSERVATIONS = CriticEstimator(_estimate, _length, supervised=lambda inputs: inputs.mask)
