"""An episode that agents in other processes can reach: what they need, what came of their calls, and the calls that run.

A model call that has begun goes on when its client has gone, so that the same request sent again finds its reply.
"""

from __future__ import annotations

import asyncio
import logging

from harness.errors import ConfigError, EngineError, EpisodeEnd, InfrastructureError
from harness.gateway.shape import Call, Refusal
from harness.protocols import ChatSession, Reply
from harness.task import Termination

CLOSE_S = 10.0
"""Seconds for running model calls to end when their episode is closed."""
log = logging.getLogger("sao")


class Endpoint:
    """What an external agent needs, and what has come of its calls so far."""

    def __init__(self, url: str, secret: str) -> None:
        self.url = url
        """OPENAI_BASE_URL: ends in /v1."""
        self.secret = secret
        """The API key."""
        self.calls = 0
        """Model calls answered with a reply; a repeated request counts again."""
        self.ended = asyncio.Event()
        """Set when the session has said that the episode is over."""
        self.termination: Termination | None = None
        """Why it is over."""
        self.fault: InfrastructureError | None = None
        """The failure of the last model call, if it failed."""

    @property
    def anthropic_url(self) -> str:
        """ANTHROPIC_BASE_URL: clients append /v1/messages."""
        return self.url.removesuffix("/v1")


class OpenEpisode:
    """An open endpoint with its session and the model calls that run."""

    def __init__(self, endpoint: Endpoint, session: ChatSession) -> None:
        self.endpoint, self.session = endpoint, session
        self.in_flight = 0
        self.bug: BaseException | None = None
        self._running: set[asyncio.Task[Reply]] = set()
        self._closed = False

    async def complete(self, call: Call) -> Reply:
        """The session's reply. Raises `Refusal`; cancelled, it leaves the model call running."""
        if self._closed:
            raise _gone()
        if call.ignored_sampling:
            self.session.count("ignored_sampling")
        task = asyncio.create_task(_complete(self.session, call))
        self._running.add(task)
        task.add_done_callback(self._done)
        await asyncio.wait({task})
        if task.cancelled():
            raise _gone()
        if error := task.exception():
            raise _refusal(error) from error
        return task.result()

    def _done(self, task: asyncio.Task[Reply]) -> None:
        """Keep what came of a call, whether or not its client is still there."""
        self._running.discard(task)
        if task.cancelled():
            return
        error, end = task.exception(), self.endpoint
        end.fault = error if isinstance(error, InfrastructureError) else None
        if error is None:
            end.calls += 1
        elif isinstance(error, EpisodeEnd):
            end.termination = error.termination
            end.ended.set()
        elif isinstance(error, InfrastructureError):
            log.warning("episode %s: a model call failed: %s", self.session.episode_id, error.message)
        elif not isinstance(error, ConfigError):
            log.error("episode %s: a model call broke: %s", self.session.episode_id, type(error).__name__)
            self.bug = self.bug or error

    async def close(self) -> None:
        """Nothing is recorded in the session after this. Raises `EngineError` if a model call does not end."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            _, stuck = await asyncio.wait(set(self._running), timeout=CLOSE_S)
            if stuck:
                raise EngineError(f"{len(stuck)} model calls did not end {CLOSE_S:.0f} s after they were cancelled")


async def _complete(session: ChatSession, call: Call) -> Reply:
    return await session.complete(call.messages, call.tools)


def _gone() -> Refusal:
    return Refusal(410, "the episode is closed", "episode_closed")


def _refusal(error: BaseException) -> Refusal:
    """How a client is told what a model call raised."""
    if isinstance(error, EpisodeEnd):
        return Refusal(400, f"the episode is over: {error.termination.value}", "episode_end")
    if isinstance(error, ConfigError):
        return Refusal(400, error.message, "refused")
    if isinstance(error, InfrastructureError):
        return Refusal(503, error.message, "unavailable")
    return Refusal(500, "the session failed", "internal")
