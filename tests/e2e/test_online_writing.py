"""Online writing as a user runs it, in small: both arms, a switch inside the run, a resumed stream."""

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


def phases(run: Path) -> list[tuple[int, ...]]:
    """(task, draw) of every training episode that was played, in the order of dispatch."""
    return book(run, "SELECT task_index, draw FROM episodes WHERE purpose = 'train' ORDER BY rowid")


@pytest.mark.parametrize("arm", [[], ["running_mean_128"]])
def test_both_arms_come_through_switches(arm: list[str], tmp_path: Path) -> None:
    small = SMALL[:2] if arm else SMALL
    done = sao("train", CONFIG, *arm, f"run_dir={tmp_path}", "steps=10", *small)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.iterdir()
    assert_closed(run, 10, 16)
    assert all(index == draw - 1 for index, draw in phases(run)), "the stream is drawn in its order"
    values = book(run, "SELECT MAX(task_index) FROM episodes WHERE purpose = 'value'")
    assert values == ([(None,)] if arm else [(47,)]), "the critic learns from the first phase alone"
    rows = metrics(run)
    assert ("value/ev" in rows[0]) == (not arm)
    assert {"success_cute", "success_chuunibyou", "success_classical"} < set(summary(run)["heldout"]["after"])
    command = [sys.executable, "-m", "evals.online_writing", str(run)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "| 1 | 3 classical |" in told


def test_a_resumed_run_goes_on_in_the_stream(tmp_path: Path) -> None:
    job = Training(CONFIG, "running_mean_128", f"run_dir={tmp_path}", "steps=8", *SMALL[:2], "trainer.checkpoint_every=2")
    try:
        job.until("step 5 ")
        job.stop(signal.SIGKILL)
        before = phases(job.run)
        done = sao("train", "--resume", str(job.run))
        assert done.returncode == 0, done.stderr
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(30.0)
    assert_closed(job.run, 8, 16)
    after = phases(job.run)
    assert after[: len(before)] == before
    assert all(index == draw - 1 for index, draw in after), "each draw has its task, in whichever process it is played"
