"""Runs inside vLLM's API server: the order of a weight update, as `docs/engine.md` has it, kept by the server itself; a secret.

vLLM resumes whenever it is asked, also in the middle of an update, and after an error drops the connection. Loaded through
`--middleware sao_routes.UpdateOrder`; flows in: every request; flows out: the same request, HTTP 409 or 400 for one that is
out of order, HTTP 500 with the worker's own words for an update that failed. Standard library only.
"""

import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LABEL = "/update_weight_version"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
STEPS = ("/init_weight_transfer_engine", "/collective_rpc", START, UPDATE, FINISH)
"""Requests that the workers carry out."""
_WORKER = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)


class UpdateOrder:
    """ASGI middleware: pause, start, update, finish, resume. After a failed or unfinished update only a complete one helps."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.labelled = False
        """Whoever has started the server is done with it when he has said which version it serves."""
        self.paused = False
        self.unfinished = False

    def refusal(self, route: str) -> str | None:
        """Why a request to `route` may not pass now."""
        if route == "/pause" and not self.labelled:
            return "the server is still being started"
        if route == "/resume" and self.unfinished:
            return "a weight update is unfinished or failed"
        if route == START and not self.paused:
            return "pause first"
        if route in (UPDATE, FINISH) and not self.unfinished:
            return "start an update first"
        return None

    def passed(self, route: str) -> None:
        """Take note of a request that vLLM answered with 200."""
        if route == LABEL:
            self.labelled = True
        elif route == "/pause":
            self.paused = True
        elif route == "/resume":
            self.paused = False
        elif route == FINISH:
            self.unfinished = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        route = scope.get("path", "")
        if scope["type"] != "http" or scope.get("method") != "POST" or route not in (*STEPS, LABEL, "/pause", "/resume"):
            return await self.app(scope, receive, send)
        if reason := self.refusal(route):
            return await answer(send, 409, reason)
        if route == START:
            self.unfinished = True
        if route == FINISH:
            body = await read_body(receive)
            if not names_version(body):
                return await answer(send, 400, "weight_version must be the new version, digits in a string")
            receive = replay(body, receive)
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if message["status"] == 200:
                    self.passed(route)
            await send(message)

        try:
            await self.app(scope, receive, note)
        except Exception as error:  # vLLM would answer it too, and then close the connection
            if started or route not in STEPS:
                raise
            match = _WORKER.search(str(error))
            await answer(send, 500, match[1] if match else str(error))


class Secret:
    """ASGI middleware, outermost: every route but /health wants the key of VLLM_API_KEY, if there is one.

    vLLM's own check spares the routes that replace weights.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        key = os.environ.get("VLLM_API_KEY")
        self.expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if self.expected is not None and scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                return await answer(send, 401, "this server wants a key: set VLLM_API_KEY")
        return await self.app(scope, receive, send)


def names_version(body: bytes) -> bool:
    """True if the body of a finish request names a version: without one the old label would stay on new weights."""
    try:
        version = json.loads(body)["weight_version"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(version, str) and version.isascii() and version.isdigit()


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request; what has come if the client is gone."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body once more, then what comes after it."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def answer(send: Send, status: int, reason: str) -> None:
    """An error in the shape of vLLM's own."""
    body = json.dumps({"error": {"message": reason, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
