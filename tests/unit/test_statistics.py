"""Statistics of success rates: against closed forms, tables, scipy, and simulated systems."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evals.compare import decides
from evals.statistics import (
    ALPHA,
    FEWEST,
    binomial_error,
    bootstrap,
    clopper_pearson,
    detectable,
    deviation,
    mcnemar,
    mean_success,
    pair_deviation,
    paired,
    pass_at,
    problem_error,
    problem_means,
    resampled_means,
    sign_flip,
    wilson,
)

NAN = math.nan
COUNTS = [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (149, 500), (467, 480), (3000, 6400)]


@pytest.mark.parametrize(("successes", "n"), COUNTS)
def test_binomial_intervals_against_scipy(successes: int, n: int) -> None:
    test = scipy.stats.binomtest(successes, n)
    for ours, method in ((wilson, "wilson"), (clopper_pearson, "exact")):
        theirs = test.proportion_ci(method=method)
        assert ours(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_binomial_intervals_by_hand() -> None:
    """All of n: the exact bound solves p^n = 0.025; Wilson's is n / (n + z^2)."""
    assert clopper_pearson(10, 10) == (pytest.approx(0.025**0.1), 1.0)
    assert clopper_pearson(0, 10) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert wilson(10, 10) == pytest.approx((10 / (10 + 1.959964**2), 1.0))
    assert wilson(0, 0) == clopper_pearson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("successes", "n", "points"),
    [(467, 480, 0.74), (449, 480, 1.13), (299, 400, 2.17), (149, 500, 2.05), (135, 500, 1.99)],
)
def test_the_resolution_of_the_paper_s_suites(successes: int, n: int, points: float) -> None:
    """algorithm.md 5.2, in points."""
    assert binomial_error(successes, n) * 100 == pytest.approx(points, abs=0.01)


def test_binomial_error_of_nothing() -> None:
    assert math.isnan(binomial_error(0, 0))


def test_means_over_runs_leave_out_what_is_missing() -> None:
    """Each problem weighs the same, however many of its runs were lost."""
    matrix = np.array([[1.0, 0.0], [1.0, NAN], [NAN, NAN]])
    np.testing.assert_array_equal(problem_means(matrix), [0.5, 1.0, NAN])
    assert mean_success(matrix) == 0.75
    assert problem_error(matrix) == pytest.approx(np.std([0.5, 1.0], ddof=1) / math.sqrt(2))
    assert math.isnan(mean_success(matrix[2:])) and math.isnan(problem_error(matrix[2:]))


def test_pass_at_k_is_the_chance_that_k_runs_hold_a_success() -> None:
    """By listing all choices of k among the judged runs."""
    rows = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]]
    for k in range(1, 5):
        listed = np.mean([np.mean([max(chosen) for chosen in combinations(row, k)]) for row in rows])
        assert pass_at(np.array(rows, np.float64), k) == (pytest.approx(listed), 5)


def test_pass_at_k_leaves_out_problems_with_fewer_runs() -> None:
    matrix = np.array([[1.0, 0.0], [0.0, NAN]])
    assert pass_at(matrix, 1) == (0.25, 2)
    assert pass_at(matrix, 2) == (1.0, 1)
    assert math.isnan(pass_at(matrix, 3)[0])


def matrices(missing: bool) -> st.SearchStrategy[Any]:
    values = st.sampled_from([0.0, 1.0, NAN] if missing else [0.0, 1.0])
    return arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 8)), elements=values)


@given(matrices(missing=True))
def test_pass_at_1_is_the_mean(matrix: Any) -> None:
    assert pass_at(matrix, 1)[0] == pytest.approx(mean_success(matrix), nan_ok=True)


@given(matrices(missing=False))
def test_more_tries_never_pass_less(matrix: Any) -> None:
    values = [pass_at(matrix, k)[0] for k in range(1, matrix.shape[1] + 1)]
    assert all(a <= b + 1e-12 for a, b in zip(values, values[1:], strict=False))
    assert values[-1] == pytest.approx(matrix.max(axis=1).mean()), "all runs: solved at all"


@given(matrices(missing=True), st.randoms(use_true_random=False))
def test_the_order_of_problems_and_runs_says_nothing(matrix: Any, random: Any) -> None:
    rows, columns = (random.sample(range(n), n) for n in matrix.shape)
    other = matrix[rows][:, columns]
    assert mean_success(other) == pytest.approx(mean_success(matrix), nan_ok=True)
    assert problem_error(other) == pytest.approx(problem_error(matrix), nan_ok=True)
    assert pass_at(other, 1)[0] == pytest.approx(pass_at(matrix, 1)[0], nan_ok=True)
    means, others = (m[~np.isnan(m)] for m in (problem_means(matrix), problem_means(other)))
    assert bootstrap(others) == pytest.approx(bootstrap(means), nan_ok=True), "the same draws"
    assert sign_flip(others - 0.5) == sign_flip(means - 0.5)


