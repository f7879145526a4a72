"""Two results over the same problems: is there a difference, and what could have been seen?

Flows in: two `Result`s of one suite. Flows out: a `Comparison` over the problems that both have judged. The test is McNemar's
with one run per problem, else sign flips of the per-problem means: McNemar's needs pairs, and the runs of a problem have no
partners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from evals import statistics as st
from evals.result import Result
from evals.statistics import ALPHA, Floats
from harness.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """A minus B; shares of 1, not points."""

    a: Result
    b: Result
    """Both over the common problems, in one order."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    lost: tuple[str, ...]
    """Problems of both, of which one has no judged run."""
    unlike: dict[str, tuple[Any, Any]]
    """Settings that differ; None where one has none."""
    differences: Floats
    """[problems] mean over the runs of A minus that of B."""
    difference: float
    low: float
    high: float
    """95 % interval: paired bootstrap over problems."""
    sign_flip: float
    mcnemar: float | None
    """None with several runs per problem."""
    ahead_a: int
    ahead_b: int
    """Problems on which A, B has the higher mean; with one run each these are the discordant pairs."""
    correlation: float
    """Of the per-problem means; NaN if one of them never varies."""
    detectable: float
    """Smallest difference that such a comparison finds four times in five, at the spread observed; infinite: none."""
    detectable_unpaired: float
    """The same if the problems had not been paired."""

    @property
    def p(self) -> float:
        """Of the test that decides."""
        return self.sign_flip if self.mcnemar is None else self.mcnemar

    @property
    def found(self) -> bool:
        """True if both agree that there is a difference: the test, and the interval that leaves out 0."""
        return decides(self.p, self.low, self.high)

    @property
    def asked_otherwise(self) -> tuple[str, ...]:
        """What a difference may come from besides the models."""
        return tuple(name for name in ("environment", "split", "agent", "limits") if name in self.unlike)

    @property
    def verdict(self) -> str:
        """One sentence, with the numbers it rests on; and one of what else may be the cause."""
        if not self.asked_otherwise:
            return self._verdict
        names = ", ".join(self.asked_otherwise)
        return f"{self._verdict} They were not asked the same ({names}): this is not about the models alone."

    @property
    def _verdict(self) -> str:
        n = len(self.differences)
        interval = f"95 % interval {self.low * 100:+.1f} to {self.high * 100:+.1f}; {p_value(self.p)}"
        if self.found:
            ahead = "A is ahead of B" if self.difference > 0 else "B is ahead of A"
            return f"{ahead}: A minus B is {self.difference * 100:+.1f} points on {n} problems ({interval})."
        numbers = f"A minus B is {self.difference * 100:+.1f} points, {interval}"
        if math.isinf(self.detectable):
            return f"No difference found ({numbers}); with {n} problems hardly any could be."
        below = f"a difference below {self.detectable * 100:.1f} points would be missed more than one time in five"
        return f"No difference found ({numbers}); {below}."


def decides(p: float, low: float, high: float) -> bool:
    """The rule of `Comparison.found`."""
    return p < ALPHA and not low <= 0 <= high


def p_value(p: float) -> str:
    """As it is printed."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def compare(a: Result, b: Result) -> Comparison:
    """Raises `ConfigError` if the suites differ or no problem was judged in both."""
    if a.suite != b.suite:
        raise ConfigError(f"the results are of two suites, {a.suite!r} and {b.suite!r}", hint="compare results of one suite")
    both = set(a.problems) & set(b.problems)
    of_a, of_b = (dict(zip(r.problems, st.problem_means(r.successes), strict=True)) for r in (a, b))
    lost = tuple(p for p in sorted(both) if math.isnan(of_a[p]) or math.isnan(of_b[p]))
    common = sorted(both - set(lost))
    if not common:
        raise ConfigError(
            f"no problem was judged in both results ({len(both)} are in both)", hint="compare results over the same problems"
        )
    means_a, means_b = (np.array([of[p] for p in common]) for of in (of_a, of_b))
    differences = means_a - means_b
    difference, low, high = st.paired(differences)
    ahead_a, ahead_b = int((differences > 0).sum()), int((differences < 0).sum())
    spread_a, spread_b = st.deviation(means_a), st.deviation(means_b)
    step = 1 / max(a.runs, b.runs)
    return Comparison(
        a=a.only(common),
        b=b.only(common),
        only_a=tuple(sorted(set(a.problems) - set(b.problems))),
        only_b=tuple(sorted(set(b.problems) - set(a.problems))),
        lost=lost,
        unlike={
            key: (a.settings.get(key), b.settings.get(key))
            for key in sorted(a.settings.keys() | b.settings.keys())
            if a.settings.get(key) != b.settings.get(key)
        },
        differences=differences,
        difference=difference,
        low=low,
        high=high,
        sign_flip=st.sign_flip(differences),
        mcnemar=st.mcnemar(ahead_a, ahead_b) if a.runs == b.runs == 1 else None,
        ahead_a=ahead_a,
        ahead_b=ahead_b,
        correlation=float(np.corrcoef(means_a, means_b)[0, 1]) if spread_a > 0 and spread_b > 0 else math.nan,
        detectable=st.detectable(st.deviation(differences), len(common), step),
        detectable_unpaired=st.detectable(st.pair_deviation(spread_a, spread_b, 0.0), len(common), step),
    )
