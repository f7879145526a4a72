"""The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7), with separate bounds ("clip-higher": eps_high > eps_low).

    maximise  E_t[ min(rho_t * A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) * A_t) ]
    rho_t   = pi_theta(a_t | s_t) / pi_old(a_t | s_t)

pi_old is the trainer's policy before this step, as in the paper ("trainer"), or the engine's ("rollout"). With one optimizer
step per batch the former makes rho_t == 1 where the gradient is taken: nothing is clipped, nothing off-policy is corrected.

Choices of ours: a ratio exactly on its bound keeps its gradient. A clipped token has token_loss 0, not the constant
clip(rho) * A of the formula, which has no gradient; the loss VALUE is therefore that of the kept tokens only. The formula has
no bound for A < 0 and a large rho, so a token with |log rho| > MAX_LOG_RATIO is taken for broken data and rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.dis import log_band
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput, log_ratio

MAX_LOG_RATIO = 20.0
"""Nats; a ratio of 5e8."""


def surrogate(delta: Tensor, valid: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float) -> PolicyLossOutput:
    """The clipped surrogate of log-ratios delta, [N] fp32 with gradient; only tokens with valid, [N] bool, are read."""
    low, high = delta.new_tensor(log_band(eps_low, eps_high))
    at, a = delta.detach(), advantages.detach().float()
    clipped = ((a > 0) & (at > high)) | ((a < 0) & (at < low))
    keep = valid & ~clipped & (at.abs() <= MAX_LOG_RATIO)
    rho = torch.where(keep, delta, 0.0).exp()
    return PolicyLossOutput(-torch.where(keep, a, 0.0) * rho, keep, torch.where(keep, rho.detach(), 0.0))


def clipped_surrogate(inputs: PolicyLossInput, *, eps_low: float, eps_high: float, old: Behaviour) -> PolicyLossOutput:
    """token_loss = -rho * A where the minimum is the unclipped term, else 0. eps_low, eps_high: ratio units, around 1."""
    delta, valid = log_ratio(inputs, old)
    return surrogate(delta, valid, inputs.advantages, eps_low=eps_low, eps_high=eps_high)


def ppo_clip_loss(
    inputs: PolicyLossInput, *, eps_low: float = 0.2, eps_high: float = 0.2, old: Behaviour = "trainer"
) -> PolicyLossOutput:
    """PPO's own bounds. Norm: `token_global`, the mean over time steps of the paper's E_t."""
    return clipped_surrogate(inputs, eps_low=eps_low, eps_high=eps_high, old=old)
