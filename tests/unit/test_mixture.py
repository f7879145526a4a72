"""A mixture: parts by name, weight and recorded difficulty; each part's tasks are played as that part plays them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from environments.mixture import Mixture
from environments.sums import SumsTask
from environments.toy_repair.environment import ToyRepairTask
from harness.episode import Episode
from harness.errors import ConfigError, SandboxError
from harness.ledger import Ledger, Slot
from harness.order import TaskOrder, first
from harness.registry import environment, plugin_config
from harness.sandboxes.memory import MemorySandboxes
from harness.task import Termination
from harness.telemetry import Telemetry
from tests.support import NoConfig, trajectory

SUMS = {"id": "sums", "train_tasks": 12, "heldout_tasks": 6}
REPAIR = {"id": "toy_repair", "train_tasks": 20, "heldout_tasks": 5}


def mixture(*parts: dict[str, Any]) -> Mixture:
    made, options = plugin_config("environment", {"id": "mixture", "parts": list(parts)})
    assert made is Mixture
    return Mixture(options)


def test_tasks_are_drawn_by_weight_and_carry_their_source() -> None:
    tasks = mixture({**SUMS, "weight": 3.0}, {**REPAIR, "name": "repair"}).tasks("train")
    assert len(tasks) == 32
    order = TaskOrder(tasks, 0)
    drawn = [tasks[i] for i in islice(iter(order.__next__, None), 16)]
    assert Counter(task.id.partition("/")[0] for task in drawn) == {"sums": 12, "repair": 4}
    assert len({task.id for task in drawn}) == 16
    assert [task.id for task in tasks[11:13]] == [tasks[11].id, tasks[12].id]
    assert tasks[-1].id == tasks[31].id and tasks[31].id.startswith("repair/")
    with pytest.raises(IndexError):
        tasks[32]


def test_an_evaluation_sees_every_part() -> None:
    tasks = mixture(SUMS, REPAIR).tasks("heldout")
    asked = [tasks[i].id.partition("/")[0] for i in first(tasks, 8)]
    assert Counter(asked) == {"sums": 4, "toy_repair": 4}


def test_a_part_begins_its_own_tasks() -> None:
    made = mixture(SUMS, REPAIR)
    tasks = made.tasks("train")

    async def begin() -> list[Any]:
        sandboxes = MemorySandboxes(MemorySandboxes.Config(), "run")
        return [await made.begin(tasks[i], await sandboxes.acquire(tasks[i])) for i in (0, 12)]

    sums, repair = asyncio.run(begin())
    assert isinstance(sums, SumsTask) and isinstance(repair, ToyRepairTask)
    assert not sums._task.id.startswith("sums/sums/"), "the part knows its task by its own id"


def test_a_part_that_cannot_rejoin_loses_the_episode() -> None:
    made = mixture(SUMS)
    with pytest.raises(SandboxError, match="takes up no task"):
        asyncio.run(made.rejoin(made.tasks("train")[0], None, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "environment.parts"),
        ([{"id": "sums", "weight": 0}], r"environment\.parts\.0\.weight"),
        ([{"id": "sums", "weight": float("inf")}], r"environment\.parts\.0\.weight"),
        ([{"id": "sums", "name": "a/b"}], r"environment\.parts\.0\.name"),
        ([{"id": "sums", "keep": [0.9, 0.1]}], "lower bound"),
        ([{"id": "sums"}, {"id": "sums"}], "two parts are called 'sums'"),
    ],
)
def test_what_the_table_may_not_say(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(*parts)


def test_it_has_a_solver_if_all_parts_have(tmp_path: Path) -> None:
    made = mixture(SUMS, REPAIR)
    task = made.tasks("train")[0]
    assert made.solver(task)("", random.Random(0)) == str(task.data["answer"])
    assert not hasattr(mixture(SUMS, {"id": "tests.unit.test_mixture:Nothing"}), "solver")


def test_a_parts_own_faults_are_named_with_their_place() -> None:
    with pytest.raises(ConfigError, match=r"environment\.parts\.1\.levels"):
        mixture(REPAIR, {"id": "sums", "levels": [77]})
    with pytest.raises(ConfigError, match="'summs' is not known") as error:
        mixture({"id": "summs"})
    assert "sums" in str(error.value.hint)


def test_an_unknown_key_of_a_part_is_told_the_mixture_s_keys_too() -> None:
    with pytest.raises(ConfigError, match=r"`environment\.parts\.0\.weigth` is not a setting") as caught:
        mixture({**SUMS, "weigth": 2.0})
    assert "`weight`" in caught.value.hint
    with pytest.raises(ConfigError, match=r"`environment\.parts\.0\.qqq` is not a setting") as caught:
        mixture({**SUMS, "qqq": 2.0})
    named = caught.value.hint.removeprefix("valid: ").split(", ")
    assert {"id", "weight", "name", "pass_rates", "keep", "train_tasks"} <= set(named)


class Nothing:
    """An environment without tasks."""

    Config = NoConfig

    def __init__(self, config: NoConfig) -> None:
        pass

    def tasks(self, split: str) -> list[Any]:
        return []


class NoRoom:
    """An environment whose constructor takes nothing."""

    Config = NoConfig


class NoFile(Nothing):
    """An environment that reads a file when it is made."""

    def __init__(self, config: NoConfig) -> None:
        Path("/nowhere/data.json").read_text()


@pytest.mark.parametrize(("name", "message"), [("NoRoom", "TypeError"), ("NoFile", "FileNotFoundError: .*/nowhere/data.json")])
def test_an_environment_that_cannot_be_made_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"test_mixture:{name}' cannot be made: {message}") as error:
        environment({"id": f"tests.unit.test_mixture:{name}"})
    assert error.value.hint


def test_an_empty_part_is_named() -> None:
    tasks = mixture(SUMS, {"id": "tests.unit.test_mixture:Nothing"}).tasks("train")
    with pytest.raises(ConfigError, match="'Nothing' has no task"):
        TaskOrder(tasks, 0)


# --- difficulty and metrics ------------------------------------------------------------------------------------------


def record(folder: Path, rewards: dict[str, list[float]], batch: int | None = None) -> Ledger:
    ledger = Ledger(folder)
    names = []
    for task, seen in rewards.items():
        for n, reward in enumerate(seen):
            name = f"{task.replace('/', '-')}-{n}"
            ledger.dispatch(name, "train", task, Slot(len(names), 0), 0)
            made = trajectory("oa", version=0, episode_id=name, reward=reward)
            ledger.complete(Episode(name, task, Termination.FINISHED, (made,), reward), 0, "pending")
            names.append(name)
    if batch is not None:
        ledger.consume(batch, names, 0)
    return ledger


def test_tasks_that_were_too_easy_or_too_hard_are_left_out(tmp_path: Path) -> None:
    plain = [task.id for task in mixture(SUMS).tasks("train")]
    easy, hard, fair = plain[0], plain[1].removeprefix("sums/"), plain[2]
    assert hard != plain[1]
    ledger = record(tmp_path, {easy: [1.0] * 4, hard: [0.0] * 4, fair: [1.0, 0.0, 0.0, 0.0]})
    part = {**SUMS, "pass_rates": str(tmp_path), "keep": [0.1, 0.9]}
    assert [task.id for task in mixture(part).tasks("train")] == plain[2:], "by the id in a mixture, or the part's own"
    held = [task.id for task in mixture(SUMS).tasks("heldout")]
    assert [task.id for task in mixture(part).tasks("heldout")] == held, "what evaluation asks is not chosen"
    ledger.close()


def test_a_filter_that_leaves_nothing_or_reads_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`environment\.parts\.0\.pass_rates`.*has no ledger"):
        mixture({**SUMS, "pass_rates": str(tmp_path)})
    plain = mixture(SUMS).tasks("train")
    record(tmp_path, {task.id: [1.0] for task in plain}).close()
    with pytest.raises(ConfigError, match="part 'sums': no training task"):
        mixture({**SUMS, "pass_rates": str(tmp_path)}).tasks("train")


def test_a_row_of_metrics_tells_the_sources_apart(tmp_path: Path) -> None:
    rewards = {"a/1": [1.0], "a/2": [0.0], "b/1": [0.25], "a/3": [1.0]}
    ledger = record(tmp_path, rewards, batch=1)
    load: dict[str, Any] = {"wait_s": 0.0, "train_s": 1.0, "publish_s": 0.0, "engine": {}, "slot_seconds": 0.0, "capacity": 0}
    clock = {"batch": 1, "version": 1, "consumed_version": 0, "engine_version": 1}
    row = Telemetry(ledger, 4, 0.0, mixed=True).row(**clock, **load)
    assert {key: value for key, value in row.items() if key.startswith("source/")} == {
        "source/a_reward": pytest.approx(2 / 3),
        "source/a_success": pytest.approx(2 / 3),
        "source/a_share": 0.75,
        "source/b_reward": 0.25,
        "source/b_success": 0.0,
        "source/b_share": 0.25,
    }
    assert not any(key.startswith("source/") for key in Telemetry(ledger, 4, 0.0).row(**clock, **load))
    ledger.close()
