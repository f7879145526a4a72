"""DAPO (arXiv 2503.14476, Eq. 8): the clipped surrogate with a wider upper bound, averaged over all tokens.

    maximise  1/(sum_i |o_i|) sum_i sum_t  min(rho_it * A_it, clip(rho_it, 1 - eps_low, 1 + eps_high) * A_it)

As a token loss it is `clipped_surrogate`, with the paper's clip-higher defaults 0.2 / 0.28; what else is DAPO's own is the
norm `token_global`, which the catalog declares and the caller applies. Choices of ours: the count is that of the global batch,
not of one group; dynamic sampling and overlong shaping are no part of a loss.
"""

from __future__ import annotations

from trainer.losses.ppo_clip import clipped_surrogate
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput


def dapo_loss(
    inputs: PolicyLossInput, *, eps_low: float = 0.2, eps_high: float = 0.28, old: Behaviour = "trainer"
) -> PolicyLossOutput:
    """`clipped_surrogate` with DAPO's defaults. eps_low, eps_high: ratio units, below and above 1. Norm: `token_global`."""
    return clipped_surrogate(inputs, eps_low=eps_low, eps_high=eps_high, old=old)
