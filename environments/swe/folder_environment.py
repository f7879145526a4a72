"""The task_folders environment: task folders in Harbor's format (`folders.py`), played and judged in one container.

THE JUDGE IS NOT HARDENED. In this format the state of the container is the result, so the tests run in the container that the
agent has left: as the same user, with whatever it did to programs, libraries and settings. Before they run, every process is
killed, and /tests and the verdict's folder are made anew; nothing else is undone. An agent that replaces `python` by a program
that always succeeds is believed. Every verdict says so in its flags (`shared_container`). Train on such tasks only under watch;
where a patch is the result, use `swe`, which judges in a container that no agent has touched.

Flows in: folders. Flows out: tasks, whose opening message is the instruction, and scores with the tail of the tests' output. A
reward is the tests' own number, of any size. Time, memory and processors are the run's and the sandbox's, not the task's; only
`verifier.timeout_sec` is the task's. The container sandbox has no network, also where a task may use it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from environments.datasets import split_of
from environments.swe.folder_images import build_command, image_name
from environments.swe.folders import REWARD_JSON, REWARD_TEXT, TESTS_DIR, FolderTask, load, reward
from environments.swe.patch import reset
from environments.swe.prepare import isolated
from environments.swe.tools import shell_tools
from harness.errors import ConfigError, SandboxError, VerifierFault
from harness.protocols import LiveTask, Sandbox, Tool
from harness.sandboxes.memory import MemorySandbox
from harness.sandboxes.process import ProcessSandbox
from harness.task import Score, Split, Task

log = logging.getLogger("sao")
LOG, LOG_CHARS, FLAGS = "verifier.log", 16_000, ("shared_container",)
STEP_S = 120.0
"""Seconds of one step that runs no tests."""
SLACK_S = 900.0
"""Seconds of a verdict beside those of the tests."""
REWARD_BYTES = 32_768
_MISSING = 44
_LOGS = os.path.dirname(REWARD_TEXT)
# Root without capabilities may not go through a folder that forbids it.
_OPEN = f"cd /; chmod -R u+rwX {TESTS_DIR} {os.path.dirname(_LOGS)} 2>/dev/null || true"
_CLEAN = f"set -eu; {_OPEN}; rm -rf -- {TESTS_DIR} {_LOGS}; mkdir -p {TESTS_DIR} {_LOGS}"

Outcome = Literal["judged", "no_reward", "timeout", "not_placed"]


class FoldersConfig(BaseModel):
    """Options of task_folders."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """A task folder, or a folder of task folders."""
    heldout: float = Field(0.05, ge=0, le=1)
    """Share that is held out, by a hash of the ids."""
    command_s: float = Field(180.0, gt=0)
    """Seconds of one command of the bash tool."""
    output_chars: int = Field(16_000, ge=1000)
    """Characters of a command's output that the model sees."""


class SweFolders:
    """See the module docstring."""

    Config = FoldersConfig

    def __init__(self, config: FoldersConfig) -> None:
        self.config = config
        self._folders: dict[str, FolderTask] = {}
        self._tasks: dict[Split, list[Task]] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """The folders of a split, in the order of their names."""
        if self._tasks is None:
            self._tasks = self._load()
        return self._tasks[split]

    def _load(self) -> dict[Split, list[Task]]:
        folders = load(self.config.path)
        if commands := [command for command in map(build_command, folders) if command]:
            log.info("%d images are to be built before the run, such as: %s", len(commands), commands[0])
        if online := [folder.id for folder in folders if folder.network]:
            log.warning("%d tasks may expect a network, which container sandboxes lack, such as %s", len(online), online[0])
        tasks: dict[Split, list[Task]] = {"train": [], "heldout": []}
        for folder in folders:
            tasks[split_of(folder.id, self.config.heldout)].append(self.task(folder))
        return tasks

    def task(self, folder: FolderTask) -> Task:
        """A folder as a task."""
        self._folders[folder.id] = folder
        message = {"role": "user", "content": folder.instruction}
        return Task(folder.id, (message,), {"folder": str(folder.folder)}, image_name(folder))

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Go to the task's working folder, with its variables."""
        if isinstance(sandbox, ProcessSandbox | MemorySandbox):
            raise ConfigError(f"{task.id}: a task folder needs a container of its own", hint='set sandbox.id = "docker"')
        folder = self._folders[task.id]
        there = f"cd -- {shlex.quote(folder.workdir)}" if folder.workdir else ":"
        result = await sandbox.exec(f"{_exports(folder.env).strip() or ':'} && {there} && pwd", timeout_s=STEP_S)
        if result.exit_code != 0:
            raise RuntimeError(f"{task.id}: its working folder or variables do not fit the image: {result.output[-500:]}")
        return FolderEpisode(self.config, folder, sandbox, result.output.strip("\n"))


