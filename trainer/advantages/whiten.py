"""Global advantage whitening, an option: SAO (arXiv 2607.07508) does not mention it, and Eq. 1 uses the raw advantage."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

EPS = 1e-8


def whiten(adv: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the action tokens of all ranks in `group`, [N] fp32; zero on observation tokens.

    adv: [N] float. mask: [N] bool. var is the sample variance (n - 1). Returns `adv` unchanged if all ranks hold n < 2 actions.
    A collective if `torch.distributed` is initialised: every rank must call it, also one without action tokens.
    """
    selected = adv[mask].double()
    moments = torch.stack([selected.new_tensor(len(selected)), selected.sum(), selected.dot(selected)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(moments, group=group)
    n, total, squares = moments.tolist()
    if n < 2:
        return adv
    mean = total / n
    variance = max(squares - n * mean * mean, 0.0) / (n - 1)
    white = ((selected - mean) * (variance + EPS) ** -0.5).float()
    return torch.zeros(adv.shape, dtype=torch.float32, device=adv.device).masked_scatter_(mask, white)
