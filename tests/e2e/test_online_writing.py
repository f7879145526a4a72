"""Online writing as a user runs it, in small: two switches inside the run, killed and resumed between them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import ANY_CRITIC, ROOT, Training, assert_closed, book, metrics, sao, summary

pytestmark = pytest.mark.timeout(600)

CONFIG = "configs/online-writing.toml"
PHASES = ", ".join(
    f'{{preferred = "{style}", candidates = ["cute", "chuunibyou", "{third}"], episodes = {n}}}'
    for style, third, n in (("cute", "academic", 64), ("chuunibyou", "academic", 64), ("classical", "classical", 640))
)
SHORT = f"environment.phases=[{PHASES}]"
SMALL = [SHORT, "eval.tasks=24", "value.episodes=48", "value.epochs=1", *ANY_CRITIC]


def played(run: Path) -> list[tuple[int, ...]]:
    """(task, draw) of every training episode, in the order of dispatch."""
    return book(run, "SELECT task_index, draw FROM episodes WHERE purpose = 'train' ORDER BY rowid")


def test_a_killed_run_goes_on_in_the_stream(tmp_path: Path) -> None:
    job = Training(CONFIG, f"run_dir={tmp_path}", "steps=10", "trainer.checkpoint_every=2", *SMALL)
    try:
        job.until("step 5 ")
        job.stop(signal.SIGKILL)
        run = job.run
        before = played(run)
        done = sao("train", "--resume", str(run))
        assert done.returncode == 0, done.stderr
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(30.0)
    assert_closed(run, 10, 16)
    after = played(run)
    assert after[: len(before)] == before
    assert all(index == draw - 1 for index, draw in after), "each draw has its task, in whichever process it is played"
    assert book(run, "SELECT MAX(task_index) FROM episodes WHERE purpose = 'value'") == [(47,)], "nothing of later phases"
    assert {"success_cute", "success_chuunibyou", "success_classical"} < set(summary(run)["heldout"]["after"])
    assert all("value/ev" in row for row in metrics(run))
    command = [sys.executable, "-m", "evals.online_writing", str(run)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "| 1 | 3 classical |" in told
