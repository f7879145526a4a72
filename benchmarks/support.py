"""What the harness benchmarks share: an environment of a known number of turns, and a stage on fakes that cost nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agents.tool_loop import ToolLoop
from environments.toy_repair.expert import call
from environments.toy_repair.tokenizer import write
from harness.chat import Chat
from harness.engines.scripted import ScriptedEngine
from harness.episode import Stage
from harness.parsers import hermes
from harness.protocols import GenerateRequest, Generation, Sandbox, Tool, ToolResult
from harness.sandboxes.memory import MemorySandboxes
from harness.session import TokenSession
from harness.task import Limits, Score, Split, Task


class Steps:
    """Tasks that take exactly the number of tool calls that their prompt says."""

    Config = BaseModel

    def __init__(self, turns: Sequence[int]) -> None:
        self._tasks = [
            Task(f"steps/{i}", ({"role": "user", "content": f"steps={n}"},), {"turns": n}) for i, n in enumerate(turns)
        ]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Both splits are the same."""
        return self._tasks

    async def begin(self, task: Task, sandbox: Sandbox) -> StepsTask:
        """Nothing to set up."""
        return StepsTask(task.data["turns"])


class StepsTask:
    """Counts calls; the last one is done."""

    def __init__(self, turns: int) -> None:
        self._left = turns
        schema = {"type": "object", "properties": {}}
        self.tools: Sequence[Tool] = (Tool("edit", "", schema, self._step), Tool("finish", "", schema, self._step))

    async def _step(self, _: dict[str, Any]) -> ToolResult:
        self._left -= 1
        return ToolResult("edited", done=self._left == 0)

    async def score(self) -> Score:
        """Always 1."""
        return Score(1.0)


def one_call(conversation: str, rng: random.Random) -> str:
    """The script of every turn."""
    return call("edit")


class Clocked(ScriptedEngine):
    """A scripted engine whose every turn takes `turn_s` of model time."""

    turn_s = 0.0

    async def generate(self, request: GenerateRequest) -> Generation:
        """The script's turn after its model time."""
        await asyncio.sleep(self.turn_s)
        return await super().generate(request)


def fake_stage(environment: Any, folder: Path, turn_s: float = 0.0) -> Stage:
    """Tool loop, scripted engine, instant sandboxes."""
    write(folder)
    chat = Chat(folder, ["<|im_end|>"])
    engine = Clocked(chat, one_call)
    engine.turn_s = turn_s
    limits = Limits(max_turns=10_000, max_context=1_000_000, max_tokens_per_turn=64)
    return Stage(
        environment,
        ToolLoop(ToolLoop.Config()),
        MemorySandboxes(MemorySandboxes.Config(), "benchmark"),
        limits,
        lambda episode_id, seed: TokenSession(chat, engine, hermes, limits, episode_id, seed=seed),
    )
