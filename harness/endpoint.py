"""An OpenAI-compatible chat-completions endpoint that somebody else serves: one request out, one checked reply back.

Flows in: messages, tools, how many tokens to sample at most. Flows out: a `Reply`. What may pass (no connection, a timeout,
HTTP 408, 409, 429, 5xx, an answer that is no chat completion) is asked again, after the time that the endpoint asks for, and
is in the end an `EngineError`: infrastructure, never reward 0. What it refuses otherwise is the user's to correct. The key is
the environment variable `OPENAI_API_KEY` and is written nowhere, not even where the endpoint repeats it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, Field
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from harness.completions import SHOWN, reply_of, seconds, sendable, words_of
from harness.engines.http import KEPT_S
from harness.errors import ConfigError, EngineError
from harness.protocols import Message, Reply

KEY = "OPENAI_API_KEY"
"""Environment variable with the secret of the endpoint."""
CONNECT_S = 10.0
AGAIN = (408, 409, 429)
"""Refusals that pass; and whatever is 500 or more."""
_FULL = re.compile(
    r"context[ _-]?(length|window|size)|maximum (model|prompt|input) length|prompt is too long|input is too long"
    r"|token count.{0,40}exceeds|longer than the maximum|exceeds the maximum number of (input )?tokens",
    re.IGNORECASE,
)
log = logging.getLogger("sao")


class EndpointConfig(BaseModel):
    """Where the model is, and how it is asked."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[^\s@/:?#\[\]]+)(:\d+)?(/[^\s@]*)?$")
    """Up to and with the version, for example http://localhost:8000/v1."""
    model: str = Field(min_length=1)
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    timeout_s: float = Field(600.0, gt=0.0)
    """Of one request, in seconds."""
    attempts: int = Field(8, ge=1)
    """Requests for one reply."""
    longest_wait_s: float = Field(60.0, ge=0.0)
    """Between two of them, in seconds, whatever the endpoint asks for."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request, such as `reasoning_effort` or `chat_template_kwargs`; null leaves one of ours out."""


class ContextFull(Exception):
    """The endpoint says that the prompt and what may follow are longer than its context."""


class Unanswered(Exception):
    """No reply; may be asked again, after `after_s` seconds."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


PASSING = (Unanswered, aiohttp.ClientError, TimeoutError)


class Endpoint:
    """The connections to one endpoint, shared by a run's sessions: `async with Endpoint(config, 64) as endpoint`."""

    def __init__(self, config: EndpointConfig, concurrency: int) -> None:
        self.config, self._concurrency = config, concurrency
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._backoff = wait_random_exponential(max=config.longest_wait_s)
        self._key = os.environ.get(KEY, "").strip()
        self._client: aiohttp.ClientSession | None = None
        self._counts = True
        self._said = False

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=self._concurrency, keepalive_timeout=KEPT_S)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        self._client = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        seed: int | None,
        turn: int,
        within_s: float,
    ) -> Reply:
        """One reply; it is not asked for again once `within_s` seconds are over. `turn` names calls that have no id.

        Raises `ContextFull`, `EngineError` when no attempt was answered, and `ConfigError` with the endpoint's own words.
        """
        config = self.config
        # `max_completion_tokens` is OpenAI's newer name; vLLM, SGLang, llama.cpp, Ollama and most services know `max_tokens`.
        body = {
            "model": config.model,
            "messages": [sendable(message) for message in messages],
            "tools": list(tools) or None,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": max_tokens,
            "seed": seed,
        } | config.extra
        retrying = AsyncRetrying(
            stop=stop_after_attempt(config.attempts) | stop_before_delay(within_s),
            wait=self._wait,
            retry=retry_if_exception_type(PASSING),
            before_sleep=self._say,
            reraise=True,
        )
        try:
            reply: Reply = await retrying(self._post, {name: value for name, value in body.items() if value is not None}, turn)
        except PASSING as error:
            count = retrying.statistics["attempt_number"]
            raise EngineError(
                f"{config.url} gave no reply in {count} attempts: {self._safe(str(error) or repr(error))}",
                hint=f"is it up, does it serve {config.model!r}?",
            ) from None
        return reply

    def _say(self, state: RetryCallState) -> None:
        """The first time that a request is repeated; how often follows in the error, if none is answered."""
        if not self._said and state.outcome is not None:
            self._said = True
            error = state.outcome.exception()
            log.warning("%s: %s; asking again", self.config.url, self._safe(str(error) or repr(error)))

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return min(max(self._backoff(state), getattr(error, "after_s", 0.0)), self.config.longest_wait_s)

    async def _post(self, body: dict[str, Any], turn: int) -> Reply:
        assert self._client is not None, "async with Endpoint(...)"
        async with self._client.post(self._url, json=body, allow_redirects=False) as response:
            text = (await response.read()).decode(errors="replace")
        if response.status != 200:
            raise self._refusal(response.status, text, response.headers.get("Retry-After", ""))
        try:
            reply = reply_of(text, turn)
        except ValueError as error:
            raise Unanswered(str(error)) from None
        if self._counts and not reply.prompt_tokens:
            self._counts = False
            log.warning("%s counts no tokens: limits.max_context is left to the endpoint", self.config.url)
        return reply

    def _refusal(self, status: int, text: str, after: str) -> Exception:
        said, code = words_of(text)
        said = self._safe(said)
        if status in AGAIN or status >= 500:
            return Unanswered(f"HTTP {status}: {said}", seconds(after))
        if code == "context_length_exceeded" or (status in (400, 413, 422) and _FULL.search(said)):
            return ContextFull(said)
        hint = f"set {KEY} to a valid key" if status in (401, 403) else "correct the URL, the model or its settings"
        return ConfigError(f"{self.config.url} refuses a request with HTTP {status}: {said}", hint=hint)

    def _safe(self, text: str) -> str:
        """A message without the key."""
        return (text.replace(self._key, "***") if self._key else text)[:SHOWN]
