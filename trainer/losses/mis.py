"""Masked importance sampling, "IcePop" (arXiv 2510.18855), in the form with one ratio (arXiv 2512.16144, Eq. 1).

    maximise  1/(sum_i |y_i|) sum_i sum_t  sg(rho_it * 1[low <= rho_it <= high]) * A_it * log pi_theta(y_it)
    rho_it  = pi_theta(y_it) / pi_rollout(y_it)

DIS with a closed band. The original multiplies a clipped surrogate that has a second ratio, to an old trainer policy; in one
step per batch that one is 1. Norm: `token_global`, which the catalog declares and the caller applies. Choices of ours: the
weight is detached, as in `dis`; the band [0.5, 5]; the count is that of the global batch.
"""

from __future__ import annotations

import math

from trainer.losses.dis import weighted_logprobs
from trainer.losses.types import PolicyLossInput, PolicyLossOutput, log_ratio


def mis_loss(inputs: PolicyLossInput, *, low: float = 0.5, high: float = 5.0) -> PolicyLossOutput:
    """token_loss = -sg(rho) * A * log pi_theta where low <= rho <= high, else 0. low, high: ratio units."""
    delta, valid = log_ratio(inputs, "rollout")
    lower, upper = delta.new_tensor([math.log(low), math.log(high)])
    return weighted_logprobs(inputs, valid & (delta >= lower) & (delta <= upper), delta)
