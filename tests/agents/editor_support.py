"""What the tests of the file editor share: an agent that keeps what the model saw, and an episode of editor calls."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from agents.openhands import OpenHands, OpenHandsConfig
from harness.protocols import ChatSession, LiveTask, Message, Sandbox
from harness.task import Limits, Task, Termination
from tests.agents.support import FINISH, Stand, call
from tests.contracts.sandbox_support import ok
from tests.support import PlayedEngine

LENGTH = 100
"""Of the folder that is edited: a long list is cut by its characters, so all folders have names of one length."""


class Listening(OpenHands):
    """Keeps the messages that the model saw."""

    def __init__(self) -> None:
        super().__init__(OpenHandsConfig())
        self.heard: dict[str, list[Message]] = {}

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        complete = session.complete

        async def listen(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Any:
            self.heard[session.episode_id] = list(messages)
            return await complete(messages, tools)

        session.complete = listen  # type: ignore[method-assign]
        return await super().run(task, live, sandbox, session, limits)

    def answers(self, episode: str) -> list[str]:
        """The texts of an episode's tool messages."""
        return [str(message["content"]) for message in self.heard[episode] if message["role"] == "tool"]


async def in_folder(sandbox: Sandbox, length: int = LENGTH) -> str:
    """A folder whose name has that length, which the sandbox's shell is in."""
    first = (await ok(sandbox, "pwd")).strip()
    folder = f"{first}/{'p' * (length - len(first) - 1)}"
    await ok(sandbox, f"mkdir {folder} && cd {folder}")
    return folder


async def edit(stand: Stand, sandbox: Sandbox, calls: Sequence[dict[str, Any]], name: str = "") -> list[str]:
    """What the model sees of each call, in an episode that goes on to its end."""
    name = name or uuid.uuid4().hex
    said = [*(call("file_editor", security_risk="LOW", **one) for one in calls), FINISH]
    played = await stand.on(sandbox, PlayedEngine(stand.chat, said), name)
    assert played.end is Termination.FINISHED, played.end
    answers = stand.agent.answers(name)
    assert len(answers) == len(calls)
    return answers
