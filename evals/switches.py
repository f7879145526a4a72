"""How a run comes through switches of the preference: numbers of one reward curve, and of two arms over the same seeds.

Flows in: the mean reward of each step, the steps after which the preference switched. Flows out: plain numbers (algorithm.md
6.2).

| name | formula |
|---|---|
| `area` | sum of the mean rewards of the first 60 steps of a phase (reward x steps) |
| `lowest` | lowest 10-step mean within them |
| `lag` | steps until a 10-step mean reaches half of the plateau before the switch; None: never in this phase |
| `plateau` | mean reward of the last 30 steps of a phase |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evals.statistics import Floats

AREA = 60
SMOOTH = 10
PLATEAU = 30


@dataclass(frozen=True, slots=True)
class PhaseNumbers:
    """One phase of one run; see the module docstring."""

    area: float
    lowest: float
    lag: int | None
    plateau: float


def phase_numbers(rewards: Floats, starts: Sequence[int]) -> list[PhaseNumbers]:
    """Of each phase that has begun. rewards: [steps]; starts: first step of each phase, counted from 0."""
    ends = [*starts[1:], len(rewards)]
    found: list[PhaseNumbers] = []
    for start, end in zip(starts, ends, strict=True):
        phase = rewards[start : min(end, len(rewards))]
        if not len(phase):
            break
        smooth = moving_mean(phase)
        goal = found[-1].plateau / 2 if found else np.inf
        reached = np.flatnonzero(smooth >= goal)
        found.append(
            PhaseNumbers(
                area=float(phase[:AREA].sum()),
                lowest=float(moving_mean(phase[:AREA]).min()),
                lag=int(reached[0]) + min(SMOOTH, len(phase)) if len(reached) else None,
                plateau=float(phase[-PLATEAU:].mean()),
            )
        )
    return found


def moving_mean(values: Floats) -> Floats:
    """Means of 10 neighbours; of all, where there are fewer."""
    width = min(SMOOTH, len(values))
    return np.convolve(values, np.ones(width) / width, mode="valid")
