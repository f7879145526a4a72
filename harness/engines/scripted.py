"""A deterministic engine for demonstrations, tests and checks: a function writes each turn, as text, with probability 1.

Flows in: the decoded prompt. Flows out: the tokens of what the function answers, log-prob 0, the current version label.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from harness.chat import Chat
from harness.protocols import GenerateRequest, Generation

Script = Callable[[str, random.Random], str]
"""(conversation text, random numbers of this call) -> the next assistant turn, without stop token."""


def call(name: str, **arguments: object) -> str:
    """The turn that makes one tool call, in the Hermes form."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def in_turn(*turns: str) -> Script:
    """A script for one episode: these turns, whatever is answered, and silence after the last."""
    left = iter(turns)
    return lambda conversation, rng: next(left, "")


class ScriptedEngine:
    """An `InferenceEngine` that plays a script."""

    def __init__(self, chat: Chat, script: Script, seed: int = 0) -> None:
        self.chat, self.script, self.seed = chat, script, seed
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """The script's turn, cut at `max_tokens`."""
        rng = random.Random(f"{self.seed}/{request.request_id}")
        text = self.script(self.chat.decode(request.token_ids), rng)
        ids = self.chat.encode(text) + [self.chat.stop_ids[0]]
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        return Generation(ids, [0.0] * len(ids), [self.version] * len(ids), finish)  # type: ignore[arg-type]

    async def score(self, token_ids: list[int]) -> list[float]:
        """A script has probability 1."""
        return [0.0] * (len(token_ids) - 1)

    async def update_weights(self, path: Path, version: int, sha256: str | None = None) -> None:
        """Take the label; a script has no weights."""
        self.version = version

    async def metrics(self) -> dict[str, float]:
        """A script has no load."""
        return {}

    async def close(self) -> None:
        """Nothing to close."""
