"""GRPO (arXiv 2402.03300, Eq. 3): the clipped surrogate of `ppo_clip`, averaged per answer and then over answers.

    maximise  1/G sum_i 1/|o_i| sum_t  min(rho_it * A_it, clip(rho_it, 1 - eps_low, 1 + eps_high) * A_it)

As a token loss it is `clipped_surrogate`, with these defaults; what is GRPO's own is the group advantage, made elsewhere, and
the norm `seq_mean`, which the catalog declares and the caller applies. Choices of ours: no KL term, as no reference model is
loaded; eps 0.2, as the paper gives no value; |o_i| counts action tokens.
"""

from __future__ import annotations

from trainer.losses.ppo_clip import clipped_surrogate
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput


def grpo_loss(
    inputs: PolicyLossInput, *, eps_low: float = 0.2, eps_high: float = 0.2, old: Behaviour = "trainer"
) -> PolicyLossOutput:
    """`clipped_surrogate` with GRPO's defaults. eps_low, eps_high: ratio units, below and above 1. Norm: `seq_mean`."""
    return clipped_surrogate(inputs, eps_low=eps_low, eps_high=eps_high, old=old)
