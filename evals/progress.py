"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere, with the time that is left.

Flows in: episodes as they end. Flows out: lines on standard error.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from harness.episode import Episode

log = logging.getLogger("sao")
EVERY_S = 10.0


class Progress:
    """`with Progress(name, total, done) as progress`, then `progress.heed(episode)` for each."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self._name, self._total, self._first = name, total, done
        self._done, self._wins, self._judged, self._missing = done, 0, 0, 0
        self._tokens = 0
        self._start = self._said = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total, completed=self._done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._done > self._first:
            log.info("%s", self.line())

    def heed(self, episode: Episode) -> None:
        """One more has ended."""
        self._done += 1
        self._tokens += episode.used.tokens
        if episode.reward is None:
            self._missing += 1
        else:
            self._judged += 1
            self._wins += episode.reward > 0.5
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self.line())
        elif time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            log.info("%s", self.line())

    def line(self) -> str:
        """What is known so far, of this process only where it was resumed, and the seconds that are left."""
        played = self._done - self._first
        spent = time.monotonic() - self._start
        left = spent / played * (self._total - self._done) if played else 0.0
        success = f"{self._wins / self._judged:.3f}" if self._judged else "-"
        lost = f", {self._missing} missing" if self._missing else ""
        so_far = f"{self._name}: {self._done} of {self._total}, success {success}{lost}"
        return f"{so_far}, {self._tokens:,} tokens, {left:.0f} s left"
