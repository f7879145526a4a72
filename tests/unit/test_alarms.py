"""Each alarm holds exactly when it should, and not one step earlier."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from harness.alarms import HISTORY, Alarms

Row = dict[str, Any]
FRESH = "mismatch/abs_logp_diff_fresh"


def feed(rows: list[Row]) -> list[list[str]]:
    """Names of the alarms at each row; the state goes through JSON before every row."""
    out, state = [], Alarms().state()
    for row in rows:
        alarms = Alarms()
        alarms.restore(json.loads(json.dumps(state)))
        out.append([alarm.name for alarm in alarms.check(row)])
        state = alarms.state()
    return out


def rows(metric: str, *values: Any) -> list[Row]:
    return [{"step": i, metric: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "quiet", "loud", "name"),
    [
        ("dis/mask_frac", 0.10, 0.1001, "masked_badly"),
        ("dis/mean_ratio_fresh", 0.98, 0.9799, "fresh_ratio"),
        ("dis/mean_ratio_fresh", 1.02, 1.0201, "fresh_ratio"),
        (FRESH, 0.05, 0.0501, "fresh_mismatch"),
        ("data/nonfinite_rollout_logp", 0, 1, "logp_not_finite"),
        ("time/wait_s", 600, 600.1, "starved"),
        ("async/publish_lag", 1, 2, "publish_lag"),
        ("rollout/infra_failure_frac", 0.05, 0.06, "infra"),
    ],
)
def test_at_once(metric: str, quiet: float, loud: float, name: str) -> None:
    assert feed(rows(metric, quiet, loud, quiet)) == [[], [name], []]


@pytest.mark.parametrize(
    ("metric", "bad", "limit", "name"),
    [("dis/mask_frac", 0.021, 0.02, "masked"), ("value/ev", -0.01, 0.0, "critic_useless")],
)
def test_twenty_steps_in_a_row(metric: str, bad: float, limit: float, name: str) -> None:
    assert feed(rows(metric, *[bad] * 21)) == [[]] * 19 + [[name]] * 2
    assert feed(rows(metric, *[bad] * 19, limit, *[bad] * 20)) == [[]] * 39 + [[name]]
    # What was not measured neither lengthens nor ends the run.
    assert feed(rows(metric, *[bad] * 10, None, math.nan, *[bad] * 10)) == [[]] * 21 + [[name]]


@pytest.mark.parametrize(
    ("metric", "first", "quiet", "loud", "name"),
    [
        (FRESH, 0.01, 0.03, 0.0301, "fresh_mismatch_grew"),
        ("entropy/exact", 2.0, 6.0, 6.01, "entropy"),
        ("entropy/exact", 2.0, 0.6, 0.59, "entropy"),
    ],
)
def test_against_the_first_value(metric: str, first: float, quiet: float, loud: float, name: str) -> None:
    assert feed(rows(metric, None, first, quiet, loud, quiet, loud)) == [[], [], [], [name], [], [name]]


def test_a_first_value_of_zero_is_no_scale() -> None:
    assert feed(rows(FRESH, 0.0, 0.01, 0.04)) == [[], [], []]


def test_a_critic_gradient_against_its_running_median() -> None:
    metric = "grad/critic_1"
    assert feed(rows(metric, *[1.0] * 9, 99.0)) == [[]] * 10
    assert feed(rows(metric, *[1.0] * 10, 10.0, 10.01)) == [[]] * 11 + [["critic_gradient"]]
    assert feed(rows("grad/policy", *[1.0] * 10, 99.0)) == [[]] * 11
    assert feed(rows("grad/critic_1/attention", *[1.0] * 10, 99.0)) == [[]] * 11
    grown = feed(rows(metric, *[1.0] * HISTORY, *[20.0] * (HISTORY // 2 + 2)))
    assert [bool(names) for names in grown] == [False] * HISTORY + [True] * (HISTORY // 2) + [False] * 2


def test_updates_have_their_own_medians() -> None:
    both = [{"grad/critic_0": 1.0, "grad/critic_1": 100.0} for _ in range(10)]
    assert feed([*both, {"grad/critic_0": 50.0, "grad/critic_1": 500.0}])[-1] == ["critic_gradient"]


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_three_gradients_in_a_row_that_are_not_finite(broken: Any) -> None:
    good, bad = {"grad/policy": 1.0, "grad/critic_0": 1.0}, {"grad/policy": 1.0, "grad/critic_0": broken}
    other = {"grad/policy": broken, "grad/critic_0": 1.0}
    assert feed([bad, bad, good, bad, other, bad, bad, good]) == [[]] * 5 + [["not_finite"]] * 2 + [[]]


def test_rows_without_metrics_never_raise() -> None:
    odd: list[Row] = [{}, {"step": 1}, {"dis/mask_frac": "much", "value/ev": True, "grad/policy": 0.0}]
    assert feed(odd) == [[], [], []]


def test_a_message_has_value_limit_and_next_step() -> None:
    alarms = Alarms()
    (alarm,) = alarms.check({"dis/mask_frac": 0.25})
    assert alarm == ("stop", "masked_badly", alarm.message)
    assert alarm.message.startswith("dis/mask_frac is 0.25 > 0.1: ")
    alarms.check({"entropy/exact": 2.0})
    (alarm,) = alarms.check({"entropy/exact": 0.5})
    assert alarm.level == "warn"
    assert alarm.message.startswith("entropy/exact is 0.5 < 0.6 (first value 2): ")
