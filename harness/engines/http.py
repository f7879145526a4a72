"""Client of the engine contract (`docs/engine.md`): token ids in, tokens with log-probs and version spans out.

The embedded engine and vLLM answer the same routes. Anything inexact (a missing log-prob, a span that does not cover the
output, an unfinished answer) is an `EngineError`: the episode is retried, never trained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import aiohttp

from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation


class HttpEngine:
    """One engine server."""

    def __init__(self, url: str, *, request_s: float = 3_600.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_s, sock_connect=10.0)
        self._session: aiohttp.ClientSession | None = None

    async def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        try:
            async with self._session.request(method, self.url + route, json=body) as response:
                if response.status != 200:
                    raise EngineError(f"engine {route}: HTTP {response.status}: {(await response.text())[:500]}")
                return await response.json()  # type: ignore[no-any-return]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"engine {route}: {error!r}", hint=f"look at the engine's log; is {self.url} up?") from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a continuation."""
        params: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            "stop_token_ids": list(request.stop_token_ids),
            "logprobs": 0,
            "detokenize": False,
        }
        if request.seed is not None:
            params["seed"] = request.seed
        body = {"token_ids": request.token_ids, "sampling_params": params, "request_id": request.request_id}
        answer = await self._call("POST", "/inference/v1/generate", body)
        return _generation(answer)

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of tokens 1.. under the current weights."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._call("POST", "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
        try:
            rows = answer["prompt_logprobs"]
            scores = [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's scores are incomplete: {error!r}") from error
        if not all(math.isfinite(x) for x in scores):
            raise EngineError("the engine answered a score that is not finite")
        return scores

    async def update_weights(self, path: Path, version: int, sha256: str | None = None) -> None:
        """Pause, load, label, resume. If any step fails the engine stays paused."""
        await self._call("POST", "/pause?mode=keep&clear_cache=false")
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", {"update_info": {"path": str(path), "sha256": sha256}})
        await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self._call("POST", "/resume")

    async def metrics(self) -> dict[str, float]:
        """Load figures of the embedded engine."""
        return await self._call("GET", "/metrics")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _generation(answer: dict[str, Any]) -> Generation:
    try:
        choice = answer["choices"][0]
        ids = [int(t) for t in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        finish = choice["finish_reason"]
        versions: list[int] = []
        for span in choice["weight_versions"]:
            if span["start"] != len(versions):
                raise ValueError(f"version span starts at {span['start']}, not {len(versions)}")
            versions += [int(span["version"])] * (span["end"] - span["start"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the engine's answer is incomplete: {error!r}") from error
    if finish not in ("stop", "length"):
        raise EngineError(f"the engine ended with finish_reason={finish!r}")
    if not ids or not len(ids) == len(logprobs) == len(versions):
        raise EngineError(f"the engine answered {len(ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logprobs) or min(versions) < 0:
        raise EngineError("the engine answered a log-prob that is none, or a version below 0")
    return Generation(ids, logprobs, versions, finish)
