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
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evals.experiment.matrix import Cell, Matrix
from evals.result import NAME as RESULT
from evals.result import load
from harness import processes
from harness.configfile import dump_config, load_config
from harness.errors import ConfigError

log = logging.getLogger("sao")

SAO_COMMAND = (sys.executable, "-c", "from harness.cli import main; main()")
STOP_GRACE_S = 20.0
"""A stopped run has this long to write what it has."""
FAILED = "failed.txt"
"""Why a cell has failed, in its folder."""
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
    run = _newest(folder)
    failed = folder / FAILED
    if failed.is_file():
        return Outcome(cell, "failed", run, failed.read_text())
    if run is None:
        return Outcome(cell, "missing")
    if error := _unlike(cell, run):
        return Outcome(cell, "failed", None, error)
    judged = (run / "summary.json").is_file() and all(_complete(_evaluation(folder, suite)) for suite in cell.suites)
    return Outcome(cell, "done" if judged else "stopped", run)


def _unlike(cell: Cell, run: Path) -> str:
    """Why the run is none of the cell's as the matrix has it now; "" if it is."""
    asked = tomllib.loads(dump_config(load_config(list(cell.words))))
    try:
        found = tomllib.loads((run / "config.toml").read_text())
    except (OSError, ValueError) as error:
        return f"error: {run / 'config.toml'} cannot be read: {error}; remove {run.parent} and run it again"
    for name, (old, new) in _different(found, asked).items():
        if name != "run_dir":
            return (
                f"error: `{name}` was {old} when {run.parent} was begun and is {new} in the matrix; "
                "remove that folder, or give another --out"
            )
    return ""


def _different(a: dict[str, Any], b: dict[str, Any], above: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(a.keys() | b.keys()):
        one, other, name = a.get(key), b.get(key), f"{above}{key}"
        if isinstance(one, dict) and isinstance(other, dict):
            found |= _different(one, other, f"{name}.")
        elif one != other:
            found[name] = (one, other)
    return found


def _newest(folder: Path) -> Path | None:
    runs = sorted(folder.glob("train-*/ledger.sqlite"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else None


def suite_name(word: str) -> str:
    """As `sao eval` names it: a suite of the package, or the file."""
    return Path(word).stem


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
    make_folder(folder)
    with _held(folder / "lock") as mine:
        if not mine:
            return Outcome(cell, "held", outcome(root, cell).run)
        if (run := _newest(folder)) is not None:
            with _held(run / "lock") as ended:
                if not ended:  # `sao train` outlives a killed experiment
                    return Outcome(cell, "held", run)
        (folder / FAILED).unlink(missing_ok=True)
        known = outcome(root, cell)
        if known.state == "failed":
            return known
        error = "" if known.state == "done" else await _train_and_judge(cell, folder)
        if error:
            (folder / FAILED).write_text(error)
        return outcome(root, cell)


async def _train_and_judge(cell: Cell, folder: Path) -> str:
    """What is left of a cell; "" or what went wrong."""
    run = _newest(folder)
    if run is None or not (run / "summary.json").is_file():
        words = ["--resume", str(run)] if run is not None else [*cell.words, f"run_dir={folder}"]
        if error := await _command(["train", *words], folder):
            return error
    trained = _newest(folder)
    for suite in cell.suites:
        made = _evaluation(folder, suite)
        if not _complete(made):
            words = [suite, "--model", str(trained), f"run_dir={folder / 'evals'}"] if made is None else ["--resume", str(made)]
            if error := await _command(["eval", *words], folder):
                return error
    return ""


def _evaluation(folder: Path, suite: str) -> Path | None:
    """The folder in which a cell's final policy is judged on a suite."""
    made = sorted((folder / "evals").glob(f"eval-{suite_name(suite)}-[0-9]*-[0-9]*-[0-9]*/ledger.sqlite"))
    return made[-1].parent if made else None


def _complete(evaluation: Path | None) -> bool:
    """Whether it has ended without a sample missing."""
    if evaluation is None or not (evaluation / RESULT).is_file():
        return False
    try:
        result = load(evaluation)
    except ConfigError as error:
        log.warning("%s", error.message)  # `sao eval --resume` writes it anew
        return False
    return len(result.judged) == len(result.problems) * result.runs


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


def make_folder(folder: Path) -> None:
    """With its parents. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"`--out`: cannot make {folder}: {error.strerror}", hint="give a folder that can be written"
        ) from error


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
