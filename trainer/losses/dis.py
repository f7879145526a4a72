"""Direct Importance Sampling: the SAO policy loss (arXiv 2607.07508, Eq. 1-3).

    maximise  E_t[ f(rho_t) * A_t * log pi_theta(a_t | s_t) ]
    rho_t   = pi_theta(a_t | s_t) / pi_rollout(a_t | s_t)           the engine's own log-prob; no old-policy forward
    f(x)    = x  if 1 - eps_low < x < 1 + eps_high,  else 0         a mask, whatever the sign of A; not a clamp

The paper leaves two things open. f(rho_t) is detached here: differentiated, its gradient would carry a factor
(1 + log pi), which turns the sign for every token with p < 1/e. And the band is open, as printed in Eq. 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses.types import PolicyLossInput, PolicyLossOutput, log_ratio


def log_band(eps_low: float, eps_high: float) -> tuple[float, float]:
    """(log(1 - eps_low), log(1 + eps_high)) in nats; the lower bound is -inf from eps_low = 1 on."""
    return math.log1p(-eps_low) if eps_low < 1 else -math.inf, math.log1p(eps_high)


def weighted_logprobs(inputs: PolicyLossInput, keep: Tensor, log_weight: Tensor) -> PolicyLossOutput:
    """token_loss = -sg(exp(log_weight)) * A * log pi_theta on the kept tokens; keep [N] bool, log_weight [N] fp32."""
    # Select before exp: a masked infinity times zero would be NaN, in the loss or in its gradient.
    weight = torch.where(keep, torch.where(keep, log_weight.detach(), 0.0).exp(), 0.0)
    coefficient = torch.where(keep, weight * inputs.advantages.detach().float(), 0.0)
    return PolicyLossOutput(-coefficient * torch.where(keep, inputs.logprobs.float(), 0.0), keep, weight)


def dis_loss(inputs: PolicyLossInput, *, eps_low: float = 0.8, eps_high: float = 3.0) -> PolicyLossOutput:
    """token_loss = -sg(f(rho)) * A * log pi_theta per token. eps_low, eps_high: ratio units, below and above 1.

    An action token with a non-finite log-ratio is rejected, as one outside the band; loss and gradient stay finite.
    """
    delta, valid = log_ratio(inputs, "rollout")
    low, high = delta.new_tensor(log_band(eps_low, eps_high))
    return weighted_logprobs(inputs, valid & (delta > low) & (delta < high), delta)
