"""Global advantage whitening, an option: SAO (arXiv 2607.07508) does not mention it, and Eq. 1 uses the raw advantage."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

EPS = 1e-8


def whiten(adv: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, *, centre: bool = True) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the action tokens of all ranks in `group`, [N] fp32; zero on observation tokens.

    adv: [N] float. mask: [N] bool. var is the sample variance (n - 1). Returns `adv` unchanged if all ranks hold n < 2 actions.
    centre=False keeps the mean, A / sqrt(var + 1e-8), and divides nothing if var < 1e-8: a constant would become huge.
    A collective if `torch.distributed` is initialised: every rank must call it, also one without action tokens.
    """
    selected = adv[mask].double()
    n, total = _sum(torch.stack([selected.new_tensor(len(selected)), selected.sum()]), group)
    if n < 2:
        return adv
    centred = selected - total / n
    (squares,) = _sum(centred.dot(centred)[None], group)
    variance = squares / (n - 1)
    if centre:
        white = centred * (variance + EPS) ** -0.5
    else:
        white = selected * (variance + EPS) ** -0.5 if variance >= EPS else selected
    return torch.zeros(adv.shape, dtype=torch.float32, device=adv.device).masked_scatter_(mask, white.float())


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """x [k] summed over the ranks."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x, group=group)
    numbers: list[float] = x.tolist()
    return numbers
