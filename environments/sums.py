"""The sums environment: integer arithmetic in one turn, for real but small language models. No tools, no commands.

Flows out: tasks, each a pure function of (split, seed, index), and verdicts: 1 if the last number of the reply is the right
one, else 0, also for a reply that a limit cut off. A hash of the problem decides its split, for `a + b` together with `b + a`:
nothing that evaluation asks is ever trained. The conversation opens with a solved example, which is never asked.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from harness.engines.scripted import Script, in_turn
from harness.protocols import ANSWER, LiveTask, Sandbox, Tool
from harness.task import Score, Split, Task

HELD_OUT = 0.2
"""Share of the problems that only evaluation asks."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SIGNS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LEVELS: tuple[tuple[str, int, int], ...] = (("+", 10, 10), ("+", 100, 10), ("+", 100, 100), ("-", 100, 100), ("*", 10, 10))
"""Sign and bounds of the two numbers at levels 1 to 5; a difference is never negative."""
EXAMPLE = (2, "+", 3)
"""Solved in the opening."""
OPENING = (
    {"role": "system", "content": "Calculate."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 + 3 = 5"},
)


class SumsConfig(BaseModel):
    """Options of sums."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    """Tasks differ by seed; the problems of the two splits do not."""
    levels: list[Annotated[int, Field(ge=1, le=len(LEVELS))]] = Field([1], min_length=1)
    """1: 7 + 8, 2: 57 + 8, 3: 57 + 38, 4: 57 - 38, 5: 7 * 8; each as often as it is named."""
    train_tasks: int = Field(4_096, ge=1)
    heldout_tasks: int = Field(1_024, ge=1)


class Sums:
    """See the module docstring."""

    Config = SumsConfig

    def __init__(self, config: SumsConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split; small levels have fewer problems than tasks, so problems come again."""
        size = self.config.train_tasks if split == "train" else self.config.heldout_tasks
        return [make_task(split, self.config.seed, index, self.config.levels) for index in range(size)]

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """There is nothing to prepare."""
        return SumsTask(task, sandbox)

    def solver(self, task: Task) -> Script:
        """The answer."""
        return in_turn(str(task.data["answer"]))


class SumsTask:
    """One problem."""

    tools: Sequence[Tool] = ()

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self._task, self._sandbox = task, sandbox

    async def score(self) -> Score:
        """1 if the answer's last number is the right one."""
        try:
            answer = (await self._sandbox.read(ANSWER)).decode(errors="replace")
        except FileNotFoundError:  # the reply was cut off
            return Score(0.0)
        numbers = NUMBER.findall(answer)
        return Score(float(numbers[-1:] == [str(self._task.data["answer"])]))


def make_task(split: Split, seed: int, index: int, levels: Sequence[int]) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"sums/{split}/{seed}/{index}")
    level = rng.choice(levels)
    sign, first, second = LEVELS[level - 1]
    while True:
        a, b = rng.randrange(first), rng.randrange(second)
        if sign == "-" and a < b:
            a, b = b, a
        if held_out(a, sign, b) == (split == "heldout") and alike(a, sign, b) != alike(*EXAMPLE):
            break
    return Task(
        id=f"sums/{split}/{seed}/{index}",
        messages=(*OPENING, {"role": "user", "content": f"What is {a} {sign} {b}?"}),
        data={"level": level, "problem": [a, sign, b], "answer": SIGNS[sign](a, b)},
    )


def alike(a: int, sign: str, b: int) -> str:
    """One name for a problem and its mirror image."""
    return f"{max(a, b)} {sign} {min(a, b)}"


def held_out(a: int, sign: str, b: int) -> bool:
    """Whether only evaluation asks this problem."""
    digest = hashlib.sha256(alike(a, sign, b).encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT * 2**32
