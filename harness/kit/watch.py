"""An environment and its sandboxes, watched: every call passes on, is noted, and can be made to meet a lost or dead sandbox.

Flows in: the real environment and provider, and the trouble to make, if any. Flows out: `Notes`. Every call gives other
episodes a turn, so that episodes played at once really interleave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harness.errors import SandboxError
from harness.protocols import ByteStream, ExecResult, Sandbox, SandboxProvider, ToolResult
from harness.task import Score, Task

Phase = Literal["begin", "agent", "tool", "score", "close"]


@dataclass
class Trouble:
    """What happens to every operation on the sandbox in one phase: it fails for good, or hangs until `released`."""

    phase: Phase
    kind: Literal["lost", "hangs"]
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Notes:
    """What one episode did."""

    trouble: Trouble | None = None
    phase: Phase = "agent"
    operations: Counter[str] = field(default_factory=Counter)
    """Operations on the sandbox by phase."""
    written: dict[str, bytes] = field(default_factory=dict)
    """Files that `begin` wrote through the sandbox."""
    open: list[WatchedSandbox] = field(default_factory=list)
    """Sandboxes that nobody has closed yet."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    last_call: str = ""
    replies: list[tuple[str, str]] = field(default_factory=list)
    """(tool, content) of what was answered."""
    score: Any = None
    score_s: float = 0.0
    """The task's own limit of its verdict, where it has one, seconds."""
    _lost: bool = False

    async def operation(self) -> None:
        """Called before every operation on a sandbox."""
        self.operations[self.phase] += 1
        await asyncio.sleep(0)
        if self._lost or (self.trouble is not None and self.trouble.phase == self.phase):
            if self.trouble is not None and self.trouble.kind == "hangs":
                await self.trouble.released.wait()
            else:
                self._lost = True
            raise SandboxError(f"the check has taken the sandbox away in `{self.phase}`")


class WatchedSandbox:
    """See the module docstring."""

    def __init__(self, inner: Sandbox, notes: Notes) -> None:
        self._inner, self._notes = inner, notes
        notes.open.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox`."""
        await self._notes.operation()
        return await self._inner.exec(command, timeout_s=timeout_s)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        await self._notes.operation()
        return await self._inner.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        await self._notes.operation()
        if self._notes.phase == "begin":
            self._notes.written[path] = data
        await self._inner.write(path, data)

    async def spawn(self, command: Sequence[str], *, tty: bool = False) -> ByteStream:
        """See `Sandbox`."""
        await self._notes.operation()
        return await self._inner.spawn(command, tty=tty)

    async def fresh(self) -> Sandbox:
        """See `Sandbox`."""
        await self._notes.operation()
        return WatchedSandbox(await self._inner.fresh(), self._notes)

    async def close(self) -> None:
        """See `Sandbox`."""
        if self in self._notes.open:
            self._notes.open.remove(self)
        await self._inner.close()


class WatchedProvider:
    """Acquires watched sandboxes for one episode."""

    def __init__(self, inner: SandboxProvider, notes: Notes) -> None:
        self._inner, self._notes = inner, notes

    async def acquire(self, task: Task) -> WatchedSandbox:
        """See `SandboxProvider`."""
        return WatchedSandbox(await self._inner.acquire(task), self._notes)


class WatchedEnvironment:
    """Begins watched tasks."""

    def __init__(self, inner: Any, notes: Notes, score_s: float | None = None) -> None:
        self._inner, self._notes, self._score_s = inner, notes, score_s

    async def begin(self, task: Task, sandbox: Sandbox) -> WatchedTask:
        """See `Environment`."""
        self._notes.phase = "begin"
        await asyncio.sleep(0)
        live = await self._inner.begin(task, sandbox)
        self._notes.phase = "agent"
        return WatchedTask(live, self._notes, self._score_s)


class WatchedTask:
    """A live task; `score_s` overrides its own limit."""

    def __init__(self, live: Any, notes: Notes, score_s: float | None) -> None:
        self._live, self._notes = live, notes
        limit = getattr(live, "score_s", None) if score_s is None else score_s
        if limit is not None:
            self.score_s = notes.score_s = limit
        self.tools = tuple(replace(tool, call=self._watched(tool.name, tool.call)) for tool in live.tools)
        notes.tools = [tool.schema() for tool in self.tools]
        if hasattr(live, "on_reply"):
            self.on_reply = self._watched("on_reply", live.on_reply)

    def _watched(self, name: str, call: Callable[[Any], Awaitable[ToolResult]]) -> Any:
        async def watched_call(arguments: Any) -> ToolResult:
            text = repr(arguments)
            self._notes.last_call = f"{name}({text if len(text) < 80 else text[:77] + '...'})"
            self._notes.phase = "tool"
            await asyncio.sleep(0)
            result = await call(arguments)
            self._notes.replies.append((name, str(getattr(result, "content", result))))
            self._notes.phase = "agent"
            await asyncio.sleep(0)
            return result

        return watched_call

    async def score(self) -> Score:
        """See `LiveTask`."""
        self._notes.phase = "score"
        await asyncio.sleep(0)
        self._notes.score = await self._live.score()
        score: Score = self._notes.score
        return score

    async def close(self) -> None:
        """See `LiveTask`."""
        self._notes.phase = "close"
        if hasattr(self._live, "close"):
            await self._live.close()
