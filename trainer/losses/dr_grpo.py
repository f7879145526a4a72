"""Dr. GRPO (arXiv 2503.20783, section 3): GRPO without its division by the answer's length, which favours long failures.

    maximise  1/G sum_i 1/L_max sum_t  min(rho_it * A_it, clip(rho_it, 1 - eps_low, 1 + eps_high) * A_it)

As a token loss it is `clipped_surrogate`, with the same defaults as `grpo`; what differs is the advantage R - mean(R) without
a division by the standard deviation, made elsewhere, and the norm `seq_sum_const`, a constant in place of |o_i|, which the
catalog declares and the caller applies. Choice of ours: eps 0.2.
"""

from __future__ import annotations

from trainer.losses.ppo_clip import clipped_surrogate
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput


def dr_grpo_loss(
    inputs: PolicyLossInput, *, eps_low: float = 0.2, eps_high: float = 0.2, old: Behaviour = "trainer"
) -> PolicyLossOutput:
    """`clipped_surrogate` with Dr. GRPO's defaults. eps_low, eps_high: ratio units, around 1. Norm: `seq_sum_const`."""
    return clipped_surrogate(inputs, eps_low=eps_low, eps_high=eps_high, old=old)
