"""The quickstart with its policy on a real vLLM server: it learns as well, its record is exact, no process stays behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.support import SMALL, Training, all_gone, assert_closed, book, metrics, sandboxes_left, sao, summary
from tests.vllm.support import PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2_400),
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make setup-vllm"),
]

STEPS = 20
WAIT_S = 1_100.0


class Trained(NamedTuple):
    """A finished job, and the process ids of the vLLM server that it had at step 3."""

    run: Path
    server: list[int]


def is_vllm(pid: int) -> bool:
    """By its interpreter, or by the title that vLLM gives itself."""
    try:
        return b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes().lower()
    except OSError:  # it has ended
        return False


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("runs")
    job = Training("configs/quickstart.toml", "engine.id=vllm", f"run_dir={folder}", *SMALL, f"steps={STEPS}")
    try:
        job.until("step 3 ", WAIT_S)
        server = list(filter(is_vllm, job.children()))
        _, errors = job.process.communicate(timeout=WAIT_S)
        assert job.process.returncode == 0, errors
        yield Trained(job.run, server)
    finally:
        if job.process.poll() is None:
            job.stop(signal.SIGKILL)


def test_it_learns(trained: Trained) -> None:
    heldout = summary(trained.run)["heldout"]
    assert heldout["before"]["n"] == heldout["after"]["n"] == 96
    assert heldout["after"]["success"] >= heldout["before"]["success"] + 0.2, heldout


def test_the_record_is_whole(trained: Trained) -> None:
    assert_closed(trained.run, STEPS, 32)
    rows = metrics(trained.run)
    assert rows[-1]["version"] == STEPS
    assert rows[0]["staleness/max"] == 0
    assert rows[0]["mismatch/abs_logp_diff"] < 1e-4, "vLLM and trainer agree before the first update"
    verified = sao("verify", str(trained.run))
    assert verified.returncode == 0, verified.stdout
    assert verified.stdout.splitlines()[-1] == "ok"


def test_weights_change_while_episodes_run(trained: Trained) -> None:
    mixed = book(trained.run, "SELECT COUNT(*) FROM episodes WHERE purpose = 'train' AND min_version < max_version")[0][0]
    assert mixed > 0


def test_nothing_is_left(trained: Trained) -> None:
    assert len(trained.server) >= 2, "the API server and its engine"
    assert not any(map(is_vllm, all_gone(trained.server)))
    assert sandboxes_left(trained.run) == []
