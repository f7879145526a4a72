"""OpenAI-compatible HTTP in front of token sessions, one base URL and secret per episode, for agents in other processes.

Flows in: `POST {url}/chat/completions`. Flows out: a chat completion. It holds no tokens and makes no decision: the session
does. Wrong secrets, oversized or malformed bodies and finished episodes get one clear error each.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from harness.errors import ConfigError, EpisodeEnd, InfrastructureError
from harness.protocols import ChatSession

BODY_LIMIT = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What an external agent needs: OPENAI_BASE_URL and OPENAI_API_KEY."""

    url: str
    secret: str


class Gateway:
    """A loopback HTTP server for the episodes of one run."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[str, ChatSession]] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self, port: int = 0) -> None:
        """Listen on loopback. Raises `ConfigError` if the port is in use."""
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_post("/{episode}/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"the gateway cannot listen on port {port}: {error.strerror}", hint="take another port"
            ) from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def open(self, session: ChatSession) -> AsyncIterator[Endpoint]:
        """An endpoint for one episode, gone when the block ends."""
        episode, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._sessions[episode] = (secret, session)
        try:
            yield Endpoint(f"http://127.0.0.1:{self._port}/{episode}/v1", secret)
        finally:
            del self._sessions[episode]

    async def _chat(self, request: web.Request) -> web.Response:
        secret, session = self._sessions.get(request.match_info["episode"], ("", None))
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if session is None or not hmac.compare_digest(given.encode(errors="replace"), secret.encode()):
            return _error(401, "unknown episode or wrong key")
        try:
            body = await request.json()
            messages, tools = body["messages"], body.get("tools") or []
            if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
                raise ValueError("messages is not a list of messages")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise ValueError("tools is not a list of tools")
            if body.get("stream"):
                raise ValueError("streaming is not offered; set stream to false")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _error(400, f"bad request: {error}")
        try:
            reply = await session.complete(messages, tools)
        except EpisodeEnd as end:
            return _error(400, f"the episode is over: {end.termination.value}", "episode_end")
        except ConfigError as error:
            return _error(400, error.message)
        except InfrastructureError as error:
            return _error(503, error.message)
        finish = "tool_calls" if reply.tool_calls else reply.finish_reason
        choice = {"index": 0, "message": reply.message(), "finish_reason": finish}
        return web.json_response(
            {
                "id": f"chatcmpl-{secrets.token_hex(8)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model", "policy"),
                "choices": [choice],
            }
        )


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls") or []
    return isinstance(calls, list) and all(isinstance(call, dict) for call in calls)


def _error(status: int, message: str, code: str = "error") -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)
