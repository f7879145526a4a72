"""Truncated importance sampling: the rollout policy corrected up to a cap (V-trace's rho-bar, arXiv 1802.01561, Eq. 1).

    maximise  E_t[ sg(min(rho_t, cap)) * A_t * log pi_theta(a_t | s_t) ]
    rho_t   = pi_theta(a_t | s_t) / pi_rollout(a_t | s_t)

It is CISPO with another bound. Choices of ours: the plain policy gradient stands under the weight, in place of a clipped
surrogate with a ratio of its own; cap 2; the norm `token_global`, which the catalog declares and the caller applies.
"""

from __future__ import annotations

import math

from trainer.losses.dis import weighted_logprobs
from trainer.losses.types import PolicyLossInput, PolicyLossOutput, log_ratio


def tis_loss(inputs: PolicyLossInput, *, cap: float = 2.0) -> PolicyLossOutput:
    """token_loss = -sg(min(rho, cap)) * A * log pi_theta. cap: ratio units."""
    delta, valid = log_ratio(inputs, "rollout")
    return weighted_logprobs(inputs, valid, delta.clamp(max=math.log(cap)))
