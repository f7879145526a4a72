"""`sao eval` and `sao experiment` as a user runs them: results, reports, and that they go on after a kill or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from evals.result import load
from evals.scripted_endpoint import ScriptedEndpoint
from harness.registry import environment
from tests.e2e.support import ANY_CRITIC, Training, all_gone, book, metrics, sandboxes_left, sao, summary

pytestmark = pytest.mark.timeout(600)

CORRIDOR = ["--model", "configs/corridor-warm", 'model.stop=["<eos>"]', "trainer.dtype=float32"]
FEW = ["--problems", "12", "--runs", "2"]


def evaluated(*words: str, code: int = 0) -> dict[str, Any]:
    """`sao eval --json` to its end."""
    done = sao("eval", *words, "--json")
    assert done.returncode == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def corridor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny warm policy on a few walks."""
    return evaluated("corridor", *CORRIDOR, *FEW, f"run_dir={tmp_path_factory.mktemp('runs')}")


def test_a_model_folder(corridor: dict[str, Any]) -> None:
    run = Path(corridor["run"])
    assert (corridor["problems"], corridor["runs"], corridor["judged"], corridor["missing"]) == (12, 2, 24, 0)
    assert 0 < corridor["successes"] < 24 and corridor["success"] == corridor["successes"] / 24
    assert corridor["terminations"] == {"finished": 24} and corridor["official"] is None
    assert corridor["uses"]["turns"]["total"] == 3 * 24 and corridor["uses"]["seconds"]["mean"] > 0
    assert len(corridor["settings"]["identity"]["sha256"]) == 64
    result = load(run)
    assert len(result.samples) == 24 and sum(s.reward or 0 for s in result.samples) == corridor["successes"]
    assert book(run, "SELECT status, COUNT(*), MIN(min_version), MAX(max_version) FROM episodes") == [("evaluated", 24, 0, 0)]
    assert "12 problems, 2 runs each" in (run / "report.md").read_text() and "</svg>" in (run / "report.html").read_text()
    assert sandboxes_left(run) == []


def test_token_records_of_our_own_models_are_whole(corridor: dict[str, Any]) -> None:
    run = Path(corridor["run"])
    assert len(list((run / "trajectories").glob("*.parquet"))) == 24
    done = sao("verify", str(run))
    assert done.returncode == 0 and "24 trajectories, 72 turns" in done.stdout, done.stdout


def test_a_whole_evaluation_has_nothing_to_resume(corridor: dict[str, Any]) -> None:
    again = evaluated("--resume", corridor["run"])
    assert again == corridor
    assert book(Path(corridor["run"]), "SELECT COUNT(*) FROM episodes") == [(24,)]


