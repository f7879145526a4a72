"""Alarms over the metrics rows of a run: what is wrong, by how much, and what to do next.

| level, name | holds while |
|---|---|
| warn `masked` | `dis/mask_frac` > 0.02 for 20 steps |
| stop `masked_badly` | `dis/mask_frac` > 0.10 |
| warn `fresh_ratio` | `dis/mean_ratio_fresh` outside [0.98, 1.02] |
| warn `fresh_mismatch` | `mismatch/abs_logp_diff_fresh` > 0.05 |
| warn `fresh_mismatch_grew` | `mismatch/abs_logp_diff_fresh` > 3 x its first value, and > 0.02 |
| warn `critic_useless` | `value/ev` < 0 for 20 steps |
| warn `critic_gradient` | `grad/critic_k` > 10 x the median of its last 100 values, from 10 values on |
| warn `entropy` | `entropy/exact` < 0.3 x or > 3 x its first value |
| warn `logp_not_finite` | `data/nonfinite_rollout_logp` > 0 |
| stop `not_finite` | a null among `grad/*` in 3 steps in a row |
| warn `starved` | `time/wait_s` > 600: ten minutes without a batch in the queue |
| warn `publish_lag` | `async/publish_lag` > 1: trainer's version - engine's |
| warn `infra` | `rollout/infra_failure_frac` > 0.05: share of episodes that the infrastructure lost |

A metric that is absent or null in a row leaves its alarms as they were: it neither lengthens nor ends a run of steps.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

Level = Literal["warn", "stop"]
HISTORY = 100
"""Values of a metric that its running median is taken over."""
MIN_HISTORY = 10
NOT_FINITE_STEPS = 3


class Alarm(NamedTuple):
    """What holds at one row."""

    level: Level
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """`metric` (a pattern of names) outside [below, above] in `steps` rows one after another."""

    level: Level
    name: str
    metric: str
    advice: str
    below: float = -math.inf
    above: float = math.inf
    steps: int = 1
    times: Literal["first", "median"] | None = None
    """The limits are multiples of the metric's first value, or of its running median."""
    floor: float = -math.inf
    """`above` is never less than this."""


RULES = (
    Rule("warn", "masked", "dis/mask_frac", "lower eta or the policy's learning rate", above=0.02, steps=20),
    Rule("stop", "masked_badly", "dis/mask_frac", "compare delta/* at staleness 0 and above before resuming", above=0.10),
    Rule("warn", "fresh_ratio", "dis/mean_ratio_fresh", "check sampling settings and dtypes of the engine", 0.98, 1.02),
    Rule("warn", "fresh_mismatch", "mismatch/abs_logp_diff_fresh", "check the weight sync and the engine's dtype", above=0.05),
    Rule(
        "warn",
        "fresh_mismatch_grew",
        "mismatch/abs_logp_diff_fresh",
        "check the weight sync and that no prefix cache outlives an update",
        above=3.0,
        times="first",
        floor=0.02,
    ),
    Rule("warn", "critic_useless", "value/ev", "pre-train the critic longer or lower its learning rate", below=0.0, steps=20),
    Rule("warn", "critic_gradient", r"grad/critic_\d+", "look at this batch's rewards and lengths", above=10.0, times="median"),
    Rule("warn", "entropy", "entropy/exact", "read some episodes; lower the policy's learning rate", 0.3, 3.0, times="first"),
    Rule("warn", "logp_not_finite", "data/nonfinite_rollout_logp", "check the engine's log-probs", above=0.0),
    Rule("warn", "starved", "time/wait_s", "raise the rollout's concurrency, or look for stuck episodes", above=600.0),
    Rule("warn", "publish_lag", "async/publish_lag", "check that the engine takes new weights", above=1.0),
    Rule("warn", "infra", "rollout/infra_failure_frac", "read the reasons of dropped episodes", above=0.05),
)


class Alarms:
    """Fed one metrics row per batch, in order."""

    def __init__(self) -> None:
        self._runs: dict[str, int] = {}
        self._first: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}

    def check(self, row: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that hold at this row."""
        found = [alarm for rule in RULES for name in row if (alarm := self._apply(rule, name, row[name]))]
        return found + self._gradients(row)

    def state(self) -> dict[str, Any]:
        """All that is remembered, for JSON."""
        return {
            "runs": dict(self._runs),
            "first": dict(self._first),
            "history": {name: list(values) for name, values in self._history.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._runs, self._first = dict(state["runs"]), dict(state["first"])
        self._history = {name: deque(values, HISTORY) for name, values in state["history"].items()}

    def _apply(self, rule: Rule, name: str, raw: Any) -> Alarm | None:
        if not re.fullmatch(rule.metric, name) or (value := _number(raw)) is None:
            return None
        scale = self._scale(rule, name, value)
        if scale is None:
            return None
        below, above = rule.below * scale, max(rule.above * scale, rule.floor)
        key = f"{rule.name} {name}"
        self._runs[key] = self._runs.get(key, 0) + 1 if not below <= value <= above else 0
        if self._runs[key] < rule.steps:
            return None
        limit = f"> {above:.4g}" if value > above else f"< {below:.4g}"
        origin = {"first": f" (first value {scale:.4g})", "median": f" (running median {scale:.4g})", None: ""}[rule.times]
        steps = f" for {self._runs[key]} steps" if rule.steps > 1 else ""
        return Alarm(rule.level, rule.name, f"{name} is {value:.4g} {limit}{origin}{steps}: {rule.advice}")

    def _scale(self, rule: Rule, name: str, value: float) -> float | None:
        """What the limits are multiples of; None while that is not known, or is 0."""
        if rule.times is None:
            return 1.0
        if rule.times == "first":
            scale = self._first.setdefault(name, value)
        else:
            history = self._history.setdefault(name, deque(maxlen=HISTORY))
            scale = median(history) if len(history) >= MIN_HISTORY else 0.0
            history.append(value)
        return scale if scale > 0 else None

    def _gradients(self, row: Mapping[str, Any]) -> list[Alarm]:
        gradients = [name for name in row if name.startswith("grad/")]
        lost = [name for name in gradients if _number(row[name]) is None]
        if gradients:
            self._runs["not_finite"] = self._runs.get("not_finite", 0) + 1 if lost else 0
        if self._runs.get("not_finite", 0) < NOT_FINITE_STEPS or not lost:
            return []
        message = f"{lost[0]} was not finite in {self._runs['not_finite']} steps in a row (limit {NOT_FINITE_STEPS})"
        return [Alarm("stop", "not_finite", f"{message}: lower the learning rate, resume from a checkpoint")]


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else None
