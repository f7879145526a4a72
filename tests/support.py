"""Fakes and builders that several test files share: engines that play a list, plug-ins of functions, virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.chat import Chat
from harness.episode import Episode, Stage
from harness.parsers import hermes
from harness.protocols import (
    GenerateRequest,
    Generation,
    InferenceEngine,
    SamplingContract,
    Sandbox,
    SandboxProvider,
    Tool,
    ToolResult,
)
from harness.sandboxes.memory import MemoryConfig, MemorySandbox, MemorySandboxes
from harness.session import TokenSession
from harness.task import Limits, Score, Split, Task, Termination
from harness.trajectory import Trajectory, TrajectoryBuilder

USER = {"role": "user", "content": "hi"}


# --- virtual time ----------------------------------------------------------------------------------------------------


class _Jump(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Never waits: moves the loop's clock to the next timer instead. Nothing left to wait for is a deadlock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only by timers, and whose threads run inline: any length of day in no time."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jump()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def run_virtual[T](main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a `VirtualLoop`."""
    return asyncio.run(main, loop_factory=VirtualLoop)


# --- engines and sessions --------------------------------------------------------------------------------------------


@dataclass
class Raw:
    """A turn in token ids, with what the engine would say about them."""

    ids: list[int]
    finish: str = "stop"
    logprobs: list[float] | None = None
    versions: list[int] | None = None


class PlayedEngine:
    """Answers each call with the next of `turns` (text, `Raw`, an exception to raise); keeps every request."""

    def __init__(self, chat: Chat, turns: Sequence[str | Raw | BaseException]) -> None:
        self.chat, self.turns = chat, list(turns)
        self.requests: list[GenerateRequest] = []
        self.generations: list[Generation] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        if isinstance(turn, str):
            turn = Raw([*self.chat.encode(turn), self.chat.stop_ids[0]])
        n = len(turn.ids)
        generation = Generation(turn.ids, turn.logprobs or [-0.5] * n, turn.versions or [3] * n, turn.finish)  # type: ignore[arg-type]
        self.requests.append(request)
        self.generations.append(generation)
        return generation

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def update_weights(self, path: Any, version: int) -> None:
        pass

    async def close(self) -> None:
        pass


def session_of(
    chat: Chat,
    engine: InferenceEngine,
    episode_id: str = "e",
    seed: int | None = None,
    *,
    sampling: SamplingContract | None = None,
    folder: Path | None = None,
    **limits: Any,
) -> TokenSession:
    """A session with generous limits."""
    bound = Limits(**{"max_turns": 50, "max_context": 100_000, **limits})
    return TokenSession(chat, engine, hermes, bound, episode_id, sampling, seed, folder)


def tool_call(name: str, arguments: str) -> str:
    """One call in the Hermes form."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# --- plug-ins made of functions --------------------------------------------------------------------------------------


class NoConfig(BaseModel):
    """No options."""


@dataclass
class FnAgent:
    """An agent that is a coroutine function (task, live, sandbox, session, limits)."""

    act: Callable[..., Awaitable[Termination]]
    Config = NoConfig

    async def run(self, task: Task, live: Any, sandbox: Sandbox, session: Any, limits: Limits) -> Termination:
        return await self.act(task, live, sandbox, session, limits)


async def one_turn(task: Task, live: Any, sandbox: Sandbox, session: Any, limits: Limits) -> Termination:
    """Ask the model once and be done."""
    await session.complete(list(task.messages))
    return Termination.FINISHED


@dataclass
class FnEnvironment:
    """An environment of `size` empty tasks whose hooks are functions; each may raise."""

    size: int = 10
    begin_hook: Callable[[Task, Sandbox], None] = lambda task, sandbox: None
    tool_hook: Callable[[dict[str, Any]], ToolResult] = lambda arguments: ToolResult("ok")
    score_hook: Callable[[], Any] = lambda: Score(1.0)
    Config = NoConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}/{i}", (USER,)) for i in range(self.size)]

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        self.begin_hook(task, sandbox)
        return _Live(self)


class _Live:
    def __init__(self, environment: FnEnvironment) -> None:
        self._environment = environment
        schema = {"type": "object", "properties": {}}
        self.tools = (Tool("act", "Act.", schema, self._call),)

    async def _call(self, arguments: dict[str, Any]) -> ToolResult:
        return self._environment.tool_hook(arguments)

    async def score(self) -> Any:
        return self._environment.score_hook()


class WatchedSandbox(MemorySandbox):
    """Counts how often it was closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1
        await super().close()


@dataclass
class WatchedSandboxes:
    """Memory sandboxes that are remembered."""

    made: list[WatchedSandbox] = field(default_factory=list)
    Config = MemoryConfig

    async def start(self) -> None:
        pass

    async def acquire(self, task: Task) -> WatchedSandbox:
        self.made.append(WatchedSandbox())
        return self.made[-1]

    async def close(self) -> None:
        pass

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        return 0


def memory() -> MemorySandboxes:
    """A provider of memory sandboxes."""
    return MemorySandboxes(MemoryConfig(), "test")


def stage_of(
    chat: Chat,
    engine: InferenceEngine,
    *,
    agent: Any = None,
    environment: Any = None,
    sandboxes: SandboxProvider | None = None,
    **limits: Any,
) -> Stage:
    """A stage from fakes."""
    bound = Limits(**{"max_turns": 20, "max_context": 100_000, **limits})
    return Stage(
        environment or FnEnvironment(),
        agent or FnAgent(one_turn),
        sandboxes or WatchedSandboxes(),  # type: ignore[arg-type]
        bound,
        lambda episode_id, seed: TokenSession(chat, engine, hermes, bound, episode_id, seed=seed),
    )


# --- records ---------------------------------------------------------------------------------------------------------


def trajectory(layout: str = "ooaaoa", *, version: int = 0, **fields: Any) -> Trajectory:
    """A trajectory from a layout of `o` and `a`; each run of `a` is a turn, `|` parts two turns without an observation."""
    builder = TrajectoryBuilder()
    for run in _runs(layout):
        n = len(run)
        tokens = list(range(len(builder.tokens), len(builder.tokens) + n))
        if run[0] == "o":
            builder.observe(tokens)
        else:
            builder.act(tokens, [-0.25] * n, [version] * n)
    return builder.build(fields.pop("episode_id", "e"), fields.pop("task_id", "t"), **fields)


def _runs(layout: str) -> list[str]:
    parts = layout.replace("oa", "o|a").replace("ao", "a|o").split("|")
    return [part for part in parts if part]


def episode(episode_id: str, *, reward: float = 1.0, version: int = 0, segments: int = 1) -> Episode:
    """A finished and judged episode."""
    made = tuple(trajectory(version=version, episode_id=episode_id, reward=reward, segment=i) for i in range(segments))
    return Episode(episode_id, "t", Termination.FINISHED, made, reward)
