"""A web form without a browser: book a table over HTTP. A real server per episode, and what it has stored is the verdict.

The server listens on the loopback of the harness's machine, at any free port, which the agent never sees: paths are enough.
"""

from __future__ import annotations

import html
import random
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from harness.engines.scripted import Script, call, in_turn
from harness.protocols import LiveTask, Sandbox, Tool
from harness.task import Score, Split, Task
from harness.tools import tool

NAMES = {"train": ("Ines", "Jon", "Kim", "Lou"), "heldout": ("Mia", "Noa")}
TASKS, REQUEST_S, MOST_CHARACTERS = 1000, 10.0, 4_000
GUESTS = tuple("12345678")
FORM = """<form method="post" action="/book"><input type="hidden" name="token" value="{token}">
<input name="name"> <input name="guests" type="number" min="1" max="8"> <button>Book</button></form>"""


class WebFormConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seed: int = 0


class WebForm:
    """See the module docstring."""

    Config = WebFormConfig

    def __init__(self, config: WebFormConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """Names are of one split each."""
        return [make_task(split, self.config.seed, index) for index in range(TASKS)]

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Start the server."""
        return await WebFormTask(task).start()

    def solver(self, task: Task) -> Script:
        """Read the form, fill it in, send it."""
        fields = {key: str(value) for key, value in task.data["wanted"].items()} | {"token": task.data["token"]}
        return in_turn(call("get", path="/"), call("post", path="/book", fields=fields))


class WebFormTask:
    def __init__(self, task: Task) -> None:
        self._task, self._bookings = task, list[dict[str, Any]]()
        self.tools: Sequence[Tool] = (tool(self.get), tool(self.post))

    async def start(self) -> WebFormTask:
        """Listen."""
        application = web.Application()
        application.add_routes((web.get("/", self._form), web.post("/book", self._book)))
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self._client = aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(REQUEST_S))
        return self

    async def get(self, path: Annotated[str, "for example /"]) -> str:
        """Fetch a page of the restaurant's site."""
        return await self._request("GET", path, None)

    async def post(self, path: str, fields: Annotated[dict[str, str], "values of all inputs, hidden ones too"]) -> str:
        """Send a form to its action."""
        return await self._request("POST", path, fields)

    async def _request(self, method: str, path: str, fields: dict[str, str] | None) -> str:
        if not path.startswith("/") or path.startswith("//"):
            return "error: a path begins with one /"
        try:
            async with self._client.request(method, path, data=fields, allow_redirects=False) as response:
                return f"{response.status}\n{(await response.text())[:MOST_CHARACTERS]}"
        except (ValueError, UnicodeError, aiohttp.ClientError) as error:
            return f"error: {error}"

    async def _form(self, request: web.Request) -> web.Response:
        return web.Response(text=FORM.format(token=self._task.data["token"]), content_type="text/html")

    async def _book(self, request: web.Request) -> web.Response:
        sent = await request.post()
        name, guests = str(sent.get("name", "")), str(sent.get("guests", ""))
        if sent.get("token") != self._task.data["token"]:
            return web.Response(status=403, text="the token is not the form's")
        if not name or guests not in GUESTS:
            return web.Response(status=400, text="a name, and 1 to 8 guests")
        self._bookings.append({"name": name, "guests": int(guests)})
        return web.Response(text=f"Booked for {html.escape(name)}.", content_type="text/html")

    async def score(self) -> Score:
        """1 if the one booking is the wanted one."""
        return Score(float(self._bookings == [self._task.data["wanted"]]))

    async def close(self) -> None:
        """Stop listening."""
        await self._client.close()
        await self._runner.cleanup()


def make_task(split: Split, seed: int, index: int) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"web_form/{split}/{seed}/{index}")
    name, guests = rng.choice(NAMES[split]), rng.randint(1, 8)
    ask = f"Book a table for {guests} under the name {name}. The site's form is at /."
    data = {"wanted": {"name": name, "guests": guests}, "token": f"{rng.getrandbits(64):016x}"}
    return Task(f"web_form/{split}/{seed}/{index}", ({"role": "user", "content": ask},), data)
