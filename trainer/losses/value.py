"""Squared error of the critic, (V(s_t) - G_t)^2 on every action token (SAO, arXiv 2607.07508, section 2).

Tokens that DIS rejects are included: DIS is a mask of the policy loss. No factor 1/2, and by default no clipping; with `clip`
= c it is the larger of the errors of V and of V moved at most c away from the value before the update, PPO's common form:

    max( (V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2 )
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, targets: Tensor, mask: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Squared error per token, reward units squared, [N] fp32, zero on observation tokens; not normalised.

    values: [N] float with gradient. targets: [N] float, constant. mask: [N] bool, True on action tokens.
    old_values: [N] float, constant, the values before the update; read with `clip` only. clip: reward units; None: no clipping.
    """
    v, g = torch.where(mask, values.float(), 0.0), torch.where(mask, targets.detach().float(), 0.0)
    loss = (v - g).square()
    if clip is None:
        return loss
    if old_values is None:
        raise ValueError("value clipping needs old_values")
    old = torch.where(mask, old_values.detach().float(), 0.0)
    return torch.maximum(loss, (old + (v - old).clamp(-clip, clip) - g).square())
