"""What the tests of `EndpointSession` share: a server that plays a list, what it plays, a session that talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from harness.endpoint import Endpoint, EndpointConfig
from harness.endpoint_session import EndpointSession
from harness.errors import EpisodeEnd
from harness.protocols import Message
from harness.task import Limits, Termination
from tests.support import USER

HANGS = object()
TOOL = {"type": "function", "function": {"name": "act", "parameters": {"type": "object", "properties": {}}}}


def answer(content: Any = "hello", *, prompt: int = 10, said: int = 5, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion."""
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}], "usage": usage}


def acts(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    """A completion with one call."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "act", "arguments": arguments}}]
    return answer(None, tool_calls=calls, finish="tool_calls", **more)


def refusal(status: int, message: str = "no", code: str | None = None, **headers: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"message": message, "code": code}}, status=status, headers=headers)


@dataclass
class Server:
    """Plays `script`, then repeats its last entry: a completion, a response, `HANGS`, or a function of the request."""

    script: Sequence[Any]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[Any] = field(default_factory=set)
    url: str = ""

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.connections.add(request.transport)
        said = self.script[min(len(self.requests), len(self.script)) - 1]
        if said is HANGS:
            self.entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if callable(said):
            said = said(self.requests[-1])
        if isinstance(said, web.Response):  # a response can be sent once
            return web.Response(status=said.status, body=said.body, headers=said.headers)
        return web.json_response(said)

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()


def config_of(server: Server, **options: Any) -> EndpointConfig:
    return EndpointConfig(**{"url": server.url, "model": "m", "attempts": 3, "longest_wait_s": 0.0} | options)


def talk[T](
    script: Sequence[Any],
    work: Callable[[EndpointSession], Coroutine[Any, Any, T]],
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    seed: int | None = None,
    **options: Any,
) -> tuple[T, Server, EndpointSession]:
    """What `work` does with a session."""

    async def main() -> tuple[T, Server, EndpointSession]:
        async with Server(script) as server, Endpoint(config_of(server, **options), 4) as endpoint:
            session = EndpointSession(endpoint, limits, "e", seed)
            return await work(session), server, session

    return asyncio.run(main())


async def once(session: EndpointSession) -> Any:
    return await session.complete([USER])


def longer(session: EndpointSession, turns: int) -> Coroutine[Any, Any, list[Message]]:
    """A conversation of so many turns."""

    async def main() -> list[Message]:
        messages: list[Message] = [USER]
        for _ in range(turns):
            messages += [(await session.complete(messages)).message(), USER]
        return messages

    return main()


def ended(work: Callable[[EndpointSession], Coroutine[Any, Any, Any]]) -> Callable[[EndpointSession], Any]:
    """The limit that ends it."""

    async def main(session: EndpointSession) -> Termination:
        with pytest.raises(EpisodeEnd) as caught:
            await work(session)
        assert session.ended == caught.value.termination
        return caught.value.termination

    return main


FULL = [
    refusal(400, "This model's maximum context length is 4096 tokens. However, you requested 9000", None),
    refusal(400, "too many", "context_length_exceeded"),
    refusal(400, "the request exceeds the available context size, try increasing it"),
    refusal(400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
    refusal(400, "prompt is too long: 210000 tokens > 200000 maximum"),
    refusal(400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    web.Response(status=400, text='{"object": "error", "message": "longer than the model\'s context length", "code": 400}'),
    web.Response(status=413, text="input exceeds the context window"),
]
