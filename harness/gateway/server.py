"""An HTTP server in front of token sessions, one base URL and secret per episode, for agents in other processes.

Flows in: a request in one of three shapes (`docs/gateway.md`). Flows out: the session's reply in the same shape. It holds no
tokens and decides nothing: the session does. A model call that has begun goes on when its client has gone, so that the same
request sent again finds its reply. Whatever is wrong with a request gets one clear error.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from harness.errors import ConfigError
from harness.gateway import anthropic, chat_completions, responses
from harness.gateway.endpoint import Endpoint, OpenEpisode
from harness.gateway.shape import Refusal, Shape, Stamp, bad, decode
from harness.protocols import ChatSession

BODY_LIMIT = 32 * 1024**2
BODY_S = 60.0
"""Seconds for a client to send its body."""
IN_FLIGHT = 32
"""Requests of one episode at the same time."""
LARGE = 1024**2
"""Bytes from which a body is read off the event loop."""

BROKEN = (HttpProcessingError, web.RequestPayloadError)
"""Broken HTTP. aiohttp answers it with 400, and would log its bytes, which may hold a secret."""
log = logging.getLogger("sao")
http_log = logging.getLogger("sao.http")
http_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], BROKEN)))


class Gateway:
    """A loopback HTTP server for the episodes of one run."""

    def __init__(self) -> None:
        self._episodes: dict[str, OpenEpisode] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self, port: int = 0) -> None:
        """Listen on loopback. Raises `ConfigError` if the port is in use."""
        app = web.Application(client_max_size=BODY_LIMIT)
        shapes: dict[str, Shape] = {
            "chat/completions": chat_completions,
            "responses": responses,
            "messages": anthropic,
        }
        for path, shape in shapes.items():
            app.router.add_post(f"/{{episode}}/v1/{path}", partial(self._post, shape))
        app.router.add_get("/{episode}/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _nowhere)
        self._runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=1.0, lingering_time=1.0)
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
        """An endpoint for one episode, gone when the block ends; running model calls are cancelled and recorded nowhere.

        Raises at the end what broke a model call, if it was neither the client nor the infrastructure.
        """
        name = secrets.token_hex(8)
        endpoint = Endpoint(f"http://127.0.0.1:{self._port}/{name}/v1", secrets.token_urlsafe(24))
        episode = self._episodes[name] = OpenEpisode(endpoint, session)
        try:
            yield endpoint
        finally:
            del self._episodes[name]
            await episode.close()
        if episode.bug is not None:
            raise episode.bug

    async def _post(self, shape: Shape, request: web.Request) -> web.Response:
        who = "unknown"
        try:
            episode = self._episode(request)
            who = episode.session.episode_id
            return await _answer(shape, episode, request)
        except Refusal as refusal:
            log.info("episode %s: a request is answered %d %s", who, refusal.status, refusal.code)
            response = web.json_response(shape.error(refusal), status=refusal.status)
            if refusal.status in (408, 413):
                response.force_close()
            return response

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._episode(request)
        except Refusal as refusal:
            return web.json_response(chat_completions.error(refusal), status=refusal.status)
        return web.json_response(chat_completions.models())

    def _episode(self, request: web.Request) -> OpenEpisode:
        """The episode of a request that knows its secret; one that does not exist looks like a wrong key."""
        episode = self._episodes.get(request.match_info["episode"])
        secret = episode.endpoint.secret if episode else secrets.token_urlsafe(24)
        given = (request.headers.get("x-api-key", ""), request.headers.get("Authorization", "").removeprefix("Bearer "))
        known = [hmac.compare_digest(key.encode(errors="replace"), secret.encode()) for key in given]
        if episode is None or not any(known):
            raise Refusal(401, "unknown episode or wrong key", "wrong_key")
        return episode


async def _answer(shape: Shape, episode: OpenEpisode, request: web.Request) -> web.Response:
    if episode.in_flight >= IN_FLIGHT:
        raise Refusal(429, f"{IN_FLIGHT} requests of this episode are running", "too_many_requests")
    episode.in_flight += 1
    try:
        raw = await _body(request)
        if len(raw) < LARGE:
            call = shape.parse(decode(raw))
        else:
            call = await asyncio.to_thread(lambda: shape.parse(decode(raw)))
        reply = await episode.complete(call)
    finally:
        episode.in_flight -= 1
    stamp = Stamp(secrets.token_hex(12), int(time.time()))
    if not call.stream:
        return web.json_response(shape.answer(reply, call, stamp))
    body = b"".join(shape.events(reply, call, stamp))
    return web.Response(body=body, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _body(request: web.Request) -> bytes:
    """The body within the limits of size and time. Raises `Refusal`."""
    try:
        if (request.content_length or 0) > BODY_LIMIT:
            raise web.HTTPRequestEntityTooLarge(BODY_LIMIT)
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, f"the body is over {BODY_LIMIT} bytes", "too_large") from None
    except web.RequestPayloadError:
        raise bad("the body is not what its headers say") from None
    except ConnectionError:
        raise bad("the client left in its body") from None
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:.0f} s", "timeout") from None


async def _nowhere(request: web.Request) -> web.Response:
    routes = "POST /v1/chat/completions, /v1/responses, /v1/messages; GET /v1/models"
    refusal = Refusal(404, f"no such route; there are: {routes}, behind an episode's URL", "no_route")
    return web.json_response(chat_completions.error(refusal), status=404)
