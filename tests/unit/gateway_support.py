"""What the gateway's tests share: a served gateway with a client, posts in each shape, and an engine that can be held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from harness.chat import Chat
from harness.gateway import Endpoint, Gateway
from harness.protocols import GenerateRequest, Generation
from tests.support import USER, PlayedEngine

Body = Callable[[aiohttp.ClientSession, Gateway], Awaitable[None]]
LIMIT_S = 120.0
"""Nothing here takes long; a wait that is lost ends."""
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 10},
}
"""The same call in each shape, by route."""


def serve(test: Body) -> None:
    """Run a test against a started gateway."""

    async def run() -> None:
        gateway = Gateway()
        await gateway.start()
        try:
            async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as client:
                await test(client, gateway)
        finally:
            await gateway.close()

    asyncio.run(run())


async def post(
    client: aiohttp.ClientSession,
    end: Endpoint,
    body: Any = None,
    *,
    key: str | None = None,
    route: str = "chat/completions",
    **more: Any,
) -> tuple[int, Any]:
    """Status and decoded answer of a request."""
    headers = {"Authorization": f"Bearer {end.secret if key is None else key}", **more.pop("headers", {})}
    if body is not None:
        more["json"] = body
    async with client.post(f"{end.url}/{route}", headers=headers, **more) as response:
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


async def connect(end: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection to the gateway of an endpoint."""
    host, port = end.url.split("/")[2].split(":")
    return await asyncio.open_connection(host, int(port))


def head(end: Endpoint, *lines: str) -> bytes:
    """The head of a chat completion request, with more header lines."""
    path = "/" + end.url.split("/", 3)[3] + "/chat/completions"
    given = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {end.secret}", *lines)
    return "".join(f"{line}\r\n" for line in given).encode() + b"\r\n"


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the next answer on a bare connection; its head is read."""
    return int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])


class HeldEngine(PlayedEngine):
    """Plays its turns only while `go` is set; `started` counts the calls that came."""

    def __init__(self, chat: Chat, turns: list[Any]) -> None:
        super().__init__(chat, turns)
        self.go = asyncio.Event()
        self.started = asyncio.Semaphore(0)
        self.calls = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.calls += 1
        self.started.release()
        await self.go.wait()
        return await super().generate(request)
