"""Global sums: numerators and denominators are added up over micro-batches and ranks, then divided once.

A mean of means weighs ranks and micro-batches wrongly, so nothing is divided before a report. Extremes are exact, and so are
percentiles, because the values behind them are gathered. Every rank must add the same names, also for zero tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Metrics = dict[str, float | None]


class Sums:
    """Named fp64 totals (of any shape), maxima, minima and fp32 collections, on the device of what was added."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.minima: dict[str, Tensor] = {}
        self.collected: dict[str, list[Tensor]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Add the sum of all elements of x."""
        self._add(name, x.detach().sum(dtype=torch.float64))

    def add_by(self, name: str, index: Tensor, x: Tensor, bins: int) -> None:
        """Add x [n] to the total of its bin: index [n] int64 in 0 .. bins - 1."""
        total = torch.zeros(bins, dtype=torch.float64, device=x.device)
        self._add(name, total.index_add_(0, index, x.detach().double()))

    def maximum(self, name: str, x: Tensor) -> None:
        """Keep the largest element of x; -inf while there was none."""
        x = _with(x, -math.inf).max()
        self.maxima[name] = torch.maximum(self.maxima[name], x) if name in self.maxima else x

    def minimum(self, name: str, x: Tensor) -> None:
        """Keep the smallest element of x; inf while there was none."""
        x = _with(x, math.inf).min()
        self.minima[name] = torch.minimum(self.minima[name], x) if name in self.minima else x

    def collect(self, name: str, x: Tensor) -> None:
        """Keep every element of x as fp32. Names that are collected together stay aligned."""
        self.collected.setdefault(name, []).append(x.detach().float().flatten())

    def _add(self, name: str, total: Tensor) -> None:
        self.totals[name] = self.totals[name] + total if name in self.totals else total

    def scalar(self, name: str) -> float:
        """A total of no dimension."""
        return float(self.totals[name].item())

    def vector(self, name: str) -> list[float]:
        """A total by bins."""
        return [float(x) for x in self.totals[name].tolist()]

    def values(self, name: str) -> Tensor:
        """Everything that was collected, [n] fp32."""
        return torch.cat(self.collected[name])


def reduce(sums: Sums, group: dist.ProcessGroup | None = None) -> Sums:
    """The same over all ranks of `group`; totals and extremes come to the CPU. At most five collectives; none without ranks."""
    out = Sums()
    out.totals = _all_reduce(sums.totals, dist.ReduceOp.SUM, group)
    out.maxima = _all_reduce(sums.maxima, dist.ReduceOp.MAX, group)
    out.minima = _all_reduce(sums.minima, dist.ReduceOp.MIN, group)
    out.collected = _gather({name: sums.values(name) for name in sorted(sums.collected)}, group)
    return out


def divide(numerator: float, denominator: float) -> float:
    """NaN where there is nothing to divide by."""
    return numerator / denominator if denominator else math.nan


def percentiles(x: Tensor, percents: Sequence[float]) -> list[float]:
    """Exact, linear between neighbours; NaN of nothing."""
    if not len(x):
        return [math.nan] * len(percents)
    return [float(p) for p in np.percentile(x.double().cpu().numpy(), percents)]


def finite(metrics: Mapping[str, float]) -> Metrics:
    """None in place of what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def ranked() -> bool:
    """True inside a process group."""
    return dist.is_available() and dist.is_initialized()


def _with(x: Tensor, end: float) -> Tensor:
    return torch.cat([x.detach().flatten().double(), x.new_full((1,), end, dtype=torch.float64)])


def _all_reduce(parts: dict[str, Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    if not parts:
        return {}
    names = sorted(parts)
    flat = torch.cat([parts[name].flatten() for name in names])
    if ranked():
        dist.all_reduce(flat, op=op, group=group)
    pieces = torch.split(flat.cpu(), [parts[name].numel() for name in names])
    return {name: piece.view(parts[name].shape) for name, piece in zip(names, pieces, strict=True)}


def _gather(parts: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, list[Tensor]]:
    if not parts or not ranked():
        return {name: [x] for name, x in parts.items()}
    local = torch.cat(list(parts.values()))
    sizes = torch.tensor([len(x) for x in parts.values()], dtype=torch.int64, device=local.device)
    all_sizes = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_sizes, sizes, group=group)
    lengths = [size.tolist() for size in all_sizes]
    padded = local.new_zeros(max(sum(length) for length in lengths))
    padded[: len(local)] = local
    everyone = [torch.empty_like(padded) for _ in lengths]
    if len(padded):
        dist.all_gather(everyone, padded, group=group)
    by_rank = [torch.split(x[: sum(length)], length) for x, length in zip(everyone, lengths, strict=True)]
    return {name: [pieces[i] for pieces in by_rank] for i, name in enumerate(parts)}
