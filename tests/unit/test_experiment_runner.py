"""Cells of a matrix: how they stand, that only what is missing runs, that a failure is noted and the others go on."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from evals.experiment import runner
from evals.experiment.matrix import Cell, Matrix
from evals.experiment.runner import FAILED, Outcome, folder_of, make_folder, outcome, run_matrix
from evals.verbs import experiment
from harness.errors import ConfigError
from tests.unit.experiment_support import BASE, matrix, rows, write_evaluation, write_run

SUITES = ["sums", "configs/quickstart.toml"]


class Commands:
    """Plays `sao`: notes what is asked, and writes what the real one would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[list[str]] = []
        self.under_way = self.most = 0
        self.fails: Callable[[Sequence[str]], bool] = lambda words: False
        self.rewards: list[float | None] = [1.0]

    async def __call__(self, words: Sequence[str], folder: Path) -> str:
        self.asked.append([str(Path(w).relative_to(self.root)) if w.startswith(str(self.root)) else w for w in words])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.fails(words):
            return "exit code 1\nerror: it broke"
        (cell,) = [c for c in self.cells if folder_of(self.root, c) == folder]
        if words[0] == "train":
            if "--resume" in words:
                (Path(words[-1]) / "summary.json").write_text("{}")
            else:
                write_run(self.root, cell, rows([0.5]))
        else:
            suite = Path(words[-1]).name.split("-")[1] if "--resume" in words else Path(words[1]).stem
            write_evaluation(self.root, cell, suite, self.rewards)
            return "exit code 1\n1 samples are missing" if None in self.rewards else ""
        return ""

    cells: Sequence[Cell] = ()


@pytest.fixture
def sao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands(tmp_path)
    monkeypatch.setattr(runner, "_command", made)
    return made


def ran(made: Matrix, sao: Commands, jobs: int = 1) -> list[Outcome]:
    """One `sao experiment`; what the folder says afterwards is what it returned."""
    sao.cells = made.cells()
    sao.asked.clear()
    found = asyncio.run(run_matrix(made, sao.root, jobs))
    assert [outcome(sao.root, cell) for cell in made.cells()] == found
    return found


def states(outcomes: Sequence[Outcome]) -> list[str]:
    return [o.state for o in outcomes]


# --- how a cell stands -----------------------------------------------------------------------------------------------


def test_how_a_cell_stands(tmp_path: Path) -> None:
    cell = Cell("s", "sao", 0, (*BASE, "seed=0", "steps=3"), ("sums",))
    place = folder_of(tmp_path, cell)
    assert outcome(tmp_path, cell) == Outcome(cell, "missing")
    place.mkdir(parents=True)
    (place / FAILED).write_text("it never began")
    assert outcome(tmp_path, cell) == Outcome(cell, "failed", None, "it never began")
    run = write_run(tmp_path, cell, rows([0.5]), success=None)
    assert outcome(tmp_path, cell) == Outcome(cell, "failed", run, "it never began")
    (place / FAILED).unlink()
    assert outcome(tmp_path, cell) == Outcome(cell, "stopped", run)
    (run / "summary.json").write_text("{}")
    assert outcome(tmp_path, cell).state == "stopped", "it is not judged"
    write_evaluation(tmp_path, cell, "sums", None)
    assert outcome(tmp_path, cell).state == "stopped"
    write_evaluation(tmp_path, cell, "sums", [1.0, None])
    assert outcome(tmp_path, cell).state == "stopped", "a sample is missing"
    write_evaluation(tmp_path, cell, "sums_hard", [1.0])
    assert outcome(tmp_path, cell).state == "stopped", "that is another suite"
    write_evaluation(tmp_path, cell, "sums", [1.0, 0.0])
    assert outcome(tmp_path, cell) == Outcome(cell, "done", run)
    (place / FAILED).write_text("a later one")
    assert outcome(tmp_path, cell).state == "failed"


def test_a_run_of_other_settings_is_none_of_the_cell_s(tmp_path: Path, sao: Commands) -> None:
    before = matrix()
    ran(before, sao)
    after = matrix(base=[*BASE, "trainer.optimizer.lr=0.5"])
    found = ran(after, sao)
    assert states(found) == ["failed"] * 4 and not sao.asked, "nothing is trained on, nothing is passed off"
    folder = folder_of(tmp_path, before.cells()[0])
    said = f"error: `trainer.optimizer.lr` was 0.001 when {folder} was begun and is 0.5 in the matrix; remove that folder"
    assert found[0].error.startswith(said)
    shutil.rmtree(folder)
    assert states(ran(after, sao))[0] == "done"


def test_a_damaged_result_is_judged_again(tmp_path: Path, sao: Commands) -> None:
    made = matrix(study=[{"name": "s", "arms": ["sao"], "steps": 3, "suites": ["sums"]}])
    ran(made, sao)
    (damaged,) = folder_of(tmp_path, made.cells()[0]).glob("evals/*/result.json")
    damaged.write_text(damaged.read_text()[:40])
    assert outcome(tmp_path, made.cells()[0]).state == "stopped"
    assert states(ran(made, sao)) == ["done"] * 2
    assert sao.asked == [["eval", "--resume", str(damaged.parent.relative_to(tmp_path))]]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`--out`: cannot make .*file") as caught:
        make_folder(tmp_path / "file" / "below")
    assert "can be written" in caught.value.hint


# --- running ---------------------------------------------------------------------------------------------------------


