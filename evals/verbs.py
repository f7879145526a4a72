"""`sao experiment` behind the command line: from its arguments to an exit code.

Flows in: parsed arguments. Flows out: what is printed, and 0, or 1 if something could not be finished.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from evals.experiment.matrix import load_matrix
from evals.experiment.report import write_report
from evals.experiment.runner import outcome, run_matrix

Runner = Callable[[Awaitable[Any]], Any]
"""Runs a coroutine to its end, with the command line's handling of signals."""


def experiment(path: Path, out: Path | None, jobs: int, *, report_only: bool, run: Runner = asyncio.run) -> int:  # type: ignore[assignment]
    """Run what is missing of a matrix, then write its report; `out` defaults to `runs/<name of the file>`."""
    matrix = load_matrix(path)
    root = (out or Path("runs") / path.stem).resolve()
    if not report_only:
        root.mkdir(parents=True, exist_ok=True)
        run(run_matrix(matrix, root, jobs))
    outcomes = [outcome(root, cell) for cell in matrix.cells()]
    sys.stdout.write(f"{write_report(matrix, outcomes, root)}\n")
    return 0 if all(o.state == "done" for o in outcomes) else 1
