"""The session of an episode whose model is behind an `Endpoint`: to judge a model, not to train it. It records no tokens.

Flows in: the conversation so far. Flows out: replies, within the limits as far as the endpoint counts tokens, and what was
used. It stands where a `TokenSession` does (`harness.episode.Stage.session`):

    async with Endpoint(config, concurrency) as endpoint:
        stage = Stage(environment, agent, sandboxes, limits, partial(EndpointSession, endpoint, limits))
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.endpoint import ContextFull, Endpoint
from harness.errors import EpisodeEnd, SandboxError
from harness.protocols import Message, Reply
from harness.task import Limits, Termination, Usage

Asked = tuple[list[Message], list[dict[str, Any]]]


class EndpointSession:
    """The model of one episode. Calls are answered one after another."""

    folder = None
    """Nothing is kept, so nothing can be resumed."""

    def __init__(self, endpoint: Endpoint, limits: Limits, episode_id: str, seed: int | None = None) -> None:
        self._endpoint, self._limits = endpoint, limits
        self._episode_id, self._seed = episode_id, seed
        self._until = time.monotonic() + limits.wall_s
        self._last: tuple[Asked, Reply, Termination | None] | None = None
        self._ended: Termination | None = None
        self._turns = self._sampled = 0
        self.facts: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    @property
    def episode_id(self) -> str:
        """Unique within the run."""
        return self._episode_id

    @property
    def turns(self) -> int:
        """Model calls answered."""
        return self._turns

    @property
    def ended(self) -> Termination | None:
        """The limit that the last request ran into; None if it was answered."""
        return self._ended

    @property
    def usage(self) -> Usage:
        """As the endpoint counts: `tokens` of the last request and its reply, `action_tokens` of all replies."""
        return Usage(turns=self._turns, tokens=self._held(), action_tokens=self._sampled)

    def count(self, fact: str, n: int = 1) -> None:
        """Add to a counter of `facts`."""
        self.facts[fact] += n

    def restore(self) -> None:
        """Raises `SandboxError`: the episode is lost, as any other that cannot go on."""
        raise SandboxError(f"episode {self._episode_id} cannot be resumed: what an endpoint said is kept nowhere")

    def trajectories(self, task_id: str, info: dict[str, Any]) -> tuple[()]:
        """None: there are no tokens."""
        return ()

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """One model call on the whole conversation so far; the last request, repeated, gets the same reply again.

        Raises `EpisodeEnd` at a limit, `EngineError` when there is no reply, `ConfigError` for a request that is refused.
        """
        async with self._lock:
            try:
                reply = await self._answer((list(messages), list(tools)))
            except EpisodeEnd as end:
                self._ended = end.termination
                raise
            self._ended = None
            return reply

    async def _answer(self, asked: Asked) -> Reply:
        if self._last is None or self._last[0] != asked:
            asked = copy.deepcopy(asked)
            reply, most = await self._sample(asked)
            self._turns += 1
            self._sampled += reply.completion_tokens
            self._last = asked, reply, self._end(reply, most)
        _, reply, end = self._last
        if end is not None:
            raise EpisodeEnd(end)
        return reply

    async def _sample(self, asked: Asked) -> tuple[Reply, int]:
        """A reply, and how many tokens it could have had.

        How many fit is known only behind the reply, and many endpoints refuse a request that may become too long: less is asked
        for then, until not even one token fits.
        """
        if self._turns >= self._limits.max_turns:
            raise EpisodeEnd(Termination.MAX_TURNS)
        room = self._limits.max_context - (self._held() if self._goes_on(asked) else 0)
        most = min(room, self._limits.max_tokens_per_turn)
        messages, tools = asked
        seed = None if self._seed is None else self._seed + self._turns
        while most > 0:
            within_s = self._until - time.monotonic()
            try:
                reply = await self._endpoint.ask(
                    messages, tools, max_tokens=most, seed=seed, turn=self._turns, within_s=within_s
                )
            except ContextFull:
                most //= 2
            else:
                return reply, most
        raise EpisodeEnd(Termination.MAX_CONTEXT)

    def _end(self, reply: Reply, most: int) -> Termination | None:
        """The limit that a reply ran into."""
        total, limits = reply.prompt_tokens + reply.completion_tokens, self._limits
        cut = reply.finish_reason == "length"
        if total > limits.max_context or (cut and (total == limits.max_context or most < limits.max_tokens_per_turn)):
            return Termination.MAX_CONTEXT
        return Termination.MAX_TOKENS_PER_TURN if cut else None

    def _held(self) -> int:
        """Tokens of the last request and its reply."""
        return 0 if self._last is None else self._last[1].prompt_tokens + self._last[1].completion_tokens

    def _goes_on(self, asked: Asked) -> bool:
        """True if the request is the last one and more."""
        if self._last is None:
            return False
        (messages, tools), _, _ = self._last
        return asked[1] == tools and asked[0][: len(messages)] == messages