def test_the_bootstrap_of_two_values_is_binomial() -> None:
    """Means of two draws from 0 and 1: 0, 1/2, 1 with chances 1/4, 1/2, 1/4."""
    values, counts = np.unique(resampled_means(np.array([0.0, 1.0])), return_counts=True)
    np.testing.assert_array_equal(values, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=0.02)


def test_the_bootstrap_spreads_as_the_error_over_problems() -> None:
    """Its standard deviation is sqrt((n - 1) / n) times that, also where the runs of a problem agree."""
    rng = np.random.default_rng(1)
    matrix = np.repeat(rng.integers(0, 2, (100, 1)), 4, axis=1).astype(np.float64)
    means = resampled_means(problem_means(matrix))
    assert means.std() == pytest.approx(problem_error(matrix) * math.sqrt(99 / 100), rel=0.03)
    assert problem_error(matrix) > 1.9 * binomial_error(int(matrix.sum()), matrix.size), "four runs that agree are one"


def test_the_bootstrap_interval_against_scipy() -> None:
    values = np.random.default_rng(2).normal(0.3, 1.0, 200)
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(3)).confidence_interval
    assert bootstrap(values) == pytest.approx((theirs.low, theirs.high), abs=0.01)


@given(st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]), min_size=1, max_size=20))
def test_paired_turns_round_with_its_signs(differences: list[float]) -> None:
    mean, low, high = paired(differences)
    assert low <= high
    if mean:
        assert paired([-d for d in differences]) == (-mean, -high, -low)


@pytest.mark.parametrize(("one", "other"), [(0, 0), (5, 0), (0, 6), (3, 9), (12, 12), (40, 71), (300, 200)])
def test_mcnemar_against_scipy(one: int, other: int) -> None:
    assert mcnemar(one, other) == mcnemar(other, one)
    assert mcnemar(one, other) == pytest.approx(scipy.stats.binomtest(one, one + other).pvalue if one + other else 1.0)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(FEWEST - 1, 0) == 2 / 2**5 > 0.05 > mcnemar(FEWEST, 0) == 2 / 2**6
    assert mcnemar(1, 3) == 2 * (1 + 4) / 2**4


def test_sign_flips_estimate_the_exact_value() -> None:
    """All 2^8 tosses, and McNemar's for differences of -1, 0 and 1."""
    values = np.array([0.5, 0.25, 0.25, -0.125, 0.75, 0.0, 0.5, -0.25])
    sums = np.array([np.dot(signs, values) for signs in product([-1, 1], repeat=8)])
    assert sign_flip(values) == pytest.approx(np.mean(np.abs(sums) >= values.sum() - 1e-9), abs=0.015)
    pairs = np.repeat([-1.0, 0.0, 1.0], [4, 30, 13])
    assert sign_flip(pairs) == pytest.approx(mcnemar(4, 13), abs=0.01)
    assert sign_flip(np.zeros(5)) == 1.0


def test_sign_flips_against_scipy() -> None:
    values = np.random.default_rng(4).normal(0.2, 1.0, 60)
    theirs = scipy.stats.permutation_test((values,), np.mean, permutation_type="samples", rng=np.random.default_rng(5)).pvalue
    assert sign_flip(values) == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize(
    ("p", "low", "high", "decided"),
    [(0.049, 0.01, 0.1, True), (0.049, -0.1, -0.01, True), (0.049, 0.0, 0.1, False), (0.05, 0.01, 0.1, False)],
)
def test_a_difference_takes_the_test_and_the_interval(p: float, low: float, high: float, decided: bool) -> None:
    assert decides(p, low, high) is decided


def test_the_detectable_difference_by_hand() -> None:
    """(1.95996 + 0.84162) sd / sqrt(n); SWE-Bench Verified at 30 %: 8.1 points unpaired, 5.7 with a correlation of 0.5."""
    assert detectable(1.0, 100, 1.0) == pytest.approx(2.80159 / 10, abs=1e-5)
    spread = math.sqrt(0.3 * 0.7)
    assert detectable(pair_deviation(spread, spread, 0.0), 500, 1.0) == pytest.approx(0.0812, abs=1e-4)
    assert detectable(pair_deviation(spread, spread, 0.5), 500, 1.0) == pytest.approx(0.0574, abs=1e-4)


