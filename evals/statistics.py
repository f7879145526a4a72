"""Statistics of success rates: intervals, errors, pass@k, tests of a difference, and the difference that can be found.

Flows in: counts; the matrix of successes [problems, runs] of a result (1, 0, NaN: missing); or one difference per problem.
Flows out: plain numbers, NaN where there is nothing to take them from. What is drawn at random is drawn with a fixed seed: the
same numbers give the same answer.

Two questions, two kinds of error. Over samples (binomial): every sample is taken for independent; with several runs of a
problem it is an upper bound for these very problems. Over problems: had other problems of the kind been in the suite; the runs
of a problem stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

ALPHA = 0.05
POWER = 0.8
Z95 = 1.959963984540054
RESAMPLES = 10_000
FEWEST = 6
"""Fewer problems that differ, even all in one direction, never have p < 0.05 (2 / 2^5 = 0.06)."""

Floats = npt.NDArray[np.float64]


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def clopper_pearson(successes: int, n: int) -> tuple[float, float]:
    """Exact 95 % interval of a binomial proportion (Clopper & Pearson 1934): both tails at 0.025; (0, 1) for n = 0."""
    return _tail(successes, n), 1.0 - _tail(n - successes, n)


def _tail(successes: int, n: int) -> float:
    """The proportion under which that many successes or more have probability 0.025, by bisection."""
    if successes == 0:
        return 0.0
    counts = np.arange(successes, n + 1)
    ways = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in counts])
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        tail = np.exp(ways + counts * math.log(p) + (n - counts) * math.log1p(-p)).sum()
        low, high = (p, high) if tail < ALPHA / 2 else (low, p)
    return low


def problem_means(successes: Floats) -> Floats:
    """[problems]: mean over the judged runs of each; NaN where none was judged."""
    judged = (~np.isnan(successes)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(successes, axis=1) / judged, np.float64)


def mean_success(successes: Floats) -> float:
    """avg@k: the mean over runs, then over problems; the accuracy of one try, NOT pass@k (algorithm.md 7)."""
    means = known(problem_means(successes))
    return float(means.mean()) if len(means) else math.nan


def known(values: Floats) -> Floats:
    """Those that are not NaN."""
    return values[~np.isnan(values)]


def pass_at(successes: Floats, k: int) -> tuple[float, int]:
    """pass@k = mean over problems of 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    n and c are the judged runs of a problem and its successes. Problems with fewer than k judged runs are left out; returns
    how many were not.
    """
    n = (~np.isnan(successes)).sum(axis=1)
    c = np.nansum(successes, axis=1).astype(int)
    each = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in zip(n.tolist(), c.tolist(), strict=True) if n >= k]
    return (math.fsum(each) / len(each) if each else math.nan), len(each)


def binomial_error(successes: int, n: int) -> float:
    """Standard error sqrt(p (1 - p) / n) over independent samples."""
    return math.sqrt(successes * (n - successes) / n**3) if n else math.nan


def problem_error(successes: Floats) -> float:
    """Standard error of `mean_success` over problems: sd of the problems' means / sqrt(problems).

    The clustered error of Miller 2024 (arXiv:2411.00640) for clusters of one size; but for a factor sqrt((n - 1) / n), what the
    bootstrap over problems gives.
    """
    means = known(problem_means(successes))
    return deviation(means) / math.sqrt(len(means)) if len(means) else math.nan


def deviation(values: Floats) -> float:
    """Standard deviation with n - 1; NaN of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def resampled_means(values: Floats) -> Floats:
    """[10,000] means of as many values, drawn with replacement (Efron 1979).

    Drawn as counts of the distinct values (multinomial), which is the same distribution. Given one mean per problem, it is the
    cluster bootstrap over problems: all runs of a problem stay together.
    """
    distinct, counts = np.unique(values, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(values), counts / len(values), RESAMPLES)
    return np.asarray(drawn @ distinct / len(values), np.float64)


def bootstrap(values: Floats) -> tuple[float, float]:
    """95 % interval of a mean: percentiles of `resampled_means`. It is too short with few values (30: 93 % or so)."""
    if not len(values):
        return math.nan, math.nan
    low, high = np.percentile(resampled_means(values), [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)])
    return float(low), float(high)


def paired(differences: Sequence[float] | Floats) -> tuple[float, float, float]:
    """Mean difference, over seeds or problems, with its `bootstrap` interval; mirrored if all signs are."""
    values = np.asarray(differences, np.float64)
    mean = float(values.mean())
    if mean < 0:
        low, high = bootstrap(-values)
        return mean, -high, -low
    return mean, *bootstrap(values)


def mcnemar(one: int, other: int) -> float:
    """Exact two-sided p-value of McNemar's test (1947): the discordant pairs against Binomial(one + other, 1/2)."""
    n = one + other
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(one, other) + 1)) / (1 << n))


def sign_flip(differences: Floats) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935): which of the two is which is tossed for each problem.

    (1 + tosses at least as far from 0) / (1 + 10,000) (Phipson & Smyth 2010). With differences of -1, 0 and 1 it estimates
    McNemar's exact value.
    """
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    heads = np.random.default_rng(0).binomial(counts, 0.5, (RESAMPLES, len(sizes)))
    far = np.abs((2 * heads - counts) @ sizes) >= abs(differences.sum()) - 1e-9
    return float((1 + far.sum()) / (1 + RESAMPLES))


def pair_deviation(one: float, other: float, correlation: float) -> float:
    """Standard deviation of a difference: sqrt(a^2 + b^2 - 2 r a b); r = 0 is the unpaired case."""
    return math.sqrt(max(0.0, one**2 + other**2 - 2 * correlation * one * other))


def detectable(spread: float, problems: int, step: float) -> float:
    """Smallest true difference that a two-sided test at 0.05 finds four times in five: (z_.975 + z_.8) sd / sqrt(n).

    The power analysis of Miller 2024 (arXiv:2411.00640). spread: standard deviation of the differences per problem. step: the
    smallest that a problem can differ by, 1 / runs. The formula is normal theory; where hardly a problem differs it would
    promise too much, so the answer is never below `FEWEST` steps, and infinite if there are fewer problems or it is above 1.
    """
    normal = (Z95 + NormalDist().inv_cdf(POWER)) * spread / math.sqrt(problems) if problems else math.nan
    if problems < FEWEST or math.isnan(normal):
        return math.inf
    least = max(normal, FEWEST * step / problems)
    return least if least <= 1 else math.inf
