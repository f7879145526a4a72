"""Middleware of the tests, in vLLM's API server: changes sampling parameters on their way, as a server's defaults could.

`POST /plant` with a JSON object says how.
"""

import json
from typing import Any

from sao_routes import App, Message, Receive, Send, answer, read_body, replay


class Sampler:
    """Puts what was planted over the parameters of every generation."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.planted: dict[str, Any] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        route = scope.get("path")
        if route == "/plant":
            self.planted = json.loads(await read_body(receive))
            return await answer(send, 200, "planted")
        if route == "/inference/v1/generate" and self.planted:
            body = json.loads(await read_body(receive))
            body["sampling_params"] |= self.planted
            data = json.dumps(body).encode()
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            scope = scope | {"headers": [*headers, (b"content-length", str(len(data)).encode())]}
            receive = replay(data, receive)
        return await self.app(scope, receive, send)