def test_the_detectable_difference_never_promises_too_much() -> None:
    assert detectable(0.0, 500, 1.0) == 6 / 500, "systems that never differed yet"
    assert detectable(0.0, 500, 0.25) == 6 / 2000
    assert detectable(0.1, FEWEST - 1, 1.0) == detectable(NAN, 500, 1.0) == detectable(0.5, 0, 1.0) == math.inf
    assert detectable(1.0, 6, 1.0) == math.inf, "above 100 points"


def test_the_deviation_of_a_difference() -> None:
    rng = np.random.default_rng(6)
    a = rng.normal(size=50)
    b = 0.6 * a + rng.normal(size=50)
    correlation = float(np.corrcoef(a, b)[0, 1])
    assert pair_deviation(deviation(a), deviation(b), correlation) == pytest.approx(deviation(a - b))
    assert pair_deviation(1.0, 1.0, 1.0) == 0.0


def found(success_a: float, success_b: float, correlation: float, *, simulations: int = 1_000, tasks: int = 500) -> float:
    """Share of the simulations in which `evals.compare` finds a difference: one run each, McNemar and the bootstrap agreeing.

    A task is solved by both with probability a b + r sqrt(a (1 - a) b (1 - b)), which gives the outcomes the correlation r. Its
    usual value here, 0.5, is the one that `evals.summary` assumes: systems trained from one model share most of what is hard
    for them, but not the luck of one sample. r = 0 is the case where pairing helps nothing.
    """
    both = success_a * success_b + correlation * math.sqrt(success_a * (1 - success_a) * success_b * (1 - success_b))
    only = np.random.default_rng(0).multinomial(tasks, [success_a - both, success_b - both, 0.0], simulations)[:, :2]
    return sum(differ(a, b, tasks) for a, b in only.tolist()) / simulations


def differ(only_a: int, only_b: int, tasks: int) -> bool:
    """The bootstrap is drawn only where the test has not decided."""
    p = mcnemar(only_a, only_b)
    return p < ALPHA and decides(p, *paired(np.repeat([1.0, 0.0, -1.0], [only_a, tasks - only_a - only_b, only_b]))[1:])


def test_a_planted_difference_of_ten_points_is_found() -> None:
    """500 tasks, 60 and 50 %. Measured: 99.5 % of 1,000 simulations, 85 % of 500 at r = 0.

    Normal theory says 99.5 and 89.2 %; the exact test is a little cautious.
    """
    power, without_pairing = found(0.6, 0.5, 0.5), found(0.6, 0.5, 0.0, simulations=500)
    print(f"ten points, 500 tasks: found in {power:.1%} at a correlation of 0.5, {without_pairing:.1%} at 0")
    assert power >= 0.98
    assert 0.8 <= without_pairing <= 0.92


def test_equal_systems_are_not_called_different() -> None:
    """500 tasks, 50 % each. Measured: false alarms in 5.2 % of 1,000 simulations, 4.3 % at r = 0."""
    alarms, without_pairing = found(0.5, 0.5, 0.5), found(0.5, 0.5, 0.0)
    print(f"equal systems, 500 tasks: called different in {alarms:.1%} at a correlation of 0.5, {without_pairing:.1%} at 0")
    assert 0.01 <= alarms <= 0.07
    assert 0.01 <= without_pairing <= 0.07


def test_what_is_called_detectable_is_found_four_times_in_five() -> None:
    """The planted difference is the one that `detectable` names for 500 tasks at 50 %: 6.3 points. Measured: 79 % of 500."""
    gap = detectable(pair_deviation(0.5, 0.5, 0.5), 500, 1.0)
    power = found(0.5 + gap, 0.5, 0.5, simulations=500)
    print(f"{gap * 100:.1f} points, 500 tasks: found in {power:.1%}")
    assert 0.72 <= power <= 0.85


def test_equal_systems_with_several_runs_are_not_called_different() -> None:
    """30 problems x 16 runs, difficulties uniform, the same for both; 300 simulations. Measured: 3.7 %."""
    rng = np.random.default_rng(1)
    wins = rng.binomial(16, np.repeat(rng.random((300, 1, 30)), 2, axis=1)) / 16
    gaps = wins[:, 0] - wins[:, 1]
    alarms = np.mean([(p := sign_flip(gap)) < ALPHA and decides(p, *paired(gap)[1:]) for gap in gaps])
    print(f"equal systems, 30 x 16: called different in {alarms:.1%}")
    assert alarms <= 0.08
