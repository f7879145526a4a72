"""Comparison of two results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.compare import compare
from evals.result import Result, Sample
from evals.statistics import mcnemar
from harness.errors import ConfigError


def result(rows: dict[str, list[float | None]], **fields: Any) -> Result:
    """Of rewards by problem and run."""
    samples = tuple(
        Sample(problem, run, reward, "finished", 1, 10, 5, 1.0, "")
        for problem, rewards in rows.items()
        for run, reward in enumerate(rewards)
    )
    runs = max(map(len, rows.values()))
    return replace(Result("suite", "model", runs, tuple(rows), {}, samples), **fields)


def single(outcomes: str, **fields: Any) -> Result:
    """One run each: `1`, `0`, or `?` for missing."""
    return result({f"p{i:03}": [None if c == "?" else float(c)] for i, c in enumerate(outcomes)}, **fields)


def test_single_runs_by_hand() -> None:
    c = compare(single("1" * 12 + "0" * 3 + "1" * 5), single("0" * 12 + "1" * 3 + "1" * 5))
    assert (c.ahead_a, c.ahead_b) == (12, 3)
    assert c.difference == pytest.approx(9 / 20)
    assert c.p == c.mcnemar == mcnemar(12, 3) == pytest.approx(2 * (1 + 15 + 105 + 455) / 2**15)
    assert c.sign_flip == pytest.approx(c.mcnemar, abs=0.01)
    assert c.found and 0 < c.low < c.difference < c.high
    assert c.verdict.startswith("A is ahead of B: A minus B is +45.0 points on 20 problems (95 % interval ")
    assert c.verdict.endswith("p = 0.035).")


def test_the_other_way_round() -> None:
    c = compare(single("0" * 20), single("1" * 20))
    assert (
        c.verdict == "B is ahead of A: A minus B is -100.0 points on 20 problems (95 % interval -100.0 to -100.0; p < 0.001)."
    )


def test_other_problems_under_the_same_names_are_no_better_model() -> None:
    easy, hard = {"environment": {"id": "corridor", "rooms": 1}}, {"environment": {"id": "corridor"}}
    c = compare(single("1" * 20, settings=easy), single("0" * 20, settings=hard))
    assert c.asked_otherwise == ("environment",)
    assert c.verdict.endswith(" They were not asked the same (environment): this is not about the models alone.")
    assert compare(single("1" * 20, settings=easy), single("0" * 20, settings=easy)).asked_otherwise == ()


def test_no_difference_says_what_would_have_been_missed() -> None:
    c = compare(single("10" * 50), single("1001" * 25))
    assert not c.found and c.difference == 0.0
    spread = math.sqrt(50 / 99)
    assert c.detectable == pytest.approx(2.80159 * spread / 10, abs=1e-5)
    assert c.verdict.endswith("a difference below 19.9 points would be missed more than one time in five.")


def test_few_problems_never_decide() -> None:
    c = compare(single("11111"), single("00000"))
    assert not c.found and math.isinf(c.detectable)
    assert c.verdict == (
        "No difference found (A minus B is +100.0 points, 95 % interval +100.0 to +100.0; p = 0.062); "
        "with 5 problems hardly any could be."
    )


def test_several_runs_are_compared_by_their_means() -> None:
    """McNemar's test would want pairs of runs; A may have more of them than B."""
    a = result({f"p{i}": [1.0, 1.0, 0.0, 1.0] for i in range(10)})
    b = result({f"p{i}": [1.0, 0.0] for i in range(10)})
    c = compare(a, b)
    assert c.mcnemar is None and c.p == c.sign_flip
    np.testing.assert_array_equal(c.differences, [0.25] * 10)
    assert c.found and math.isnan(c.correlation), "neither varies over problems"
    assert c.detectable == 6 / (10 * 4), "the finest step of the two"
    assert compare(single("1" * 10), result({f"p{i:03}": [1.0, 0.0] for i in range(10)})).mcnemar is None


def test_what_is_not_common_is_reported_and_left_out() -> None:
    a = result({"x": [1.0], "y": [1.0], "lost": [None], "q": [1.0]})
    b = result({"q": [0.0], "lost": [1.0], "z": [1.0], "y": [1.0]})
    c = compare(a, b)
    assert (c.only_a, c.only_b, c.lost) == (("x",), ("z",), ("lost",))
    assert c.a.problems == c.b.problems == ("q", "y")
    np.testing.assert_array_equal(c.differences, [1.0, 0.0])
    np.testing.assert_array_equal(c.b.successes, [[0.0], [1.0]])


def test_settings_that_differ() -> None:
    a = single("1", settings={"temperature": 1.0, "turns": 50, "tools": ["python"]})
    b = single("1", settings={"temperature": 0.6, "turns": 50, "seed": 1})
    assert compare(a, b).unlike == {"seed": (None, 1), "temperature": (1.0, 0.6), "tools": (["python"], None)}


@pytest.mark.parametrize(
    ("b", "says"),
    [
        (single("1", suite="another"), "'another'"),
        (result({"elsewhere": [1.0]}), "0 are in both"),
        (single("?"), "1 are in both"),
    ],
)
def test_results_that_cannot_be_compared(b: Result, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        compare(single("1"), b)
    assert error.value.hint


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Result, Result]:
    """Two results over the same problems, with at least one run judged of each."""
    problems = [f"p{i}" for i in range(draw(st.integers(1, 8)))]
    rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3).filter(any_judged)
    return result({p: draw(rewards) for p in problems}), result({p: draw(rewards) for p in problems})


def any_judged(rewards: list[float | None]) -> bool:
    return any(r is not None for r in rewards)


@settings(max_examples=40)
@given(pairs())
def test_b_and_a_is_a_and_b_turned_round(both: tuple[Result, Result]) -> None:
    there, back = compare(*both), compare(*reversed(both))
    assert back.difference == -there.difference
    assert (back.p, back.sign_flip, back.detectable) == (there.p, there.sign_flip, there.detectable)
    assert (back.ahead_a, back.ahead_b) == (there.ahead_b, there.ahead_a)
    assert back.found == there.found
    if there.difference:
        assert (back.low, back.high) == (-there.high, -there.low)


@settings(max_examples=40)
@given(pairs(), st.randoms(use_true_random=False))
def test_the_order_of_problems_and_samples_says_nothing(both: tuple[Result, Result], random: Any) -> None:
    a, b = both
    mixed = replace(
        a, problems=tuple(random.sample(a.problems, len(a.problems))), samples=tuple(random.sample(a.samples, len(a.samples)))
    )
    assert compare(mixed, b).verdict == compare(a, b).verdict


def test_a_result_against_itself() -> None:
    a = single("1011001110")
    c = compare(a, a)
    assert (c.difference, c.low, c.high, c.p) == (0.0, 0.0, 0.0, 1.0)
    assert c.correlation == pytest.approx(1.0) and c.detectable == 6 / 10
