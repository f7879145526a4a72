"""Agents that play the bash script of their task, and the stage they play on: real containers, an engine that says one word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.scripted import ScriptedAgent
from environments.swe.environment import Swe
from environments.toy_repair.tokenizer import write
from harness.chat import Chat
from harness.engines.scripted import ScriptedEngine
from harness.episode import Stage
from harness.parsers import hermes
from harness.protocols import ChatSession, LiveTask, Sandbox
from harness.session import TokenSession
from harness.task import Limits, Task, Termination

CRASHES = "an agent that crashes"
LIMITS = Limits(max_turns=4, max_context=100_000, max_tokens_per_turn=64, wall_s=300.0)


def playing(task: Task, name: str, script: str, **options: Any) -> Task:
    """The task, with the script that its agent plays; `seconds` it may take, `times` it is played."""
    return Task(name, task.messages, {**task.data, "act": script, **options}, task.image)


class Actor:
    """Plays the script that its task carries."""

    Config = ScriptedAgent.Config

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """One model call, one script."""
        await session.complete(list(task.messages))
        if task.data["act"] == CRASHES:
            raise RuntimeError("the agent's own fault")
        for _ in range(task.data.get("times", 1)):
            await sandbox.exec(f"cd /testbed; {task.data['act']}", timeout_s=task.data.get("seconds", 60.0))
        return Termination.FINISHED


def stage(swe: Swe, sandboxes: Any, folder: Path) -> Stage:
    """The stage; `folder` takes the tokenizer."""
    write(folder)
    chat = Chat(folder, ["<|im_end|>"])
    engine = ScriptedEngine(chat, lambda conversation, rng: "done")
    return Stage(
        swe, Actor(), sandboxes, LIMITS, lambda episode, seed: TokenSession(chat, engine, hermes, LIMITS, episode, seed=seed)
    )
