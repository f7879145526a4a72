"""The numbers of one result.

Flows in: a `Result`. Flows out: a `Summary`, whose numbers are NaN where nothing was judged. What an episode used is taken over
the judged samples; totals are over all, since lost ones cost as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evals import statistics as st
from evals.result import Result
from harness.task import Termination

CUT = frozenset(t.value for t in Termination if t.policy_caused) - {Termination.FINISHED.value}
"""Terminations by a limit."""
CORRELATION = 0.5
"""Assumed between the per-problem means of two systems, where only one is known."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Use:
    """What episodes used of something: mean and median of the judged samples, total of all."""

    mean: float
    median: float
    total: float


@dataclass(frozen=True, slots=True)
class Summary:
    """See `evals.statistics` for the formulas."""

    problems: int
    runs: int
    judged: int
    successes: int
    missing: int
    success: float
    """Mean over runs, then problems."""
    wilson: Interval
    clopper_pearson: Interval
    bootstrap: Interval
    """Over problems."""
    error_binomial: float
    error_problems: float
    by_run: tuple[float, ...]
    """Mean of each run over the problems judged in it."""
    pass_at: dict[int, tuple[float, int]]
    """k = 1, 2, 4 .. -> pass@k and over how many problems."""
    terminations: dict[str, int]
    """All samples."""
    truncated: float
    """Share of the judged samples that a limit ended."""
    uses: dict[str, Use]
    detectable_unpaired: float
    """Against another result over other problems of the kind, with the same spread."""
    detectable_paired: float
    """Against another result over the same problems, with the same spread and `CORRELATION`."""


def summarize(result: Result) -> Summary:
    """Everything about one result."""
    matrix = result.successes
    means = st.known(st.problem_means(matrix))
    judged = result.judged
    wins = int(np.nansum(matrix))
    spread = st.deviation(means)
    return Summary(
        problems=len(result.problems),
        runs=result.runs,
        judged=len(judged),
        successes=wins,
        missing=matrix.size - len(judged),
        success=st.mean_success(matrix),
        wilson=st.wilson(wins, len(judged)),
        clopper_pearson=st.clopper_pearson(wins, len(judged)),
        bootstrap=st.bootstrap(means),
        error_binomial=st.binomial_error(wins, len(judged)),
        error_problems=st.problem_error(matrix),
        by_run=tuple(st.mean_success(matrix[:, [run]]) for run in range(result.runs)),
        pass_at={2**i: st.pass_at(matrix, 2**i) for i in range(result.runs.bit_length())},
        terminations=dict(Counter(s.termination for s in result.samples).most_common()),
        truncated=sum(s.termination in CUT for s in judged) / len(judged) if judged else float("nan"),
        uses={
            "turns": _use([s.turns for s in judged], [s.turns for s in result.samples]),
            "tokens": _use([s.tokens for s in judged], [s.tokens for s in result.samples]),
            "action tokens": _use([s.action_tokens for s in judged], [s.action_tokens for s in result.samples]),
            "seconds": _use([s.seconds for s in judged], [s.seconds for s in result.samples]),
        },
        detectable_unpaired=_detectable(spread, 0.0, len(means), result.runs),
        detectable_paired=_detectable(spread, CORRELATION, len(means), result.runs),
    )


def _use(judged: Sequence[float], everything: Sequence[float]) -> Use:
    if not judged:
        return Use(float("nan"), float("nan"), float(sum(everything)))
    return Use(float(np.mean(judged)), float(np.median(judged)), float(sum(everything)))


def _detectable(spread: float, correlation: float, problems: int, runs: int) -> float:
    return st.detectable(st.pair_deviation(spread, spread, correlation), problems, 1 / runs)
