"""A shell task in a container: find the largest file of a folder. Judged by the file that the agent has left.

The image is the task's; what the agent may have broken (its shell, its PATH) does not judge: the answer is read as a file, and
compared outside the sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from harness.engines.scripted import Script, call, in_turn
from harness.protocols import LiveTask, Sandbox, Tool, ToolResult
from harness.task import Score, Split, Task
from harness.tools import tool

STEMS = {"train": ("apple", "birch", "cedar", "daisy", "elder", "fern"), "heldout": ("grape", "hazel", "iris", "jasmine")}
TASKS, FILES = 1000, 4
"""Tasks of each split, files of a task."""
ANSWER_FILE = "largest.txt"


class ShellConfig(BaseModel):
    """Options."""

    model_config = ConfigDict(extra="forbid")
    seed: int = 0
    image: str | None = None
    """Container image of every task; None: the sandbox's own."""
    command_s: float = Field(30.0, gt=0)
    """Seconds of one command."""
    output_chars: int = Field(4_000, ge=100)
    """Of a command's output that the model sees."""


class Shell:
    """See the module docstring."""

    Config = ShellConfig

    def __init__(self, config: ShellConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """Names of files are of one split each."""
        config = self.config
        return [make_task(split, config.seed, index, config.image) for index in range(TASKS)]

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Write the files."""
        for name, size in task.data["files"].items():
            await sandbox.write(f"files/{name}", b"x" * size)
        return ShellTask(task, sandbox, self.config)

    def solver(self, task: Task) -> Script:
        """One pipeline."""
        return in_turn(call("bash", command=f"ls -S files | head -n 1 > {ANSWER_FILE}"), call("finish"))


class ShellTask:
    """One sandbox with files in it."""

    def __init__(self, task: Task, sandbox: Sandbox, config: ShellConfig) -> None:
        self._task, self._sandbox, self._config = task, sandbox, config
        self.tools: Sequence[Tool] = (tool(self.bash), tool(self.finish))

    async def bash(self, command: str) -> str:
        """Run a command in the shell.

        Args:
            command: for example `ls -l files`
        """
        if "\0" in command:
            return "error: a command has no NUL"
        text = command.encode(errors="replace").decode()
        result = await self._sandbox.exec(text, timeout_s=self._config.command_s)
        end = f"\n[stopped after {self._config.command_s:g} s]" if result.timed_out else f"\n[exit code {result.exit_code}]"
        return result.output[: self._config.output_chars] + end

    async def finish(self) -> ToolResult:
        """Say that the work is done."""
        return ToolResult("finished", done=True)

    async def score(self) -> Score:
        """1 if the file names the largest."""
        try:
            given = await self._sandbox.read(ANSWER_FILE)
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: a link that leads out of the sandbox
            return Score(0.0)
        largest = max(self._task.data["files"], key=lambda name: int(self._task.data["files"][name]))
        return Score(float(given.decode(errors="replace").strip() == largest))


def make_task(split: Split, seed: int, index: int, image: str | None) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"shell/{split}/{seed}/{index}")
    files = dict(zip(rng.sample(STEMS[split], FILES), rng.sample(range(1, 5000), FILES), strict=True))
    ask = f"Write the name of the largest file in the folder files into {ANSWER_FILE}, then finish."
    return Task(f"shell/{split}/{seed}/{index}", ({"role": "user", "content": ask},), {"files": files}, image)
