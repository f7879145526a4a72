"""Sizes of gradients and parameters by module group (`trainer.freeze.module_group`), exact over shards: every rank sums what it
holds, and one all-reduce adds that up. Replicated tensors are counted once.

| name | formula |
|---|---|
| `grad/{who}/{group}` | norm of the gradient of a group, before clipping; exactly 0 where frozen |
| `grad/{who}/{group}_rms` | the same / sqrt(elements of the group) |
| `update/{who}/{group}` | norm(theta_after - theta_before) / norm(theta_before) |

All of this is a collective, and the same on every rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.freeze import module_group
from trainer.measure.sums import Metrics, divide, finite, ranked

_MIX = (-7046029254386353131, -4658895280553007687)
"""Odd 64-bit multipliers of splitmix64."""
_CHUNK = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def group_norms(model: nn.Module) -> dict[str, tuple[float, float]]:
    """(norm, RMS) of the gradients of each module group; a parameter without gradient counts as zeros."""
    sizes: dict[str, int] = {}
    squares = _Squares(model)
    for name, parameter in model.named_parameters():
        group = module_group(name)
        sizes[group] = sizes.get(group, 0) + parameter.numel()
        if parameter.grad is not None:
            squares.add(group, owned(parameter.grad))
    norms = squares.norms()
    return {group: (norm, norm / math.sqrt(sizes[group])) for group, norm in norms.items()}


class Snapshot:
    """A model before a step: clones of this rank's shards of its trainable parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {n: owned(p.detach()).clone() for n, p in model.named_parameters() if p.requires_grad}
        self._size = _Squares(model)
        for name, parameter in model.named_parameters():
            self._size.add(module_group(name), owned(parameter.detach()))

    def update_ratio(self) -> dict[str, float]:
        """||theta - theta_before|| / ||theta_before|| of each module group; NaN where that was zero."""
        moved = _Squares(self._model)
        for name, parameter in self._model.named_parameters():
            if name in self._before:
                moved.add(module_group(name), owned(parameter.detach()) - self._before[name])
        size = self._size.norms()
        return {group: divide(norm, size[group]) for group, norm in moved.norms().items()}


def report_norms(who: str, norms: Mapping[str, tuple[float, float]]) -> Metrics:
    """Rows of `group_norms`; `who`: policy, critic_0, .."""
    return finite({f"grad/{who}/{g}": n for g, (n, _) in norms.items()}) | finite(
        {f"grad/{who}/{g}_rms": r for g, (_, r) in norms.items()}
    )


def report_ratios(who: str, ratios: Mapping[str, float]) -> Metrics:
    """Rows of `Snapshot.update_ratio`."""
    return finite({f"update/{who}/{group}": ratio for group, ratio in ratios.items()})


def frozen_checksum(model: nn.Module) -> int:
    """A 64-bit sum over the frozen parameters of bits times an odd weight of (name, position): the same for any sharding, and
    another one after any change of a single element.
    """
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    total = torch.zeros((), dtype=torch.int64, device=_device(model))
    for name, parameter in frozen:
        total = total + _checksum(name, parameter.detach())
    if ranked():
        dist.all_reduce(total)
    return int(total.item())


def owned(x: Tensor) -> Tensor:
    """What this rank answers for of a tensor: over all ranks, every element exactly once."""
    if isinstance(x, DTensor):
        at = x.device_mesh.get_coordinate() or ()
        first = all(i == 0 for i, placement in zip(at, x.placements, strict=True) if placement.is_replicate())
        x = x.to_local()
    else:
        first = not ranked() or dist.get_rank() == 0
    return x if first else x.new_empty((0, *x.shape[1:]))


class _Squares:
    """Sums of squares by module group, over ranks at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = sorted({module_group(name) for name, _ in model.named_parameters()})
        self._sums = {group: torch.zeros((), dtype=torch.float64, device=_device(model)) for group in self._groups}

    def add(self, group: str, x: Tensor) -> None:
        wide = torch.promote_types(x.dtype, torch.float32)
        self._sums[group] += torch.linalg.vector_norm(x, dtype=wide).double().square()

    def norms(self) -> dict[str, float]:
        total = torch.stack([self._sums[group] for group in self._groups])
        if ranked():
            dist.all_reduce(total)
        return dict(zip(self._groups, total.sqrt().tolist(), strict=True))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _checksum(name: str, x: Tensor) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for bits, position in _elements(x):
        weight = position * _MIX[0] + seed
        weight = (weight ^ (weight >> 31)) * _MIX[1] | 1
        total += (bits.long() * weight).sum()
    return total


def _elements(x: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """This rank's elements in chunks: their bits as integers, and their flat positions in the whole tensor."""
    shape = tuple(x.shape) or (1,)
    offsets = (0,) * len(shape)
    if isinstance(x, DTensor):
        _, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    local = owned(x)
    local = (local if local.ndim else local[None]).view(_BITS[local.element_size()])
    position = torch.zeros((), dtype=torch.int64, device=local.device)
    stride = 1
    for dim in reversed(range(1, len(shape))):
        along = (torch.arange(local.shape[dim], device=local.device) + offsets[dim]) * stride
        position = position + along.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    rows = max(1, _CHUNK // max(1, math.prod(local.shape[1:])))
    for start, part in zip(range(0, len(local), rows), torch.split(local, rows), strict=False):
        first = (torch.arange(len(part), device=local.device) + start + offsets[0]) * stride
        yield part, position + first.view(-1, *[1] * (len(shape) - 1))
