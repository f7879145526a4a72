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

from trainer.losses.types import PolicyLossInput, PolicyLossOutput


def log_band(eps_low: float, eps_high: float) -> tuple[float, float]:
    """(log(1 - eps_low), log(1 + eps_high)) in nats; the lower bound is -inf from eps_low = 1 on."""
    return math.log1p(-eps_low) if eps_low < 1 else -math.inf, math.log1p(eps_high)


def dis_loss(inputs: PolicyLossInput, *, eps_low: float, eps_high: float) -> PolicyLossOutput:
    """token_loss = -sg(f(rho)) * A * log pi_theta per token. eps_low, eps_high: ratio units, above and below 1.

    An action token with a non-finite log-ratio is rejected, as one outside the band; loss and gradient stay finite.
    """
    logprobs = inputs.logprobs.float()
    low, high = log_band(eps_low, eps_high)
    # Select before exp: a masked infinity times zero would be NaN, in the loss or in its gradient.
    delta = torch.where(inputs.mask, logprobs.detach() - inputs.rollout_logprobs.float(), 0.0)
    # Strict comparisons also reject NaN, and either infinity against an infinite bound.
    keep = inputs.mask & (delta > delta.new_tensor(low)) & (delta < delta.new_tensor(high))
    weight = torch.where(keep, torch.where(keep, delta, 0.0).exp(), 0.0)
    coefficient = torch.where(keep, weight * inputs.advantages.detach().float(), 0.0)
    return PolicyLossOutput(token_loss=-coefficient * torch.where(keep, logprobs, 0.0), keep=keep, weight=weight)
