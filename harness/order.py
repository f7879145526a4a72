"""In which order tasks are drawn: each source by its weight, and within a source in epochs without replacement.

Flows in: a task sequence, a seed, how many were drawn before. Flows out: indices into the sequence; the n-th one is a pure
function of (sequence, seed, n), so that a resumed run goes on where it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from harness.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One source of a task sequence that mixes several, one after another: its length, and how often it is drawn from."""

    name: str
    size: int
    weight: float


def shares_of(tasks: Sequence[Any]) -> Sequence[Share]:
    """The sources of a sequence: its attribute `shares`, or it is the only one. Raises `ConfigError` if one is empty."""
    shares: Sequence[Share] = getattr(tasks, "shares", None) or [Share("", len(tasks), 1.0)]
    for share in shares:
        if share.size < 1:
            where = f" {share.name!r}" if share.name else ""
            raise ConfigError(f"the environment{where} has no task", hint="look at the [environment] table")
    return shares


def turns(shares: Sequence[Share]) -> Iterator[int]:
    """Whose turn it is: always the one that is furthest behind its weight, so any stretch is mixed as it should be."""
    whole = sum(share.weight for share in shares)
    rights = [share.weight / whole for share in shares]
    had = [0] * len(shares)
    n = 0
    while True:
        n += 1
        turn = max(range(len(shares)), key=lambda i: rights[i] * n - had[i])
        had[turn] += 1
        yield turn


class TaskOrder:
    """Draws without end. A stream (its attribute `ordered` is true) is drawn in its order, unless `shuffled` is asked for."""

    def __init__(self, tasks: Sequence[Any], seed: int, drawn: int = 0, *, shuffled: bool = False) -> None:
        self._shares = shares_of(tasks)
        self._starts = [0, *accumulate(share.size for share in self._shares)]
        self._turns = turns(self._shares)
        self._had = [0] * len(self._shares)
        self._epochs: list[tuple[int, list[int]]] = [(-1, [])] * len(self._shares)
        self._seed = seed
        self._shuffled = shuffled or not getattr(tasks, "ordered", False)
        for turn in islice(self._turns, drawn):
            self._had[turn] += 1
        self.drawn = drawn

    def __next__(self) -> int:
        turn = next(self._turns)
        size = self._shares[turn].size
        epoch, offset = divmod(self._had[turn], size)
        if epoch != self._epochs[turn][0]:
            order = list(range(size))
            if self._shuffled:
                random.Random(f"{self._seed}/{epoch}/{turn}" if turn else f"{self._seed}/{epoch}").shuffle(order)
            self._epochs[turn] = epoch, order
        self._had[turn] += 1
        self.drawn += 1
        return self._starts[turn] + self._epochs[turn][1][offset]


def first(tasks: Sequence[Any], count: int) -> list[int]:
    """The first tasks of each source, mixed by weight while they last: what an evaluation asks. At most `count` indices."""
    shares = shares_of(tasks)
    starts = [0, *accumulate(share.size for share in shares)]
    left = [iter(range(start, start + share.size)) for start, share in zip(starts, shares, strict=False)]
    chosen: list[int] = []
    for turn in turns(shares):
        if len(chosen) == min(count, starts[-1]):
            break
        chosen.extend(islice(left[turn], 1))
    return chosen
