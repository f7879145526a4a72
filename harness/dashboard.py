"""The live table of a training run: rich on a terminal, one plain line per step elsewhere. `metrics.jsonl` has everything."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

ROWS = 12
COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("success", "rollout/success", "{:.2f}"),
    ("staleness", "staleness/mean", "{:.2f}"),
    ("masked", "dis/mask_frac", "{:.4f}"),
    ("EV", "value/ev", "{:.2f}"),
    ("tokens/s", "rollout/tokens_per_s", "{:.0f}"),
    ("in flight", "async/in_flight", "{:.0f}"),
)


class Dashboard:
    """Shows rows as they come; time left is extrapolated from the mean step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: list[dict[str, Any]] = []
        self._start = time.monotonic()
        self._first = 0
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Dashboard:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: dict[str, Any]) -> None:
        """Add a step."""
        if not self._rows:
            self._first = row["step"] - 1
        self._rows = [*self._rows, row][-ROWS:]
        done = row["step"] - self._first
        left = (time.monotonic() - self._start) / done * (self._steps - row["step"])
        cells = [format_cell(row.get(key), form) for _, key, form in COLUMNS] + [f"{left:.0f} s"]
        names = [name for name, *_ in COLUMNS] + ["left"]
        if self._live is None:
            print("  ".join(f"{n} {c}" for n, c in zip(names, cells, strict=True)), file=sys.stderr, flush=True)
            return
        table = Table(*names, title=f"SAO step {row['step']} of {self._steps}")
        for old in self._rows[:-1]:
            table.add_row(*[format_cell(old.get(key), form) for _, key, form in COLUMNS], "")
        table.add_row(*cells)
        self._live.update(table, refresh=True)


def format_cell(value: float | None, form: str) -> str:
    """A number, or a dash where it is missing."""
    return "-" if value is None else form.format(value)
