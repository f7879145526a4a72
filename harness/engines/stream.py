"""One generation, in one or several pieces: what was received from a stream, and what of it may be kept when the stream breaks.

Flows in: the events of one streamed answer (`Stream`), streams that broke (`Progress`). Flows out: one exact `Generation`.

vLLM says which weight version sampled which token only in the last event. When that never comes, the tokens that had arrived
before the first pause for an update are known all the same: the weights change only while the server is paused. Later ones are
dropped and sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

from harness.engines.wire import experts_of, sampled, versions_of
from harness.errors import EngineError
from harness.protocols import FinishReason, GenerateRequest, Generation


class Lost(Exception):
    """A replica did not finish a generation; another attempt may go on. `hung`: it is silent, or was taken out."""

    def __init__(self, reason: str, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Mislabelled(EngineError):
    """The replica's weights are not those that were published to it."""


class Stream:
    """What one attempt has received, while the version labels on its replica are known from outside."""

    def __init__(self, version: int) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.labels = [version]
        """The replica's version when the request went out, then that of each update since."""
        self.before_pause: int | None = None
        """Tokens received when the first pause began."""
        self.finish: FinishReason | None = None
        self.frozen = False
        self._versions: list[int] = []
        self._last: dict[str, object] = {}
        self._timer: asyncio.Timeout | None = None
        self._over = False

    # --- time: it stands still while the replica is paused ---

    @asynccontextmanager
    async def timed(self, limit_s: float) -> AsyncIterator[None]:
        """Raise `Lost` inside when the time is up: `limit_s` at first, then what `allow` says."""
        try:
            async with asyncio.timeout(None) as self._timer:
                self.allow(limit_s)
                try:
                    yield
                finally:
                    timer, self._timer = self._timer, None
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise Lost("taken out" if self._over else "nothing came for too long", hung=True) from error

    def allow(self, limit_s: float) -> None:
        """So long from now until the next event at most."""
        if self._timer is not None and not self._timer.expired():
            now = asyncio.get_running_loop().time()
            self._timer.reschedule(now if self._over else None if self.frozen else now + limit_s)

    def freeze(self) -> None:
        """A pause begins."""
        self.frozen = True
        if self.before_pause is None:
            self.before_pause = len(self.ids)
        self.allow(0.0)

    def thaw(self, limit_s: float) -> None:
        """The replica goes on."""
        self.frozen = False
        self.allow(limit_s)

    def give_up(self, trusted: bool) -> None:
        """End the attempt now. Not `trusted`: nothing of it may be kept."""
        if not trusted:
            self.before_pause = 0
        self._over = True
        self.allow(0.0)

    # --- events ---

    def take(self, data: bytes) -> None:
        """One event. Raises `Lost` where the server says that it has failed, `EngineError` for anything inexact."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise Lost(f"the server says {str(event['error'])[:500]}")
            if event["choices"]:
                self._piece(event["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"the engine streamed an event that is none: {error!r}") from error

    def _piece(self, choice: dict[str, object]) -> None:
        if self.finish is not None:
            raise EngineError("the engine went on after its finish_reason")
        finish = choice["finish_reason"]
        if choice["token_ids"]:
            ids, logprobs = sampled(choice)
            self.ids += ids
            self.logprobs += logprobs
        if finish == "abort":
            raise Lost("the server has aborted the request")
        if finish == "stop" or finish == "length":
            try:
                self._versions = versions_of(choice)
            except ValueError as error:
                raise Mislabelled(f"the engine's version label is no number: {choice['weight_versions']}") from error
            self.finish, self._last = finish, choice
        elif finish is not None:
            raise EngineError(f"the engine ended with finish_reason={finish!r}")

    # --- results ---

    @property
    def certain(self) -> int:
        """So many tokens are surely of the first label."""
        return len(self.ids) if self.before_pause is None else self.before_pause

    def generation(self, request: GenerateRequest) -> Generation:
        """The finished answer. Raises `EngineError` unless it is all that was asked for, labelled as was published."""
        ids, versions, finish = self.ids, self._versions, self.finish
        if finish is None or not ids or len(ids) != len(versions):
            raise EngineError(f"the engine answered {len(ids)} tokens and {len(versions)} versions, finish_reason={finish!r}")
        order = iter(self.labels)
        spans_known = all(version in order for version, _ in groupby(versions))
        if not spans_known or set(versions[: self.certain]) - {self.labels[0]}:
            shown = [(version, len(list(group))) for version, group in groupby(versions)]
            raise Mislabelled(
                f"the engine says that its tokens are of versions {shown} (version, tokens); published were {self.labels}, "
                f"and {self.certain} tokens came before an update",
                hint="was the server restarted by someone else?",
            )
        if (ids[-1] in request.stop_token_ids) != (finish == "stop"):
            raise EngineError(f"the engine ended with {finish!r} at token {ids[-1]}; it stops at {request.stop_token_ids}")
        if finish == "length" and len(ids) != request.max_tokens:
            raise EngineError(
                f"the engine ended with 'length' after {len(ids)} of {request.max_tokens} tokens",
                hint="its max_model_len must hold the longest prompt and answer",
            )
        return Generation(ids, self.logprobs, versions, finish, experts=experts_of(self._last, request, len(ids)))


@dataclass(slots=True)
class Progress:
    """A request and the tokens that broken attempts have left of its answer."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def keep(self, stream: Stream) -> None:
        """Take over what is certain of a broken stream."""
        n = stream.certain
        self.ids += stream.ids[:n]
        self.logprobs += stream.logprobs[:n]
        self.versions += stream.labels[:1] * n

    def rest(self) -> GenerateRequest:
        """What is still to be sampled. Its seed is another one, or the same noise would fall on other positions."""
        if not self.ids:
            return self.request
        seed = self.request.seed
        if seed is not None:
            seed = int.from_bytes(hashlib.sha256(f"{seed}/{len(self.ids)}".encode()).digest()[:4])
        prompt, left = self.request.token_ids + self.ids, self.request.max_tokens - len(self.ids)
        return replace(self.request, token_ids=prompt, max_tokens=left, seed=seed)

    def complete(self) -> Generation | None:
        """The answer, if only the server's word that it is finished was lost."""
        if self.ids and self.ids[-1] in self.request.stop_token_ids:
            return self.then(Generation([], [], [], "stop"))
        return self.then(Generation([], [], [], "length")) if len(self.ids) == self.request.max_tokens else None

    def then(self, last: Generation) -> Generation:
        """The whole answer. Raises `EngineError` if it goes on after a stop token."""
        ids = self.ids + last.token_ids
        if set(ids[:-1]) & set(self.request.stop_token_ids):
            raise EngineError("the engine sampled on after a stop token")
        logprobs, versions = self.logprobs + last.logprobs, self.versions + last.versions
        return Generation(ids, logprobs, versions, last.finish_reason, experts=last.experts)
