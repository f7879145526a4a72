"""Real `sao` processes for the end-to-end tests: start, follow, stop, look at what is left."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANY_CRITIC = ["value.min_ev=-1", "value.max_bias=1", "value.heldout=0.4"]
"""So few episodes teach a critic nothing; these tests are about something else."""
SMALL = ["eval.tasks=96", "value.episodes=64", "value.epochs=2", *ANY_CRITIC]


def command(*args: str) -> list[str]:
    """The `sao` of this environment."""
    return [sys.executable, "-c", "from harness.cli import main; main()", *args]


def sao(*args: str, timeout_s: float = 900.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(*args), cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


class Training:
    """A `sao train` (or another verb) that runs in the background; its log is read line by line."""

    def __init__(self, *args: str, verb: str = "train") -> None:
        self.process = subprocess.Popen(
            command(verb, *args),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
        )
        self.lines: list[str] = []
        self._text = ""

    def until(self, start: str, timeout_s: float = 240.0) -> str:
        """The first line that begins so."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            while "\n" in self._text:
                line, _, self._text = self._text.partition("\n")
                self.lines.append(line + "\n")
                if line.startswith(start):
                    return line
            ready, _, _ = select.select([self.process.stderr], [], [], deadline - time.monotonic())
            more = os.read(self.process.stderr.fileno(), 65_536) if ready else b""
            if not more:
                break
            self._text += more.decode()
        raise AssertionError(f"no line {start!r} in:\n{''.join(self.lines)}")

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(next(line for line in self.lines if line.startswith("run: ")).removeprefix("run: ").strip())

    def children(self) -> list[int]:
        """Every process below it."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(stat.parent.name)] = int(fields[1])
        found, todo = [], [self.process.pid]
        while todo:
            below = [pid for pid, parent in parents.items() if parent in todo]
            found += below
            todo = below
        return found

    def stop(self, sig: signal.Signals) -> tuple[int, float]:
        """Send a signal; (exit code, seconds until the end)."""
        start = time.monotonic()
        self.process.send_signal(sig)
        _, errors = self.process.communicate(timeout=60.0)
        self.lines.append(errors)
        return self.process.returncode, time.monotonic() - start


def all_gone(pids: list[int], timeout_s: float = 20.0) -> list[int]:
    """The processes that are still there after waiting for them to end."""
    left = []
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        os.close(handle)
        if not ready:
            left.append(pid)
    return left


def sandboxes_left(run: Path) -> list[str]:
    """Processes and temp folders that carry the run's label."""
    left = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SAO_SANDBOX={run.name}".encode() in environ.read_bytes():
                left.append(environ.parent.name)
        except OSError:
            continue
    import tempfile

    return left + [str(p) for p in Path(tempfile.gettempdir()).glob(f"*{run.name}*")]


def book(run: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of the ledger."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        return ledger.execute(query).fetchall()


def assert_closed(run: Path, steps: int, batch: int) -> None:
    """Every episode has one outcome, every batch is whole and finished, every trained trajectory is on disk."""
    assert book(run, "SELECT COUNT(*) FROM episodes WHERE status = 'running'") == [(0,)]
    batches = book(run, "SELECT number, finished FROM batches ORDER BY number")
    assert batches == [(n, 1) for n in range(1, steps + 1)]
    sizes = book(run, "SELECT batch, COUNT(*) FROM episodes WHERE purpose = 'train' AND status = 'trained' GROUP BY batch")
    assert sizes == [(n, batch) for n in range(1, steps + 1)]
    for name, segments in book(run, "SELECT id, segments FROM episodes WHERE purpose = 'train' AND status = 'trained'"):
        assert all((run / "trajectories" / f"{name}.{s}.parquet").is_file() for s in range(segments))


def summary(run: Path) -> dict[str, Any]:
    """summary.json."""
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