def test_an_agent_with_tools(tmp_path: Path) -> None:
    """The quickstart's policy, in text, with sandboxes that are processes."""
    words = ["toy_repair", "--model", "configs/quickstart-warm", "trainer.dtype=float32", "--problems", "6"]
    done = sao("eval", *words, f"run_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.iterdir()
    assert "of 6 judged samples succeeded" in done.stdout and f"report: {run / 'report.html'}" in done.stdout
    assert "6 of 6" in done.stderr and f"run: {run}" in done.stderr
    assert sandboxes_left(run) == []


# --- kill -9 ---------------------------------------------------------------------------------------------------------


class Stalling(ScriptedEndpoint):
    """Plays perfectly until `left` requests have been answered, then answers none until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(environment({"id": "corridor"}))
        self.left = 30
        self.stalled, self.goes_on = threading.Event(), threading.Event()

    async def _post(self, request: web.Request) -> web.Response:
        self.left -= 1
        if self.left < 0:
            self.stalled.set()
            while not self.goes_on.is_set():
                await asyncio.sleep(0.05)
        return await super()._post(request)


@pytest.fixture
def endpoint() -> Iterator[Stalling]:
    """Served from a thread."""
    made, ready, over = Stalling(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with made:
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30.0)
    yield made
    made.goes_on.set()
    loop.call_soon_threadsafe(over.set)
    thread.join(30.0)
    loop.close()


def test_kill_9_and_resume_and_compare(tmp_path: Path, endpoint: Stalling, corridor: dict[str, Any]) -> None:
    words = ["corridor", "--model", f"{endpoint.url}#perfect", *FEW, f"run_dir={tmp_path}", "rollout.concurrency=4"]
    playing = Training(*words, verb="eval")
    playing.until("run: ")
    assert endpoint.stalled.wait(60.0)
    playing.stop(signal.SIGKILL)
    ((before,),) = book(playing.run, "SELECT COUNT(*) FROM episodes WHERE reward IS NOT NULL")
    assert 0 < before < 24 and not (playing.run / "result.json").exists()

    endpoint.goes_on.set()
    perfect = evaluated("--resume", str(playing.run))
    assert (perfect["judged"], perfect["success"], perfect["missing"]) == (24, 1.0, 0)
    judged = "SELECT COUNT(*), COUNT(DISTINCT task_index || '/' || member) FROM episodes WHERE reward IS NOT NULL"
    assert book(playing.run, judged) == [(24, 24)], "what had a verdict was not played again"
    assert book(playing.run, "SELECT COUNT(*) FROM episodes WHERE status = 'running'") == [(0,)]

    out = tmp_path / "comparison"
    done = sao("eval", "--compare", str(playing.run), corridor["run"], "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["found"] and found["difference"] == pytest.approx(1.0 - corridor["success"])
    assert "A is ahead of B" in found["verdict"] and (out / "comparison.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["aime_2024", *CORRIDOR], "suite 'aime_2024' is not known"),
        (["corridor", "--model", "nowhere"], "`--model` = 'nowhere' is no model"),
        (["--compare", "configs", "configs"], "cannot be read"),
        (["--compare", "a", "b", "--runs", "2"], "--compare plays nothing"),
        (["--compare", "a", "b", "--dry-run"], "--compare plays nothing"),
        (["corridor", "--model", "configs/corridor-warm", "--out", "x"], "--out is for --compare"),
    ],
)
def test_one_clear_error(words: list[str], message: str) -> None:
    done = sao("eval", *words)
    assert done.returncode == 2 and not done.stdout
    assert f"error: {message}" in done.stderr or message in done.stderr
    assert "hint: " in done.stderr and "Traceback" not in done.stderr


# --- experiments -----------------------------------------------------------------------------------------------------


def wait_for(found: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    """Look until something is there; the process must be at work meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not found():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def cell_runs(root: Path, cell: str) -> list[Path]:
    return [path.parent for path in (root / "cells" / "s" / cell).glob("train-*/ledger.sqlite")]


def under_way(root: Path, cell: str) -> bool:
    """Whether a cell's run has begun to play."""
    try:
        return any(book(run, "SELECT COUNT(*) FROM episodes") > [(0,)] for run in cell_runs(root, cell))
    except sqlite3.OperationalError:
        return False


@pytest.mark.long
def test_an_experiment_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    suite = tmp_path / "walks.toml"
    suite.write_text(
        '[environment]\nid = "corridor"\n[sandbox]\nid = "memory"\n'
        "[limits]\nmax_turns = 3\nmax_context = 64\nmax_tokens_per_turn = 6\n[eval]\ntasks = 8\n"
    )
    small = [
        "value.episodes=32",
        "value.epochs=1",
        "eval.tasks=8",
        "algorithm.batch=8",
        "rollout.concurrency=16",
        "rollout.publish_every=2",
    ]
    matrix = tmp_path / "m.toml"
    matrix.write_text(
        f"title = 'Tiny'\nbase = {['configs/corridor.toml', *small]}\nseeds = [5]\n[arms]\nsao = {ANY_CRITIC}\n"
        f"[[study]]\nname = 's'\narms = ['sao', 'grpo_dis']\nsteps = 3\nsuites = ['{suite}']\n"
    )
    root = tmp_path / "out"
    playing = Training(str(matrix), "--out", str(root), verb="experiment")
    wait_for(lambda: under_way(root, "sao-5"), playing.process)
    children = playing.children()
    code, _ = playing.stop(signal.SIGINT)
    assert code == 130, playing.lines
    assert "the same command goes on" in playing.lines[-1] and "Traceback" not in "".join(playing.lines)
    assert all_gone(children, 10.0) == []
    (stopped,) = cell_runs(root, "sao-5")
    assert not (stopped / "summary.json").exists()
    assert book(stopped, "SELECT COUNT(*) FROM episodes WHERE status = 'running'") == [(0,)]

    done = sao("experiment", str(matrix), "--out", str(root), "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert cell_runs(root, "sao-5") == [stopped], "it went on where it stood"
    for cell in ("sao-5", "grpo_dis-5"):
        (run,) = cell_runs(root, cell)
        assert [row["step"] for row in metrics(run)] == [1, 2, 3] and summary(run)["policy_version"] == 3
        (judged,) = (root / "cells" / "s" / cell / "evals").iterdir()
        assert load(judged).problems and load(judged).model == str(run)
    report = Path(done.stdout.strip()).read_text()
    assert "Cells: 2 done. Seeds: 5." in report and "| sao |" in report and "| grpo_dis |" in report and "| walks |" in report