def test_every_cell_is_run_once(tmp_path: Path, sao: Commands) -> None:
    made = matrix()
    assert states(ran(made, sao)) == ["done"] * 4
    assert sao.asked == [["train", *c.words, f"run_dir={folder_of(tmp_path, c)}"] for c in made.cells()]
    assert states(ran(made, sao)) == ["done"] * 4 and not sao.asked, "the same command again runs nothing"


@pytest.mark.parametrize("jobs", [1, 3])
def test_so_many_at_a_time(sao: Commands, jobs: int) -> None:
    ran(matrix(), sao, jobs)
    assert sao.most == jobs


def test_what_was_stopped_goes_on(tmp_path: Path, sao: Commands) -> None:
    made = matrix()
    first, second, *_ = made.cells()
    write_run(tmp_path, first, rows([0.5]))
    write_run(tmp_path, second, rows([0.5]), success=None)
    assert states(ran(made, sao)) == ["done"] * 4
    assert sao.asked[0] == ["train", "--resume", "cells/s/grpo_dis-0/train-1"]
    assert [words[1] for words in sao.asked[1:]] == [BASE[0]] * 2


def test_a_failure_is_noted_and_the_others_go_on(sao: Commands) -> None:
    made = matrix()
    sao.fails = lambda words: "seed=0" in words and "grpo_dis" in words
    found = ran(made, sao)
    assert states(found) == ["done", "failed", "done", "done"] and "it broke" in found[1].error
    assert states(ran(made, sao)) == states(found) and len(sao.asked) == 1, "it is tried again, alone"
    sao.fails = lambda words: False
    found = ran(made, sao)
    assert states(found) == ["done"] * 4 and not any(o.error for o in found), "and its note goes when it succeeds"


def test_a_run_that_another_process_holds_is_left_to_it(tmp_path: Path, sao: Commands) -> None:
    made = matrix(seeds=[0])
    held = folder_of(tmp_path, made.cells()[0])
    held.mkdir(parents=True)
    sao.cells = made.cells()
    with (held / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = asyncio.run(run_matrix(made, tmp_path, 1))
    assert states(found) == ["held", "done"] and len(sao.asked) == 1
    assert states(ran(made, sao)) == ["done", "done"]


def test_a_run_that_outlives_a_killed_experiment_is_waited_for(tmp_path: Path, sao: Commands) -> None:
    made = matrix(seeds=[0])
    run = write_run(tmp_path, made.cells()[0], rows([0.5]), success=None)
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sao.cells = made.cells()
        found = asyncio.run(run_matrix(made, tmp_path, 1))
        assert states(found) == ["held", "done"] and not (folder_of(tmp_path, made.cells()[0]) / FAILED).exists()
    assert states(ran(made, sao)) == ["done", "done"]


# --- suites ----------------------------------------------------------------------------------------------------------


def judged() -> Matrix:
    return matrix(seeds=[0], study=[{"name": "s", "arms": ["sao"], "steps": 3, "suites": SUITES}])


def test_every_final_policy_is_judged_once(sao: Commands) -> None:
    assert states(ran(judged(), sao)) == ["done"]
    evaluations = [words for words in sao.asked if words[0] == "eval"]
    assert [words[1] for words in evaluations] == SUITES, "a file too"
    assert all(words[2:4] == ["--model", "cells/s/sao-0/train-1"] for words in evaluations)
    assert states(ran(judged(), sao)) == ["done"] and not sao.asked


def test_samples_that_are_missing_are_played_again(sao: Commands) -> None:
    sao.rewards = [1.0, None]
    found = ran(judged(), sao)
    assert states(found) == ["failed"] and "missing" in found[0].error
    sao.rewards = [1.0, 0.0]
    assert states(ran(judged(), sao)) == ["done"]
    assert [words[:2] for words in sao.asked] == [["eval", "--resume"], ["eval", SUITES[1]]]


def test_a_policy_that_was_never_judged_is_judged_later(tmp_path: Path, sao: Commands) -> None:
    made = judged()
    write_run(tmp_path, made.cells()[0], rows([0.5]))
    assert states(ran(made, sao)) == ["done"] and [words[0] for words in sao.asked] == ["eval", "eval"]


# --- the verb --------------------------------------------------------------------------------------------------------


def test_the_exit_code_says_whether_all_is_done(tmp_path: Path, sao: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text(f'base = {BASE}\nseeds = [0]\n[[study]]\nname = "s"\narms = ["sao", "grpo_dis"]\nsteps = 3\n')
    sao.cells = matrix(seeds=[0]).cells()
    sao.fails = lambda words: "grpo_dis" in words

    def verb(report_only: bool) -> int:
        return experiment(path, tmp_path, 1, report_only=report_only, run=asyncio.run)

    assert verb(True) == 1 and not sao.asked, "only the report"
    assert "2 missing" in Path(capsys.readouterr().out.strip()).read_text()
    assert verb(False) == 1
    report = Path(capsys.readouterr().out.strip())
    assert report == tmp_path / "report" / "report.md" and "1 done, 1 failed" in report.read_text()
    sao.fails = lambda words: False
    assert verb(False) == 0 and verb(True) == 0


def test_an_interruption_says_how_to_go_on(tmp_path: Path, sao: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text(f'base = {BASE}\n[[study]]\nname = "s"\narms = ["sao"]\nsteps = 3\n')

    def interrupted(job: object) -> None:
        job.close()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment(path, tmp_path, 1, report_only=False, run=interrupted)
    assert "the same command goes on" in capsys.readouterr().err
