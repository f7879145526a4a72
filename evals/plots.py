"""The plots of a report, as one inline SVG.

Flows in: a `Result` or a `Comparison`. Flows out: an `<svg>` element with text as text, the same for the same input. Text from
outside (terminations) is escaped by matplotlib and never read as its formulas.
"""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np

from evals import statistics as st
from evals.compare import Comparison
from evals.result import Result
from evals.summary import summarize
from evals.tables import printable
from harness.errors import ConfigError

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sao",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
}
BINS = 30
LABEL = 24
"""Characters of a termination that are shown."""


def svg(of: Result | Comparison) -> str:
    """Raises `ConfigError` if matplotlib is missing."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install matplotlib, or take the report as text, Markdown or JSON"
        raise ConfigError("the HTML report needs matplotlib, which is not installed", hint=hint) from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 7 if isinstance(of, Result) else 3.8), layout="constrained")
        if isinstance(of, Result):
            _result(figure, of)
        else:
            _comparison(figure, of)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _result(figure: Any, result: Result) -> None:
    (by_problem, turns), (terminations, tokens) = figure.subplots(2, 2)
    means = np.sort(st.known(st.problem_means(result.successes)))
    _columns(by_problem, means)
    by_problem.set(title="Success by problem, sorted", xlabel="problem", ylabel="share of runs", ylim=(0, 1.02))
    for axes, name, values in (
        (turns, "Turns", [s.turns for s in result.judged]),
        (tokens, "Tokens", [s.tokens for s in result.judged]),
    ):
        axes.hist(values, bins=_edges(values), histtype="stepfilled")
        axes.set(title=f"{name} per judged sample", xlabel=name.lower(), ylabel="samples")
    counts = summarize(result).terminations
    terminations.barh(range(len(counts)), list(counts.values()))
    terminations.set_yticks(range(len(counts)), [printable(name)[:LABEL] for name in counts])
    terminations.invert_yaxis()
    terminations.set(title="Terminations", xlabel="samples")


def _edges(values: list[int]) -> Any:
    """Of bins that each hold as many whole numbers, about `BINS` of them."""
    low, high = min(values, default=0), max(values, default=0)
    width = (high - low) // BINS + 1
    return np.arange(low, high + width + 1, width) - 0.5


def _comparison(figure: Any, c: Comparison) -> None:
    by_problem, bootstrap = figure.subplots(1, 2)
    points = np.sort(c.differences) * 100
    _columns(by_problem, points)
    by_problem.axhline(0, color="black", linewidth=0.8)
    by_problem.set(title="A minus B by problem, sorted", xlabel="problem", ylabel="points")
    bootstrap.hist(st.resampled_means(c.differences) * 100, bins=BINS, histtype="stepfilled")
    for edge in (c.low, c.high):
        bootstrap.axvline(edge * 100, color="black", linestyle="--", linewidth=1)
    bootstrap.axvline(0, color="tab:red", linewidth=1)
    bootstrap.set(title="Bootstrap of the difference (dashed: 95 %)", xlabel="A minus B, points", ylabel="resamples")


def _columns(axes: Any, heights: st.Floats) -> None:
    """Bars without gaps, drawn as one path: a suite may have hundreds."""
    axes.stairs(heights, np.arange(len(heights) + 1) + 0.5, fill=True)
