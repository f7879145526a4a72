"""Squared error of the critic, (V(s_t) - G_t)^2 on every action token (SAO, arXiv 2607.07508, section 2).

Tokens that DIS rejects are included: DIS is a mask of the policy loss. No clipping and no factor 1/2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared error per token, reward units squared, [N] fp32, zero on observation tokens; not normalised.

    values: [N] float with gradient. targets: [N] float, constant. mask: [N] bool, True on action tokens.
    """
    error = torch.where(mask, values.float() - targets.detach().float(), 0.0)
    return error.square()
