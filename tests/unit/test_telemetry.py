"""The harness's part of a metrics row by hand on a small ledger, and what the loop does about alarms."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.alarms import Alarm
from harness.config import Config, Plugin
from harness.episode import Episode
from harness.errors import EngineError, LearnerError
from harness.ledger import Ledger, Slot
from harness.loop import Loop
from harness.task import Termination
from harness.telemetry import Telemetry
from tests.support import trajectory


class Time:
    """Stands for the `time` module."""

    now = 1_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for module in ("ledger", "telemetry"):
        monkeypatch.setattr(f"harness.{module}.time", made)
    return made


@pytest.fixture
def ledger(tmp_path: Path, clock: Time) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.close()


def play(
    ledger: Ledger, name: str, slot: Slot, *, reward: float = 1.0, layout: str = "oaoa", submit: int = 0, done: int = 0
) -> None:
    ledger.dispatch(name, "train", f"t{slot.index}", slot, submit)
    made = trajectory(layout, version=submit, episode_id=name, reward=reward)
    ledger.complete(Episode(name, "t", Termination.FINISHED, (made,), reward), done, "pending")


def lose(ledger: Ledger, name: str, slot: Slot, termination: Termination = Termination.SANDBOX_LOST) -> None:
    ledger.dispatch(name, "train", f"t{slot.index}", slot, 0)
    ledger.drop(name, termination, "x")


def test_a_row_by_hand(ledger: Ledger, clock: Time) -> None:
    """Batch 9 has b (its task's second draw), c and d; a was batch 3; two more were lost, one grew stale, one waits."""
    telemetry = Telemetry(ledger, concurrency=8, slot_seconds=100.0)
    play(ledger, "a", Slot(1, 7), layout="ooaa")
    ledger.consume(3, ["a"], 0)
    lose(ledger, "l1", Slot(2, 8))
    lose(ledger, "l2", Slot(2, 8, failures=1), Termination.VERIFIER_ERROR)
    lose(ledger, "ab", Slot(2, 8), Termination.ABORTED)
    play(ledger, "s", Slot(3, 9))
    ledger.drop("s", None, "too stale")
    clock.now = 1_004.0
    play(ledger, "b", Slot(4, 7), reward=1.0, layout="oooaaaoa", submit=1, done=3)  # 8 tokens, 4 actions
    clock.now = 1_006.0
    play(ledger, "c", Slot(5, 1), reward=0.5, layout="oa", submit=2, done=3)
    play(ledger, "d", Slot(6, 2), reward=0.0, layout="oaoaoa", submit=3, done=4)
    play(ledger, "w", Slot(7, 3))
    ledger.consume(9, ["b", "c", "d"], 5)
    clock.now = 1_020.0
    arguments: dict[str, Any] = {"wait_s": 2.0, "train_s": 5.0, "publish_s": 1.0, "slot_seconds": 220.0, "capacity": 4}
    arguments["engine"] = {"generated_tokens": 700.0, "kv_usage": 0.25}
    row = telemetry.row(batch=9, version=6, consumed_version=5, engine_version=5, **arguments)
    assert row.pop("async/queue_age_s") == pytest.approx(1_020 - 5 - 1 - (1_004 + 1_006 + 1_006) / 3)
    assert row.pop("async/len_consumed_over_submitted") == 1.0, "only batch 3, only itself"
    assert row == {
        "step": 9,
        "version": 6,
        "elapsed_s": 20.0,
        "reward/mean": 0.5,
        "rollout/success": pytest.approx(1 / 3),
        "rollout/trajectories_per_s": 3 / 8,
        "rollout/action_tokens_per_s": (4 + 1 + 3) / 8,
        "rollout/tokens_per_s": (8 + 2 + 6) / 8,
        "rollout/infra_failure_frac": 2 / 8,
        "rollout/replayed": 1,
        "rollout/dropped_sandbox_lost": 1,
        "rollout/dropped_verifier_error": 1,
        "rollout/dropped_aborted": 1,
        "rollout/dropped_other": 1,
        "prompts/epoch": pytest.approx(1 / 3),
        "async/submission_lag": 5 - 2,
        "async/queue_lag": pytest.approx(5 - 10 / 3),
        "async/queue": 1,
        "async/capacity": 4,
        "async/in_flight": 120 / 20,
        "async/rollout_idle": 1 - 6 / 8,
        "async/trainer_idle": 2 / 8,
        "async/publish_lag": 1,
        "engine/tokens_per_s": None,
        "engine/generated_tokens": 700.0,
        "engine/kv_usage": 0.25,
        "time/wait_s": 2.0,
        "time/train_s": 5.0,
        "time/publish_s": 1.0,
    }
    clock.now = 1_030.0
    second = telemetry.row(
        batch=9,
        version=6,
        consumed_version=5,
        engine_version=6,
        **arguments | {"slot_seconds": 240.0, "engine": {"generated_tokens": 900.0}},
    )
    assert (second["engine/tokens_per_s"], second["engine/generated_tokens"]) == (20.0, 900.0)
    assert (second["async/in_flight"], second["async/publish_lag"], second["elapsed_s"]) == (2.0, 0, 30.0)
    for sampled in ({"generated_tokens": 899.0}, {}, {"generated_tokens": 1_000.0}):  # replaced; silent; back
        third = telemetry.row(batch=9, version=6, consumed_version=5, engine_version=6, **arguments | {"engine": sampled})
        assert third["engine/tokens_per_s"] is None
    json.dumps([row, second], default=float)


def test_no_length_comparison_before_there_is_a_past(ledger: Ledger) -> None:
    play(ledger, "a", Slot(1, 1))
    ledger.consume(1, ["a"], 0)
    assert ledger.length_bias(1 - 8, 1 - 5) is None


def test_length_bias_by_hand(ledger: Ledger) -> None:
    """Short ones were consumed; the long one dispatched between them still waits."""
    for draw, (name, layout) in enumerate(
        [("before", "oa" * 9), ("a", "oa"), ("long", "oaoaoaoaoa"), ("b", "oaoa"), ("after", "oa" * 9)], 1
    ):
        play(ledger, name, Slot(draw, draw), layout=layout)
    ledger.consume(1, ["a", "b"], 0)
    assert ledger.length_bias(1, 1) == pytest.approx(3 / ((2 + 10 + 4) / 3))
    assert ledger.length_bias(2, 5) is None


def test_infra_failures_are_of_the_last_finished_training_episodes(ledger: Ledger, clock: Time) -> None:
    assert ledger.infra_failure_frac() == 0.0
    for number in range(4):
        clock.now += 1
        lose(ledger, f"l{number}", Slot(number + 1, 0), Termination.ENGINE_ERROR)
    for number in range(4, 10):
        clock.now += 1
        play(ledger, f"p{number}", Slot(number + 1, 0))
    lose(ledger, "aborted", Slot(11, 0), Termination.ABORTED)
    lose(ledger, "nothing", Slot(12, 0), Termination.MAX_CONTEXT)
    ledger.dispatch("v", "value", "t", Slot(13, 0), 0)
    ledger.drop("v", Termination.ENGINE_ERROR, "x")
    ledger.dispatch("running", "train", "t", Slot(14, 0), 0)
    assert ledger.infra_failure_frac() == pytest.approx(4 / 11)
    assert ledger.infra_failure_frac(8) == pytest.approx(1 / 8)
    assert ledger.infra_failure_frac(3) == 0.0


def test_members_of_one_draw_are_one_epoch(ledger: Ledger) -> None:
    for draw in (1, 2, 3):
        for member in (0, 1):
            play(ledger, f"{draw}/{member}", Slot(draw, 0, member))
    ledger.consume(1, ["3/0", "3/1"], 0)
    assert ledger.batch_facts(1)["epoch"] == 2.0


# --- alarms in the loop ----------------------------------------------------------------------------------------------


class Engineless:
    """A run without processes: the trainer returns the metrics it is given."""

    def __init__(self, ledger: Ledger, alarms: str, **metrics: Any) -> None:
        sections: Any = {"environment": Plugin(id="toy_repair"), "alarms": alarms}
        self.config = Config(**sections)
        self.ledger, self.learner, self.metrics = ledger, self, metrics
        self.folder = SimpleNamespace(
            metrics=lambda row: self.rows.append(row),
            path=Path("run"),
            prune_checkpoints=lambda *_: None,
            rewind=lambda _: None,
        )
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, float] | EngineError = {"generated_tokens": 5.0}
        self.engine = SimpleNamespace(metrics=self._load)
        self.version, self.generation, self.resumed, self.model = 0, 1, False, Path("model")

    async def call(self, verb: str, **_: Any) -> dict[str, Any]:
        if verb == "init":
            kinds = {"critic_trainable": 1, "critic_frozen": 1, "critic_trainable_kinds": {}, "critic_record": None}
            return kinds | {"policy_parameters": 1}
        return {"stepped": True, "metrics": self.metrics}

    async def publish(self, version: int) -> None:
        self.version = version

    async def probe(self) -> None: ...

    async def _load(self) -> dict[str, float]:
        if isinstance(self.figures, EngineError):
            raise self.figures
        return self.figures


