"""Client of the engine contract (`docs/engine.md`): token ids in, tokens with log-probs and version spans out.

The embedded engine and vLLM answer the same routes. Anything inexact (a missing log-prob, a span that does not cover the
output, an unfinished answer) is an `EngineError`: the episode is retried, never trained.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import aiohttp

from harness.engines.wire import GENERATE, generate_body, score_body, scores
from harness.engines.wire import generation as _generation
from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation

KEPT_S = 2.0
"""An idle connection is closed after this; servers close it after 5 s, and a request that meets that moment is lost."""

METRICS_S = 30.0
KEY = "VLLM_API_KEY"
"""Environment variable with the secret that servers ask for, if they do."""


class HttpEngine:
    """One engine server."""

    def __init__(self, url: str, *, request_s: float = 3_600.0, connect_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_s, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections; opened by the first call."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            key = os.environ.get(KEY)
            headers = {"Authorization": f"Bearer {key}"} if key else None
            self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector, headers=headers)
        return self._session

    async def _text(self, method: str, route: str, body: dict[str, Any] | None = None, limit_s: float | None = None) -> str:
        """What a route answers with HTTP 200, within `limit_s` (None: the limit of every request)."""
        timeout = self._timeout if limit_s is None else aiohttp.ClientTimeout(limit_s, sock_connect=self._timeout.sock_connect)
        try:
            async with self.session.request(method, self.url + route, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineError(f"engine {route}: HTTP {response.status}: {(await response.text())[:500]}")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"engine {route}: {error!r}", hint=f"look at the engine's log; is {self.url} up?") from error

    async def _call(
        self, method: str, route: str, body: dict[str, Any] | None = None, limit_s: float | None = None
    ) -> dict[str, Any]:
        text = await self._text(method, route, body, limit_s)
        try:
            return json.loads(text)  # type: ignore[no-any-return]
        except ValueError as error:
            raise EngineError(f"engine {route}: {error!r}", hint=f"is {self.url} an engine?") from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a continuation."""
        return _generation(await self._call("POST", GENERATE, generate_body(request)))

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of tokens 1.. under the current weights."""
        return scores(await self._call("POST", GENERATE, score_body(token_ids)), token_ids)

    async def update_weights(self, path: Path, version: int, sha256: str | None = None) -> None:
        """Pause, load, label, resume. If any step fails the engine stays paused."""
        await self._call("POST", "/pause?mode=keep&clear_cache=false")
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", {"update_info": {"path": str(path), "sha256": sha256}})
        await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self._call("POST", "/resume")

    async def metrics(self) -> dict[str, float]:
        """Load figures of the embedded engine."""
        return await self._call("GET", "/metrics", None, METRICS_S)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