class FolderEpisode:
    """One task folder at work."""

    def __init__(self, config: FoldersConfig, folder: FolderTask, sandbox: Sandbox, workdir: str) -> None:
        self._folder, self._sandbox, self._workdir = folder, sandbox, shlex.quote(workdir)
        self.score_s = folder.verifier_s + SLACK_S
        seen, before = config.output_chars, _exports(folder.env)
        self.tools: Sequence[Tool] = shell_tools(
            sandbox, command_s=config.command_s, output_chars=seen, work="the container", before=before
        )

    async def score(self) -> Score:
        """Kill what the agent left running, bring the tests in, run them here, read their number."""
        if not await reset(self._sandbox):
            return _score("not_placed", reason="what the agent left running cannot be ended")
        if problem := await self._place(self._sandbox):
            await self._control()
            return _score("not_placed", reason=problem)
        variables = _exports({**self._folder.env, **self._folder.verifier_env})
        command = f"(\n{variables}cd -- {self._workdir} && bash {TESTS_DIR}/test.sh\n)"
        start = time.monotonic()
        result = await self._sandbox.exec(command, timeout_s=self._folder.verifier_s)
        seconds = round(time.monotonic() - start, 3)
        facts: dict[str, Any] = {"exit_code": result.exit_code, "seconds": seconds, "killed_by": result.killed_by}
        if result.timed_out:
            return _score("timeout", 0.0, result.output, f"test.sh took more than {self._folder.verifier_s:g} s", **facts)
        try:
            value = reward(await self._take(REWARD_TEXT), await self._take(REWARD_JSON))
        except VerifierFault as error:
            await self._control()
            return _score("no_reward", 0.0, result.output, error.message, **facts)
        return _score("judged", value, result.output, **facts)

    async def _place(self, sandbox: Sandbox) -> str:
        """Stale verdicts out, the tests in; what went wrong, else nothing."""
        result = await sandbox.exec(isolated(_CLEAN), timeout_s=STEP_S)
        if result.exit_code == 0:
            try:
                for name, data in self._folder.tests.items():
                    await sandbox.write(f"{TESTS_DIR}/{name}", data)
            except OSError as error:
                return f"{type(error).__name__}: {error}"[-500:]
            # Scripts beside test.sh may be called by their names. Big files may belong to root, and are readable as they are.
            script = f"set -eu; mkdir -p -- {self._workdir}; chmod -R 755 {TESTS_DIR} 2>/dev/null || true"
            result = await sandbox.exec(isolated(f"{script}; test -s {TESTS_DIR}/test.sh"), timeout_s=STEP_S)
        return "" if result.exit_code == 0 else f"exit code {result.exit_code}: {result.output[-500:]}"

    async def _control(self) -> None:
        """Raise `VerifierFault` if test.sh could not start where no agent has been either; else it is the agent's doing."""
        other = await self._sandbox.fresh()
        try:
            problem = await self._place(other)
            if not problem:
                parsed = await other.exec(f"bash -n {TESTS_DIR}/test.sh", timeout_s=STEP_S)
                problem = "" if parsed.exit_code == 0 else parsed.output[-500:]
        finally:
            with contextlib.suppress(SandboxError):
                await other.close()
        if problem:
            raise VerifierFault(f"{self._folder.id}: test.sh cannot start in an untouched container either: {problem}")

    async def _take(self, path: str) -> bytes | None:
        """The head of a regular file. `read` takes files of any size, so a copy is read that is small."""
        copy = f"{_LOGS}/sao-{secrets.token_hex(8)}"
        script = f"test -f {path} || exit {_MISSING}; head -c {REWARD_BYTES} {path} >{copy}"
        result = await self._sandbox.exec(isolated(script), timeout_s=STEP_S)
        try:
            return None if result.exit_code == _MISSING else await self._sandbox.read(copy)
        except OSError:
            return b""


def _score(outcome: Outcome, value: float = 0.0, output: str = "", reason: str = "", **facts: Any) -> Score:
    info = {"outcome": outcome, "reason": reason, "flags": FLAGS, **facts}
    return Score(value, info=info, artifacts={LOG: output[-LOG_CHARS:].encode()})


def _exports(variables: dict[str, str]) -> str:
    """A line of shell, or none."""
    words = shlex.join(f"{name}={value}" for name, value in variables.items())
    return f"export {words}\n" if words else ""
