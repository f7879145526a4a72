"""CISPO (arXiv 2506.13585, Eq. 4-5): the importance weight is clipped, never the token.

    maximise  1/(sum_i |o_i|) sum_i sum_t  sg(min(rho_it, 1 + eps_high)) * A_it * log pi_theta(o_it)
    rho_it  = pi_theta(o_it) / pi_old(o_it)

Every valid token keeps a gradient. Norm: `token_global`, which the catalog declares and the caller applies.

Choices of ours: no lower bound, which the paper switches off too; eps_high 0.28, as the paper gives no value; pi_old is the
engine's policy by default, as under the trainer's own rho == 1 in the one step of a batch; the count is that of the global
batch, not of one group.
"""

from __future__ import annotations

import math

from trainer.losses.dis import weighted_logprobs
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput, log_ratio


def cispo_loss(inputs: PolicyLossInput, *, eps_high: float = 0.28, old: Behaviour = "rollout") -> PolicyLossOutput:
    """token_loss = -sg(min(rho, 1 + eps_high)) * A * log pi_theta. eps_high: ratio units, above 1."""
    delta, valid = log_ratio(inputs, old)
    return weighted_logprobs(inputs, valid, delta.clamp(max=math.log1p(eps_high)))
