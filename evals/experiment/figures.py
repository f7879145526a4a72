"""The paper's curves, of any experiment: one SVG per series of a study, a line per arm, and a band over its seeds.

Flows in: curves by arm. Flows out: SVG text. Lines are 10-step means over seeds; bands reach from the lowest seed to the
highest. Of long curves every n-th step is drawn.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from evals.experiment.curves import Curve, Floats
from evals.switches import SMOOTH, moving_mean
from harness.errors import ConfigError

PANELS = ("reward", "explained variance", "critic gradient norm", "clip ratio", "staleness", "entropy")
POINTS = 100
"""Of a curve, at most."""


def draw(title: str, name: str, arms: Mapping[str, Sequence[Curve]], *, over_tokens: bool = False) -> str | None:
    """One figure; None if no arm has the series. `over_tokens`: the axis is action tokens consumed, not steps.

    Raises `ConfigError` without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("figures need matplotlib", hint='pip install "matplotlib>=3.10", the extra `report`') from error
    matplotlib.rcParams["svg.hashsalt"] = "sao"  # the same curves give the same file
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    for arm, curves in arms.items():
        lines = [smooth(curve.series[name]) for curve in curves]
        lines = [line for line in lines if not np.isnan(line).all()]
        if not lines:
            continue
        drawn = True
        middle, low, high = spread(lines)
        at: Floats = np.arange(len(middle), dtype=np.float64) + SMOOTH
        if over_tokens:
            tokens = spread([np.cumsum(curve.series["action tokens"]) for curve in curves if curve.steps])[0]
            at = tokens[len(tokens) - len(middle) :]
        at, middle, low, high = (values[:: -(-len(values) // POINTS)] for values in (at, middle, low, high))
        (line,) = axes.plot(at, middle, label=arm, linewidth=1.4)
        axes.fill_between(at, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    if not drawn:
        return None
    axes.set_title(title)
    axes.set_xlabel("action tokens" if over_tokens else "policy steps")
    axes.set_ylabel(name)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return " ".join(text.getvalue().split())  # points of a path stand on lines of their own


def smooth(values: Floats) -> Floats:
    """10-step means; a gap takes the last value before it, and windows that reach before the first value are NaN."""
    if not len(values):
        return values
    last = np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(len(values))))
    return moving_mean(values[last])


def spread(lines: Sequence[Floats]) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest at each step; where a run has ended, of those that go on."""
    table = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(table, 0), np.nanmin(table, 0), np.nanmax(table, 0)
