"""The python_tir environment: problems with a boxed answer and a persistent Python.

Flows out: tasks of a data set or of the generator, and verdicts: 1 if the last boxed answer of the agent's last reply is right,
else 0. The right answer stays here: neither it nor the grader is in the sandbox, and nothing in the sandbox is judged. An
episode that a limit ends before a reply with an answer has none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from environments.datasets import split_of
from environments.python_tir.grading import Grader, last_boxed
from environments.python_tir.prompt import SYSTEM
from environments.python_tir.repl import Repl
from environments.python_tir.rows import MathRow, load
from environments.python_tir.synthetic import LEVELS, SyntheticTasks
from harness.engines.scripted import Script, in_turn
from harness.protocols import LiveTask, Sandbox, Tool, ToolResult
from harness.task import Score, Split, Task

log = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
NO_ANSWER = "error: put the final answer in \\boxed{}"
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python; the value of a last expression is shown"}},
    "required": ["code"],
    "additionalProperties": False,
}


class PythonTirConfig(BaseModel):
    """Options of python_tir."""

    model_config = ConfigDict(extra="forbid")

    dataset: str = SYNTHETIC
    """A hub name, a file (.jsonl, .json, .csv, .parquet), or "synthetic"."""
    split: str = "train"
    """Of a hub data set."""
    revision: str | None = None
    """Of a hub data set."""
    heldout: float | str = 0.05
    """What only evaluation asks: a share of the data set's rows, by hash of their id, or another data set."""
    invalid: Literal["error", "skip"] = "error"
    """What a row without problem or answer is."""
    seed: int = 0
    """Synthetic problems differ by seed; the two splits of one seed share none."""
    levels: list[Annotated[int, Field(ge=1, le=len(LEVELS))]] = Field([1], min_length=1)
    """Of synthetic problems; each as often as it is named."""
    train_tasks: int = Field(100_000, ge=1)
    """Synthetic."""
    heldout_tasks: int = Field(1_000, ge=1)
    """Synthetic."""
    cell_s: float = Field(10.0, gt=0.0)
    """Seconds for one call of the tool."""
    python: str = "python3"
    """Interpreter inside the sandbox."""


class PythonTir:
    """See the module docstring."""

    Config = PythonTirConfig

    def __init__(self, config: PythonTirConfig) -> None:
        self.config = config
        self._grader = Grader()
        self._tasks: dict[Split, list[Task]] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split."""
        config = self.config
        if config.dataset == SYNTHETIC:
            size = config.train_tasks if split == "train" else config.heldout_tasks
            return SyntheticTasks(split, config.seed, config.levels, size)
        if self._tasks is None:
            self._tasks = self._load()
        return self._tasks[split]

    def _load(self) -> dict[Split, list[Task]]:
        rows, heldout = self._rows(self.config.dataset), self.config.heldout
        if isinstance(heldout, str):
            other = self._rows(heldout)
            known = {row.problem for row in other}
            return {"train": [task_of(row) for row in rows if row.problem not in known], "heldout": [*map(task_of, other)]}
        tasks: dict[Split, list[Task]] = {"train": [], "heldout": []}
        for row in rows:
            tasks[split_of(row.id, heldout)].append(task_of(row))
        return tasks

    def _rows(self, source: str) -> list[MathRow]:
        config = self.config
        rows, refused = load(source, split=config.split, revision=config.revision, invalid=config.invalid)
        if refused:
            log.warning("%s: %d rows are left out, for example: %s", source, len(refused), refused[0])
        return rows

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Start Python."""
        repl = Repl(sandbox, python=self.config.python, cell_s=self.config.cell_s)
        await repl.start()
        return PythonTirTask(task, repl, self._grader)

    def solver(self, task: Task) -> Script:
        """The answer."""
        return in_turn(f"\\boxed{{{task.data['answer']}}}")


class PythonTirTask:
    """One problem."""

    def __init__(self, task: Task, repl: Repl, grader: Grader) -> None:
        self._task, self._repl, self._grader = task, repl, grader
        self._cells = 0
        self._answer: str | None = None
        self.tools: Sequence[Tool] = (Tool("python", "Run Python code.", CODE, self._python),)

    async def _python(self, arguments: dict[str, Any]) -> ToolResult:
        self._cells += 1
        return ToolResult(await self._repl.run(arguments["code"]))

    async def on_reply(self, text: str) -> ToolResult:
        """Take a reply that calls no tool: it ends the episode if it has an answer."""
        self._answer = last_boxed(text)
        return ToolResult(NO_ANSWER) if self._answer is None else ToolResult("", done=True)

    async def score(self) -> Score:
        """1 if the answer is right."""
        info: dict[str, Any] = {"cells": self._cells, "restarts": self._repl.restarts}
        if self._answer is None:
            return Score(0.0, info={**info, "graded_by": "no answer"})
        verdict = await self._grader.grade(self._task.data["answer"], self._answer)
        return Score(float(verdict.correct), info={**info, "graded_by": verdict.by})

    async def close(self) -> None:
        """End Python."""
        await self._repl.close()


def task_of(row: MathRow) -> Task:
    """A row as a task."""
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": row.problem})
    return Task(row.id, messages, {"answer": row.answer, "source": row.source, "level": row.level})
