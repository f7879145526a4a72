"""The swe environment without any container: its tasks, and the verdicts that need none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from environments.swe.environment import FACTS, PATCH, Swe, SweConfig
from environments.swe.grading import Grade, GradingLimits, screen
from environments.swe.rows import SweRow
from environments.swe.tools import clip
from harness.errors import VerifierFault
from harness.registry import find, plugin_config

pytest.importorskip("swebench")

ROW = {
    "instance_id": "i",
    "repo": "r",
    "base_commit": "c",
    "problem_statement": "It {breaks}.",
    "patch": "p",
    "test_patch": "",
    "FAIL_TO_PASS": ["a"],
    "PASS_TO_PASS": ["b"],
    "image": "image:1",
    "eval_script": "e",
    "log_parser": "parse_log_pytest",
}


def dataset(path: Path, *names: str) -> str:
    path.write_text("".join(json.dumps({**ROW, "instance_id": name}) + "\n" for name in names))
    return str(path)


def swe(**options: Any) -> Swe:
    return Swe(SweConfig.model_validate({"dataset": "none", **options}))


class Nowhere:
    """Sandboxes that nobody may ask for."""

    async def acquire(self, task: Any) -> Any:
        raise AssertionError("no container is needed")


def test_it_is_found_by_name() -> None:
    assert find("environment", "swe") is Swe
    _, config = plugin_config("environment", {"id": "swe", "dataset": "x", "grading": {"timeout_s": 5}})
    assert isinstance(config, SweConfig) and config.grading.timeout_s == 5


def test_the_splits_share_no_task(tmp_path: Path) -> None:
    names = [f"r__r-{i}" for i in range(200)]
    environment = swe(dataset=dataset(tmp_path / "a.jsonl", *names), heldout=0.3)
    train, heldout = ([task.id for task in environment.tasks(split)] for split in ("train", "heldout"))  # type: ignore[arg-type]
    assert sorted(train + heldout) == sorted(names)
    assert 30 < len(heldout) < 90
    again = swe(dataset=dataset(tmp_path / "b.jsonl", *names[:50]), heldout=0.3)
    assert {task.id for task in again.tasks("heldout")} == set(heldout) & set(names[:50])


def test_another_dataset_can_be_held_out(tmp_path: Path) -> None:
    here, there = dataset(tmp_path / "a.jsonl", "x", "y"), dataset(tmp_path / "b.jsonl", "y", "z")
    environment = swe(dataset=here, heldout=there)
    assert [task.id for task in environment.tasks("train")] == ["x"]
    assert [task.id for task in environment.tasks("heldout")] == ["y", "z"]


def test_a_task_asks_in_words_and_hides_the_answer(tmp_path: Path) -> None:
    task = swe().task(SweRow.model_validate({**ROW, "patch": "GOLD", "test_patch": "HIDDEN"}))
    assert (task.id, task.image) == ("i", "image:1")
    assert "It {breaks}." in task.messages[0]["content"] and "/testbed" in task.messages[0]["content"]
    assert "GOLD" not in str(task.messages) and "HIDDEN" not in str(task.messages)
    json.dumps(task.data)


@pytest.mark.parametrize(
    ("patch", "facts", "outcome"),
    [
        (b"", {}, "empty"),
        (b"", {"reason": "too_large", "size": 9}, "too_large"),
        (b"", {"reason": "repository_lost"}, "failed"),
        (b"", {"reason": "unreadable"}, "failed"),
        (b"", {"reason": "timeout"}, "timeout"),
        (b"x" * 2_000_000, {}, "too_large"),
        (b"hello\n", {}, "apply_failed"),
    ],
)
def test_verdicts_without_a_container(patch: bytes, facts: dict[str, Any], outcome: str) -> None:
    environment = swe()
    task = environment.task(SweRow.model_validate(ROW))
    artifacts = {PATCH: patch, FACTS: json.dumps(facts).encode()}
    score = asyncio.run(environment.regrade(task, artifacts, Nowhere()))  # type: ignore[arg-type]
    assert (score.reward, score.info["outcome"]) == (0.0, outcome)
    assert facts.get("reason", "") in ("", *score.info["flags"])
    again = asyncio.run(environment.regrade(task, score.artifacts, Nowhere()))  # type: ignore[arg-type]
    assert again == score


def test_a_row_without_a_proper_test_patch_is_infrastructure() -> None:
    row = SweRow.model_validate({**ROW, "test_patch": "nonsense"})
    screened = screen(b"", row, GradingLimits())
    assert isinstance(screened, Grade) and (screened.outcome, screened.reward) == ("infrastructure", None)
    environment = swe()
    with pytest.raises(VerifierFault, match="test_patch is no patch"):
        asyncio.run(environment.regrade(environment.task(row), {PATCH: b"x\n"}, Nowhere()))  # type: ignore[arg-type]


def test_only_resolved_is_worth_something() -> None:
    outcomes = ("resolved", "failed", "apply_failed", "empty", "timeout", "too_large", "infrastructure")
    assert [Grade(outcome).reward for outcome in outcomes] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, None]


def test_long_output_keeps_head_and_tail() -> None:
    assert clip("abc\n\n", 10) == "abc"
    assert clip("a" * 50 + "b" * 50, 20) == "a" * 10 + "\n[... 80 characters left out ...]\n" + "b" * 10