class Still:
    """A scheduler that does nothing."""

    async def moved(self) -> None: ...

    def capacity(self) -> int:
        return 0

    def slot_seconds(self) -> float:
        return 0.0


def loop_of(run: Engineless) -> Loop:
    loop = Loop(run)  # type: ignore[arg-type]
    loop.rollout = Still()  # type: ignore[assignment]
    loop.telemetry = Telemetry(run.ledger, 8, 0.0)
    return loop


def step(loop: Loop, draw: int) -> dict[str, Any]:
    play(loop.run.ledger, f"e{draw}", Slot(draw, draw))
    return asyncio.run(loop.train_on(loop.run.ledger.pending(), 0.0))


def test_a_row_has_the_engines_figures_or_goes_without(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    run = Engineless(ledger, "warn")
    loop = loop_of(run)
    assert step(loop, 1)["engine/generated_tokens"] == 5.0
    run.figures = EngineError("it is silent")
    assert not {name for name in step(loop, 2) if name.startswith("engine/")} - {"engine/tokens_per_s"}
    assert "it is silent" in caplog.text and loop.clock.consumed == 2


def test_a_grave_alarm_stops_the_run_after_the_step_is_booked(ledger: Ledger) -> None:
    run = Engineless(ledger, "stop", **{"dis/mask_frac": 0.2})
    loop = loop_of(run)
    with pytest.raises(LearnerError, match=r"masked_badly: dis/mask_frac is 0\.2 > 0\.1") as caught:
        step(loop, 1)
    assert "alarms=warn" in caught.value.hint
    assert (ledger.counts(), loop.clock.consumed, loop.clock.version) == ({"trained": 1}, 1, 1)
    assert [row["step"] for row in run.rows] == [1], "the row that explains the stop is on disk"


def test_a_grave_alarm_only_warns_when_told_to(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of(Engineless(ledger, "warn", **{"dis/mask_frac": 0.2}))
    with caplog.at_level(logging.WARNING):
        rows = [step(loop, draw) for draw in (1, 2, 3)]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [record.message.split(":")[0] for record in caplog.records] == ["alarm masked_badly"], "said once while it holds"


def test_an_alarm_is_logged_each_time_it_begins(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of(Engineless(ledger, "stop"))
    a, b = Alarm("warn", "a", "x"), Alarm("warn", "b", "y")
    with caplog.at_level(logging.WARNING):
        for alarms in ([a], [a], [a, b], [], [a]):
            loop._heed(alarms)
    assert [record.message for record in caplog.records] == ["alarm a: x", "alarm b: y", "alarm a: x"]


def test_a_light_alarm_before_a_grave_one_does_not_hide_it(ledger: Ledger) -> None:
    loop = loop_of(Engineless(ledger, "stop"))
    with pytest.raises(LearnerError, match="alarm b: y"):
        loop._heed([Alarm("warn", "a", "x"), Alarm("stop", "b", "y")])


def test_alarms_remember_across_a_checkpoint(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Nineteen steps of a masked share that is too high, a checkpoint, and the twentieth in the next process."""
    run = Engineless(ledger, "stop", **{"dis/mask_frac": 0.05})
    loop = loop_of(run)
    for draw in range(1, 20):
        step(loop, draw)
    asyncio.run(loop.checkpoint())
    following = loop_of(run)
    asyncio.run(following.prepare(Path("critic")))
    assert following.clock.consumed == 19
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        step(following, 20)
    assert [record.message.split(":")[0] for record in caplog.records] == ["alarm masked"]
