"""The toy_repair environment: four native tools over a real sandbox, judged by hidden tests that really run.

Blind play cannot win: argument names appear only in what the tools print, two edits are allowed, and `finish` wants a test run
after the last edit. A lucky guess among the shown names is right one time in four, with both edits one time in two.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from environments.toy_repair.expert import flawed_expert
from environments.toy_repair.tasks import CHECK, HIDDEN_CASES, VISIBLE_CASES, ToyTasks
from harness.engines.scripted import Script
from harness.errors import VerifierFault
from harness.protocols import LiveTask, Sandbox, Tool, ToolResult
from harness.task import Score, Split, Task

MAX_EDITS = 2
COMMAND_S = 20.0
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToyRepairConfig(BaseModel):
    """Options of toy_repair."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    """Tasks differ by seed; the training and held-out splits of one seed share no bug."""
    train_tasks: int = Field(100_000, ge=1)
    heldout_tasks: int = Field(10_000, ge=1)
    python: str = "python3"
    """Interpreter inside the sandbox."""


class ToyRepair:
    """See the module docstring."""

    Config = ToyRepairConfig

    def __init__(self, config: ToyRepairConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """A lazy sequence of generated tasks."""
        size = self.config.train_tasks if split == "train" else self.config.heldout_tasks
        return ToyTasks(split, self.config.seed, size)

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Write the repository."""
        for path, text in task.data["files"].items():
            await sandbox.write(path, text.encode())
        return ToyRepairTask(task, sandbox, self.config.python)

    def solver(self, task: Task) -> Script:
        """The demonstrator without its flaw."""
        return partial(flawed_expert, right=1.0, habit=0.0)


class ToyRepairTask:
    """One repository under repair."""

    def __init__(self, task: Task, sandbox: Sandbox, python: str) -> None:
        self._task, self._sandbox = task, sandbox
        self._python = f"{shlex.quote(python)} -I -S"
        self._runs = 0
        self._edits = 0
        self._checked = False
        want = {"type": "integer", "description": "the value that the failing test wants"}
        use = {"type": "string", "description": "the argument that f is to return"}
        edit = {
            "type": "object",
            "properties": {"want": want, "use": use},
            "required": ["want", "use"],
            "additionalProperties": False,
        }
        self.tools: Sequence[Tool] = (
            Tool("run_tests", "Run the visible tests.", NO_ARGUMENTS, self._run_tests),
            Tool("read_code", "Show lib.py.", NO_ARGUMENTS, self._read_code),
            Tool("edit", "Let f return another argument.", edit, self._edit),
            Tool("finish", "Hand in the repair.", NO_ARGUMENTS, self._finish),
        )

    async def _run_tests(self, _: dict[str, Any]) -> ToolResult:
        case = self._runs % VISIBLE_CASES
        self._runs += 1
        self._checked = True
        result = await self._sandbox.exec(
            f"{self._python} tests/check.py tests/cases.txt {case} {case + 1}", timeout_s=COMMAND_S
        )
        return ToolResult(result.output.strip())

    async def _read_code(self, _: dict[str, Any]) -> ToolResult:
        return ToolResult((await self._sandbox.read("lib.py")).decode(errors="replace"))

    async def _edit(self, arguments: dict[str, Any]) -> ToolResult:
        if self._edits >= MAX_EDITS:
            return ToolResult("error: no edit is left")
        use = arguments["use"]
        if not use.isidentifier():
            return ToolResult("error: `use` is not a name")
        self._edits += 1
        self._checked = False
        head = (await self._sandbox.read("lib.py")).decode(errors="replace").split("\n", 1)[0]
        code = f"{head}\n    return {use}  # the test wants {arguments['want']}\n"
        await self._sandbox.write("lib.py", code.encode())
        return ToolResult("edited")

    async def _finish(self, _: dict[str, Any]) -> ToolResult:
        if not self._checked:
            return ToolResult("error: run the tests first")
        return ToolResult("done", done=True)

    async def score(self) -> Score:
        """1 if all hidden cases pass in the sandbox as the agent left it, else 0. The runner and the cases are written anew."""
        await self._sandbox.write("tests/check.py", CHECK.encode())
        await self._sandbox.write("tests/hidden.txt", self._task.data["hidden"].encode())
        result = await self._sandbox.exec(
            f"{self._python} tests/check.py tests/hidden.txt 0 {HIDDEN_CASES}", timeout_s=COMMAND_S
        )
        try:
            verdict = json.loads(result.output.strip().splitlines()[-1])
            ok = bool(verdict["ok"])
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise VerifierFault(f"{self._task.id}: the hidden tests printed {result.output[:200]!r}") from error
        return Score(float(ok), info={"edits": self._edits, "test_runs": self._runs})
