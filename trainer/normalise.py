"""What the summed policy loss is divided by: always counts over the GLOBAL batch, so that layout changes nothing.

    token_global    1 / N                    N: action tokens of all ranks, rejected ones included (SAO; DAPO Eq. 8)
    token_kept      1 / kept                 kept: tokens that the loss did not reject
    seq_mean        1 / (B * l_b)            mean over trajectories of their token means (GRPO, arXiv 2402.03300, Eq. 3)
    seq_sum_const   1 / (B * L_max)          a constant length (Dr.GRPO, arXiv 2503.20783)

B: trajectories with an action token. l_b: action tokens of trajectory b. A mean per micro-batch or rank would weigh tokens by
their neighbours: losses [.5, -.2, .3] and [1.0] in two micro-batches have the mean 0.4, not 0.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the global batch."""

    actions: float
    trajectories: float
    max_length: float
    """L_max, tokens."""


def trajectory_weights(norm: str, counts: Tensor, totals: Totals) -> Tensor:
    """Factor of every token loss of each trajectory, [B] fp32; counts: its action tokens, [B] int.

    `token_kept` is `token_global` here: the kept tokens are known only after the last forward pass, and the gradients are then
    multiplied by `kept_correction`.
    """
    ones = torch.ones(len(counts), dtype=torch.float64, device=counts.device)
    if norm in ("token_global", "token_kept"):
        weights = ones / max(totals.actions, 1.0)
    elif norm == "seq_mean":
        weights = ones / (counts.clamp(min=1) * max(totals.trajectories, 1.0))
    elif norm == "seq_sum_const":
        weights = ones / (max(totals.trajectories, 1.0) * totals.max_length)
    else:
        raise ValueError(f"no loss_norm {norm!r}")
    return weights.float()


def kept_correction(norm: str, actions: float, kept: float) -> float:
    """What the accumulated gradients are still to be multiplied by."""
    return actions / kept if norm == "token_kept" and kept else 1.0
