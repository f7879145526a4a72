"""What the tests of agents share: one event loop for a module, so that its workers are started once, and played episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.openhands import OpenHands, OpenHandsConfig
from harness.chat import Chat
from harness.parsers import hermes
from harness.protocols import Sandbox
from harness.session import TokenSession
from harness.task import Limits, Task, Termination
from harness.trajectory import Trajectory
from tests.contracts.sandbox_support import started
from tests.support import PlayedEngine, Raw

LIMITS = Limits(max_turns=400, max_context=10_000_000, wall_s=240.0)
TASK = Task("t", ({"role": "user", "content": "Fix the bug."},))


def call(tool: str, **arguments: Any) -> str:
    """A tool call in Hermes form."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def run(command: str, **more: Any) -> str:
    """A call of the terminal."""
    return call("terminal", command=command, security_risk="LOW", **more)


FINISH = call("finish", message="done")


@dataclass
class Played:
    """What came of an episode."""

    end: Termination | BaseException
    session: TokenSession
    engine: PlayedEngine

    @property
    def trajectory(self) -> Trajectory:
        """The only one."""
        (trajectory,) = self.session.trajectories("t", {})
        return trajectory

    def facts(self) -> dict[str, int]:
        """Counters of the episode."""
        return dict(self.trajectory.info["facts"])


class Stand:
    """An agent on one loop, with its sandboxes."""

    def __init__(self, runner: asyncio.Runner, chat: Chat, agent: Any, sandboxes: Any) -> None:
        self.runner, self.chat, self.agent, self.sandboxes = runner, chat, agent, sandboxes

    def run[T](self, main: Coroutine[Any, Any, T]) -> T:
        """On the loop of the agent."""
        return self.runner.run(main)

    def play(
        self,
        turns: Sequence[str | Raw | BaseException] | Callable[[Sandbox], Awaitable[Sequence[str]]],
        look: Callable[[Sandbox], Awaitable[Any]] | None = None,
        **limits: Any,
    ) -> Played:
        """One episode; `turns` may depend on the sandbox, `look` sees it at the end."""
        return self.run(self.episode(turns, look, **limits))

    async def episode(self, turns: Any, look: Any = None, name: str = "e", **limits: Any) -> Played:
        """The same, as a coroutine."""
        sandbox = await self.sandboxes.acquire(TASK)
        try:
            said = await turns(sandbox) if callable(turns) else turns
            played = await self.on(sandbox, PlayedEngine(self.chat, said), name, **limits)
            if look is not None:
                await look(sandbox)
            return played
        finally:
            await sandbox.close()

    async def on(self, sandbox: Sandbox, engine: Any, name: str = "e", folder: Path | None = None, **limits: Any) -> Played:
        """In a given sandbox, with a given engine."""
        allowed = Limits(**{**{k: getattr(LIMITS, k) for k in LIMITS.__slots__}, **limits})
        session = TokenSession(self.chat, engine, hermes, allowed, name, folder=folder)
        end: Termination | BaseException
        try:
            async with asyncio.timeout(allowed.wall_s):
                end = await self.agent.run(TASK, None, sandbox, session, allowed)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            end = error
        return Played(end, session, engine)


@contextmanager
def stand(chat: Chat, kind: str = "process", agent: Any = None, **options: Any) -> Iterator[Stand]:
    """A stand, closed at the end."""
    with asyncio.Runner() as runner:
        sandboxes = started(kind, **options)
        agent = agent or OpenHands(OpenHandsConfig())
        provider = runner.run(sandboxes.__aenter__())
        try:
            yield Stand(runner, chat, agent, provider)
        finally:
            runner.run(agent.close())
            runner.run(sandboxes.__aexit__(None, None, None))


def exact(trajectories: Sequence[Trajectory], engine: PlayedEngine) -> None:
    """Invariant 1: every request to the engine and its answer stand in some trajectory, token by token."""
    seen = 0
    for trajectory in trajectories:
        tokens = trajectory.tokens.tolist()
        for span in trajectory.spans:
            if span.kind == "action":
                prompt, said = tokens[: span.start], tokens[span.start : span.stop]
                asked = [
                    i
                    for i, request in enumerate(engine.requests)
                    if request.token_ids == prompt and engine.generations[i].token_ids == said
                ]
                assert asked, f"turn {span.turn} of segment {trajectory.segment} is not what the engine saw"
                seen += 1
    assert seen == len(engine.requests)
