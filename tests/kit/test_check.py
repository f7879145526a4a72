"""The contract suite passes a sound environment and names the fault of each planted one, and that alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.kit.check import as_json, check, passed, table
from harness.kit.leaks import holdings
from harness.kit.verdicts import Verdict
from tests.kit import planted

ROOT = str(Path(__file__).parents[2])
MEMORY = "sandbox.id=memory"
FAULTS = {
    planted.IgnoresUnknownOptions: ("config", "unknown option"),
    planted.HasASetInItsData: ("plain_tasks", "train/0/0"),
    planted.FollowsTheHash: ("repeatable_tasks", "task 0 of `train`"),
    planted.DrawsGlobally: ("repeatable_tasks", "task 0 of `train`"),
    planted.NamesTwoTasksAlike: ("unique_ids", "the task"),
    planted.TrainsOnHeldOut: ("disjoint_splits", "one problem"),
    planted.OffersOtherTools: ("begin", "other tools"),
    planted.RaisesInATool: ("episodes", "no such key"),
    planted.RewardsATurnThatWasNot: ("turn_rewards", "turn 99"),
    planted.NeverJudges: ("limits", "ran into its limit"),
    planted.CannotBeCancelled: ("limits", "hangs in `tool`"),
    planted.TakesATimeoutForAZero: ("limits", "hangs in `score` was scored 0"),
    planted.BlocksTheLoop: ("blocking", "time.sleep(1.7)"),
    planted.CannotBeSolved: ("solver", "0.5 of 1"),
    planted.CannotSolve: ("solver", "the solver raised KeyError: 'no such key' on train/0/0"),
    planted.SolvesOneTask: ("solver", "the solver raised ZeroDivisionError: integer division or modulo by zero on train/0/1"),
    planted.SolvesWithNothing: ("solver", "its script gave NoneType, not text"),
    planted.PaysForNothing: ("idle", "gets 0.1"),
    planted.JudgesByLot: ("verdict", "silence"),
    planted.JudgesInfinitely: ("verdict", "not finite"),
    planted.TrustsArguments: ("arguments", "IndexError"),
    planted.LeavesAProcess: ("clean_up", "process sleep"),
    planted.LeavesADaemon: ("clean_up", "process sleep"),
    planted.WritesHere: ("clean_up", "state.json in the current folder"),
    planted.WritesAtHome: ("clean_up", ".planted in the home folder"),
    planted.LeavesAFile: ("clean_up", "temporary file"),
    planted.LeavesASandbox: ("clean_up", "fresh"),
    planted.LeavesATask: ("clean_up", "asyncio task"),
    planted.KeepsStateInTheEnvironment: ("concurrency", "alone"),
    planted.AnswersWithTheLatest: ("concurrency", "`look` answers train/0/"),
    planted.ShowsAllThatWasAsked: ("concurrency", "`look` answers train/0/"),
    planted.WritesTheAnswer: ("secrets", "tests/expected.txt"),
    planted.TakesALossForAZero: ("lost_sandbox", "lost in `score`"),
}


def spec(cls: type) -> str:
    return f"{cls.__module__}:{cls.__name__}"


def failures(verdicts: list[Verdict]) -> dict[str, str]:
    return {v.name: v.said for v in verdicts if v.outcome == "failed"}


@pytest.mark.parametrize("sandbox", ["memory", "process"])
def test_a_sound_environment_passes(sandbox: str) -> None:
    temp = tempfile.gettempdir()
    verdicts = check(spec(planted.Sound), [f"sandbox.id={sandbox}", "seed=3"])
    assert [v for v in verdicts if v.outcome != "passed"] == []
    assert passed(verdicts) and len(verdicts) == 18
    assert all(v.name in table(verdicts) and v.said in table(verdicts) for v in verdicts)
    assert json.loads(json.dumps(as_json("x", verdicts)))["ok"] is True
    assert tempfile.gettempdir() == temp and os.environ.get("TMPDIR", temp) == temp


@pytest.mark.parametrize(
    ("cls", "name", "seen"), [(cls, *fault) for cls, fault in FAULTS.items()], ids=lambda x: getattr(x, "__name__", "")
)
def test_the_suite_names_the_fault(cls: type, name: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    short = ["limits.wall_s=2"] if cls is planted.NeverJudges else []
    try:
        verdicts = check(spec(cls), [MEMORY, *short])
    finally:
        for process in planted.LeavesAProcess.started:
            process.kill()
            process.wait(10.0)
        planted.LeavesAProcess.started.clear()
        for pid in planted.LeavesADaemon.started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        planted.LeavesADaemon.started.clear()
    assert list(failures(verdicts)) == [name], table(verdicts)
    assert seen in failures(verdicts)[name]
    assert not passed(verdicts)
    (todo,) = [v.todo for v in verdicts if v.outcome == "failed"]
    assert todo


def test_replies_that_vary_by_themselves_are_no_fault() -> None:
    verdicts = check(spec(planted.TellsTheTime), [MEMORY])
    assert passed(verdicts), table(verdicts)
    (said,) = [v.said for v in verdicts if v.name == "concurrency"]
    assert said.endswith("replies of `look` vary even alone, and were not compared")


def test_what_needs_a_solver_that_raises_is_not_done() -> None:
    verdicts = {v.name: v for v in check(spec(planted.CannotSolve), [MEMORY])}
    assert verdicts["solver"].todo == "correct `solver`"
    for name in ("episodes", "turn_rewards", "limits", "verdict"):
        assert (verdicts[name].outcome, verdicts[name].said) == ("skipped", "`solver` comes first"), name
    for name in ("blocking", "clean_up", "concurrency", "lost_sandbox"):
        assert verdicts[name].outcome == "skipped", name


def test_every_check_has_a_planted_fault() -> None:
    verdicts = {v.name for v in check(spec(planted.Sound), [MEMORY])}
    assert {name for name, _ in FAULTS.values()} == verdicts


class Unsolved(planted.Sound):
    """Offers no solver."""

    solver = property()  # type: ignore[assignment]


def test_without_a_solver_nothing_is_proved_unless_that_is_allowed() -> None:
    verdicts = check(spec(Unsolved), [MEMORY])
    assert {v.name: v.outcome for v in verdicts if v.outcome != "passed"} == {"solver": "skipped"}
    assert not passed(verdicts)
    assert passed(verdicts, without_solver=True)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("no_such_environment", [], "is not known"),
        ("tests.kit.planted:Soundd", [], "has no `Soundd`"),
        ("tests.kit.planted:Sound", ["sead=3"], "`environment.sead` is not a setting"),
        ("tests.kit.planted:Sound", ["sandbox.id=wooden"], "sandbox.id = 'wooden'"),
        ("tests.kit.planted:Sound", ["limits.turns=3"], "`limits.turns` is not a setting"),
    ],
)
def test_what_cannot_be_had_is_a_config_error(name: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(name, words)
    assert caught.value.hint


def test_a_module_without_its_class_is_told_how_a_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mirror_kit.py").write_text("class Mirror:\n    Config = dict\n\nclass MirrorTask: ...\n")
    for name in ("mirror_kit", "tests.kit.planted"):
        with pytest.raises(ConfigError, match="is not known") as caught:
            check(name)
        assert "module:Class" in caught.value.hint
    assert "`tests.kit.planted:Sound`" in caught.value.hint and "planted:Live`" not in caught.value.hint
    for name, said in (("tests.kit.planned", "No module named"), ("harness.errors", "no class with a `Config`")):
        with pytest.raises(ConfigError) as caught:
            check(name)
        assert "module:Class" in caught.value.hint and said in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        check("summs")
    assert caught.value.hint == "did you mean `sums`?"


def test_a_pool_that_grows_is_no_leak() -> None:
    async def grown() -> set[str]:
        before = holdings()
        with ThreadPoolExecutor(1, thread_name_prefix="docker") as ours, ThreadPoolExecutor(1, "mine") as theirs:
            ours.submit(int).result(10.0)
            theirs.submit(int).result(10.0)
            return holdings() - before

    assert asyncio.run(grown()) == {"thread mine_0"}
