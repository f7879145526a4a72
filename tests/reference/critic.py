"""The critic's loss and how well it explains the returns (specification, sections 3.2 and 8.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Ragged = Sequence[Sequence[float]]
"""Per trajectory its action tokens."""


def explained_variance(values: Ragged, targets: Ragged, weighting: Literal["token", "trajectory", "first"]) -> float:
    """1 - Var(G - V) / Var(G), population variances; NaN where the targets hardly vary."""
    weights, errors, goals = [], [], []
    for trajectory_values, trajectory_targets in zip(values, targets, strict=True):
        for t, (value, target) in enumerate(zip(trajectory_values, trajectory_targets, strict=True)):
            if weighting == "first" and t > 0:
                continue
            weights.append(1.0 / len(trajectory_values) if weighting == "trajectory" else 1.0)
            errors.append(target - value)
            goals.append(target)
    spread = _variance(goals, weights)
    return math.nan if spread < 1e-8 else 1.0 - _variance(errors, weights) / spread


def _variance(numbers: list[float], weights: list[float]) -> float:
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, numbers, strict=True)) / total
    return sum(w * (x - mean) ** 2 for w, x in zip(weights, numbers, strict=True)) / total


def squared_error(
    values: Sequence[float], targets: Sequence[float], old_values: Sequence[float] | None = None, clip: float | None = None
) -> list[float]:
    """(V - G)^2 per token; with `clip` the larger of it and of the error of V kept within `clip` of the old value."""
    found = []
    for t, (value, target) in enumerate(zip(values, targets, strict=True)):
        error = (value - target) ** 2
        if clip is not None and old_values is not None:
            near = min(max(value, old_values[t] - clip), old_values[t] + clip)
            error = max(error, (near - target) ** 2)
        found.append(error)
    return found
