"""What came out of one run, as arrays over steps and a few numbers.

Flows in: a run folder's `metrics.jsonl`, `summary.json` and `ledger.sqlite`. Flows out: a `Curve`. What a metrics row does not
have is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evals.result import load
from evals.statistics import mean_success
from evals.switches import moving_mean
from harness.errors import ConfigError

Floats = npt.NDArray[np.float64]

SERIES = {
    "reward": ("reward/mean",),
    "explained variance": ("value/ev",),
    "critic gradient norm": ("grad/critic_0",),
    "clip ratio": ("dis/mask_frac",),
    "staleness": ("staleness/mean",),
    "entropy": ("entropy/exact",),
    "action tokens": ("batch/action_tokens",),
    "episodes": ("batch/episodes",),
    "prompts": ("batch/unique_prompts",),
}
"""Name in a report -> metrics."""
LAST = 30
"""Steps over which a late value is the mean."""
COLLAPSE = 0.5
"""A run has collapsed when the 10-step mean reward falls below this share of its highest so far, and stays there to the end."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    series: dict[str, Floats]
    """[steps] by the names of `SERIES`."""
    success: float | None
    """Held-out success of the final policy; None if the run has not ended."""
    before: float | None
    """Of the initial policy."""
    wall_s: float | None
    suites: dict[str, float]
    """Success on suites of `sao eval` by name."""

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self.series["reward"])

    def late(self, name: str) -> float:
        """Mean of the last 30 steps; NaN of nothing."""
        return nanmean(self.series[name][-LAST:])

    def mean(self, name: str) -> float:
        """Mean over all steps; NaN of nothing."""
        return nanmean(self.series[name])

    def total(self, name: str) -> float:
        """Sum over all steps."""
        return float(np.nansum(self.series[name]))

    @property
    def peak(self) -> float:
        """Highest 10-step mean reward."""
        return float(moving_mean(self.series["reward"]).max()) if self.steps else float("nan")

    @property
    def collapsed(self) -> int | None:
        """The step from which on the reward stays below half of its peak before; None if it has not collapsed."""
        return collapse(self.series["reward"])


def collapse(rewards: Floats) -> int | None:
    """See `COLLAPSE`; steps are counted from 1. rewards: [steps]."""
    if not len(rewards):
        return None
    smooth = moving_mean(rewards)
    below = smooth < COLLAPSE * np.maximum.accumulate(smooth)
    if not below[-1]:
        return None
    first = len(below) - int(np.argmin(below[::-1])) if not below.all() else 0
    return first + len(rewards) - len(smooth) + 1


def load_curve(run: Path, evals: Sequence[Path] = ()) -> Curve:
    """`evals`: folders of `sao eval`. Raises `ConfigError` if a file cannot be read."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").is_file() else {}
        suites = {result.suite: mean_success(result.successes) for result in map(load, evals)}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{run}: cannot be read: {error!r}", hint="remove the damaged run, and run it again") from error
    heldout = summary.get("heldout", {})
    return Curve(
        series={name: column(rows, keys) for name, keys in SERIES.items()},
        success=heldout.get("after", {}).get("success"),
        before=heldout.get("before", {}).get("success"),
        wall_s=summary.get("wall_s"),
        suites=suites,
    )


def column(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Floats:
    """The first of `keys` that a row has, [rows]."""
    found = ([row[key] for key in keys if row.get(key) is not None] for row in rows)
    return np.array([values[0] if values else np.nan for values in found], np.float64)


def nanmean(values: Floats) -> float:
    """Of what is there; NaN of nothing."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
