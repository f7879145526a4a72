"""The corridor environment: one room per turn, reward 1 at the end if every door was the right one.

A task is a walk of signs, a pure function of (split, seed, index). What is in a room is only told when the one before it has
been left, whichever door was opened. A reply that opens no door counts as a wrong one, and so do rooms that a limit cut off.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from environments.corridor.language import MEANING, SIGNS, STONES, follow, opened
from harness.engines.scripted import Script
from harness.protocols import LiveTask, Sandbox, Tool, ToolResult
from harness.task import LazyTasks, Score, Split, Task

HELD_OUT = 0.2
"""Share of the walks that only evaluation takes. Every sign is on both sides."""
STONES_PER_ROOM = 3


class CorridorConfig(BaseModel):
    """Options of corridor."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    """Of the walks; the signs always mean the same."""
    rooms: int = Field(3, ge=1, le=16)
    train_tasks: int = Field(256, ge=1)
    heldout_tasks: int = Field(1_024, ge=1)


class Corridor:
    """See the module docstring."""

    Config = CorridorConfig

    def __init__(self, config: CorridorConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """A lazy sequence."""
        return Walks(self.config, split)

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """There is nothing to prepare."""
        return Walk(task)

    def solver(self, task: Task) -> Script:
        """The right door in every room. Walks that begin alike are told apart by what is seen on the way."""
        return follow


class Walks(LazyTasks):
    """The tasks of a split."""

    def __init__(self, config: CorridorConfig, split: Split) -> None:
        super().__init__(config.train_tasks if split == "train" else config.heldout_tasks)
        self._config, self._split = config, split

    def make(self, index: int) -> Task:
        """Task number `index`."""
        name = f"corridor/{self._split}/{self._config.seed}/{index}"
        rng = random.Random(name)
        while True:
            signs = rng.choices(SIGNS, k=self._config.rooms)
            if held_out(signs) == (self._split == "heldout"):
                break
        rooms = [" ".join([*rng.choices(STONES, k=STONES_PER_ROOM), sign]) for sign in signs]
        return Task(id=name, messages=({"role": "user", "content": rooms[0]},), data={"signs": signs, "rooms": rooms})


class Walk:
    """One walk under way."""

    tools: Sequence[Tool] = ()

    def __init__(self, task: Task) -> None:
        self._task = task
        self._doors: list[str | None] = []

    async def on_reply(self, text: str) -> ToolResult:
        """Open a door; the next room, or the end."""
        self._doors.append(opened(text))
        rooms = self._task.data["rooms"]
        done = len(self._doors) == len(rooms)
        return ToolResult("" if done else rooms[len(self._doors)], done=done)

    async def score(self) -> Score:
        """1 if all doors were right."""
        signs = self._task.data["signs"]
        right = sum(door == MEANING[sign] for door, sign in zip(self._doors, signs, strict=False))
        return Score(float(right == len(signs)), info={"right": right})


def held_out(signs: Sequence[str]) -> bool:
    """Whether only evaluation takes this walk."""
    digest = hashlib.sha256(" ".join(signs).encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT * 2**32
