"""The token session: chat messages in, a reply out, and every token of it recorded exactly. The only writer of trajectories.

The first request renders the model's template. Every later one must extend what was seen; of it only the new messages are
rendered, behind the tokens that were really sampled. The agent's echo of the assistant turns is ignored: what the policy
said is known in tokens. A request that does not extend the past (rewritten history) starts a new segment, whose prompt is an
observation.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.chat import Chat
from harness.errors import EpisodeEnd
from harness.parsers import Parser
from harness.protocols import GenerateRequest, InferenceEngine, Message, Reply, SamplingContract
from harness.task import Limits, Termination
from harness.trajectory import Trajectory, TrajectoryBuilder


@dataclass(slots=True)
class Segment:
    """One unbroken conversation: its tokens, the request it was last asked with, and the reply given."""

    builder: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    request: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    reply: Reply | None = None
    end: Termination | None = None
    """The limit that cut the reply."""


class TokenSession:
    """The model of one episode. Calls are answered one after another."""

    def __init__(
        self,
        chat: Chat,
        engine: InferenceEngine,
        parser: Parser,
        limits: Limits,
        episode_id: str,
        sampling: SamplingContract | None = None,
        seed: int | None = None,
    ) -> None:
        self._chat, self._engine, self._parser, self._limits = chat, engine, parser, limits
        self._episode_id, self._seed = episode_id, seed
        self._sampling = sampling or SamplingContract()
        self._segments: list[Segment] = []
        self._turns = 0
        self._lock = asyncio.Lock()

    @property
    def turns(self) -> int:
        """Model calls answered."""
        return self._turns

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """One model call on the whole conversation so far.

        A repeated request gets the same reply again. Raises `EpisodeEnd` at a limit (after recording a turn that was cut), and
        `EngineError` with nothing recorded when the engine fails.
        """
        async with self._lock:
            request, tool_list = list(messages), list(tools)
            segment = self._segments[-1] if self._segments else None
            if segment and segment.reply and request == segment.request and tool_list == segment.tools:
                if segment.end is not None:
                    raise EpisodeEnd(segment.end)
                return segment.reply
            if segment is None or not _extends(request, tool_list, segment):
                request, tool_list = copy.deepcopy((request, tool_list))
                segment = Segment(tools=tool_list)
                new = self._chat.opening(request, tool_list)
            else:
                n = len(segment.request)
                request = [*segment.request, *copy.deepcopy(request[n:])]
                new = self._chat.continuation(request[:n], request[n + 1 :], tool_list)
                if segment.reply is not None and segment.builder.tokens[-1] not in self._chat.stop_ids:
                    new = [self._chat.stop_ids[0], *new]
            return await self._sample(segment, request, new)

    async def _sample(self, segment: Segment, request: list[Message], new: list[int]) -> Reply:
        if self._turns >= self._limits.max_turns:
            raise EpisodeEnd(Termination.MAX_TURNS)
        prompt = segment.builder.tokens + new
        room = self._limits.max_context - len(prompt)
        if room < 1:
            raise EpisodeEnd(Termination.MAX_CONTEXT)
        generation = await self._engine.generate(
            GenerateRequest(
                token_ids=prompt,
                max_tokens=min(room, self._limits.max_tokens_per_turn),
                stop_token_ids=self._chat.stop_ids,
                sampling=self._sampling,
                seed=None if self._seed is None else self._seed + self._turns,
                request_id=f"{self._episode_id}/{self._turns}",
            )
        )
        segment.builder.observe(new)
        segment.builder.act(generation.token_ids, generation.logprobs, generation.versions)
        if segment.reply is None:
            self._segments.append(segment)
        content, calls = self._parser(self._chat.text_of(generation.token_ids), self._turns)
        segment.request = request
        segment.reply = Reply(content, calls, generation.finish_reason)
        segment.end = None
        self._turns += 1
        if generation.finish_reason == "length":
            full = len(prompt) + len(generation.token_ids) >= self._limits.max_context
            segment.end = Termination.MAX_CONTEXT if full else Termination.MAX_TOKENS_PER_TURN
            raise EpisodeEnd(segment.end)
        return segment.reply

    def trajectories(self, task_id: str, info: dict[str, Any]) -> tuple[Trajectory, ...]:
        """The segments so far, each with at least one action token, as trajectories without reward."""
        facts = {**info, "sampling": sampling_hash(self._sampling)}
        sampled = [s.builder for s in self._segments if s.builder.n_turns]
        return tuple(b.build(self._episode_id, task_id, segment=i, info=facts) for i, b in enumerate(sampled))


def _extends(request: list[Message], tools: list[dict[str, Any]], segment: Segment) -> bool:
    n = len(segment.request)
    if tools != segment.tools or len(request) <= n or request[:n] != segment.request or segment.reply is None:
        return False
    echo = request[n]
    if echo.get("role") != "assistant":
        return False
    echoed = [call.get("id") for call in echo.get("tool_calls") or []]
    return echoed == [call.id for call in segment.reply.tool_calls]


def sampling_hash(sampling: SamplingContract) -> str:
    """A short name of a sampling contract; the trainer refuses a batch with another one."""
    text = json.dumps([sampling.temperature, sampling.top_p, sampling.top_k])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
