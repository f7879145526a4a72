"""Runs the cells of a matrix, some at a time, each as `sao train` of its own; whatever ended goes on where it stood.

Flows in: a `Matrix` and a folder. Flows out: `cells/<study>/<arm>-<seed>/` with one run folder each, and how every cell stands.
The folder is the only state: the same command again runs what is missing. Several machines share a matrix by running the same
command on the same folder: each takes cells that no one holds.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evals.experiment.matrix import Cell, Matrix
from harness import processes
from harness.errors import ConfigError

log = logging.getLogger("sao")

SAO_COMMAND = (sys.executable, "-c", "from harness.cli import main; main()")
STOP_GRACE_S = 20.0
"""A stopped run has this long to write what it has."""
State = Literal["done", "stopped", "failed", "held", "missing"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell stands; `run` is its newest run folder, if any."""

    cell: Cell
    state: State
    run: Path | None = None
    error: str = ""


def folder_of(root: Path, cell: Cell) -> Path:
    """Where a cell's runs and logs are."""
    return root / "cells" / cell.study / f"{cell.arm}-{cell.seed}"


def outcome(root: Path, cell: Cell) -> Outcome:
    """What the folder says."""
    folder = folder_of(root, cell)
    runs = sorted(folder.glob("train-*/ledger.sqlite"), key=lambda path: path.stat().st_mtime)
    if not runs:
        return Outcome(cell, "missing")
    run = runs[-1].parent
    failed = folder / "failed.txt"
    if (run / "summary.json").is_file():
        return Outcome(cell, "done", run)
    return Outcome(cell, "failed", run, failed.read_text()) if failed.is_file() else Outcome(cell, "stopped", run)


async def run_matrix(matrix: Matrix, root: Path, jobs: int) -> list[Outcome]:
    """Run what is missing, `jobs` cells at a time. A cell that fails is noted, and the others go on.

    Cancellation stops the cells under way, each with a checkpoint.
    """
    gate = asyncio.Semaphore(jobs)
    cells = matrix.cells()
    count = 0

    async def one(cell: Cell) -> Outcome:
        nonlocal count
        async with gate:
            result = await _one(root, cell)
        count += 1
        log.info("%d of %d: %s: %s %s", count, len(cells), cell.name, result.state, result.error)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(cell)) for cell in cells]
    return [task.result() for task in tasks]


async def _one(root: Path, cell: Cell) -> Outcome:
    folder = folder_of(root, cell)
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder / "lock") as mine:
        if not mine:
            return Outcome(cell, "held")
        known = outcome(root, cell)
        if known.state != "done":
            words = ["--resume", str(known.run)] if known.run is not None else [*cell.words, f"run_dir={folder}"]
            error = await _command(["train", *words], folder)
            failed = folder / "failed.txt"
            if error:
                failed.write_text(error)
            else:
                failed.unlink(missing_ok=True)
            known = outcome(root, cell)
            if error and known.run is None:
                return Outcome(cell, "failed", None, error)
        if known.state == "done" and known.run is not None:
            for suite in cell.suites:
                if error := await _evaluate(known.run, suite, folder):
                    return Outcome(cell, "failed", known.run, error)
        return known


async def _evaluate(run: Path, suite: str, folder: Path) -> str:
    """Judge a final policy on a suite, once; "" or what went wrong."""
    place = folder / "evals"
    made = sorted(place.glob(f"eval-{suite}-*/evaluation.json"))
    if any((path.parent / "result.json").is_file() for path in made):
        return ""
    words = ["--resume", str(made[-1].parent)] if made else [suite, "--model", str(run), f"run_dir={place}"]
    return await _command(["eval", *words], folder)


async def _command(words: Sequence[str], folder: Path) -> str:
    """Run `sao` to its end; "" or the end of its log. A cancelled one is interrupted as by Ctrl-C."""
    path = folder / "log.txt"
    process = await processes.start([*SAO_COMMAND, *words], path, {})
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            log.warning("%s did not stop within %.0f s", " ".join(words[:2]), STOP_GRACE_S)
        raise
    finally:
        await processes.end(process, 0.0)
    return "" if code == 0 else f"exit code {code}\n{processes.tail(path)}"


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether the lock is ours; it is no one's after a crash."""
    try:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="give a folder that can be written") from error
