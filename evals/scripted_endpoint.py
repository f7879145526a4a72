"""An OpenAI-compatible endpoint that needs no model: it plays an environment's own solver. For demonstrations and tests.

    python -m evals.scripted_endpoint toy_repair --mode random        # prints its URL; key=value words are the environment's

Flows in: chat completions of an agent that opens a task as it is (`tool_loop`). Flows out: what the task's `solver` says at
this place. `perfect` solves every task that its opening tells from those with another solution. `random` solves those episodes
whose seed is `lucky`, and in the others says that it gives up: which ones succeed is known beforehand. It keeps no state of
conversations and asks for no key; a token is a word.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import jinja2
from aiohttp import web

from harness.configfile import overrides
from harness.engines.scripted import Script
from harness.errors import ConfigError, SaoError
from harness.gateway import chat_completions
from harness.gateway.shape import Call, Refusal, Stamp, bad, decode
from harness.kit.play import TEMPLATE
from harness.parsers import hermes
from harness.protocols import Environment, Message, Reply
from harness.registry import environment
from harness.task import Split

Mode = Literal["perfect", "random"]
CHANCE = 0.3
"""Share of the seeds that are lucky."""
GIVES_UP = "I give up."
BODY_LIMIT = 32 * 1024**2

_CHATML = jinja2.Environment(autoescape=False).from_string(TEMPLATE)


def lucky(seed: int) -> bool:
    """Whether `random` solves the episode that was begun with this seed."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4]) < CHANCE * 2**32


class ScriptedEndpoint:
    """Serves one environment on loopback: `async with ScriptedEndpoint(environment) as endpoint`, then `endpoint.url`."""

    def __init__(self, made: Environment, mode: Mode = "perfect", split: Split = "heldout", port: int = 0) -> None:
        """Raises `ConfigError` if the environment has no `solver`."""
        if not hasattr(made, "solver"):
            raise ConfigError(
                "the environment has no `solver` that could be played", hint="take toy_repair, sums, corridor or python_tir"
            )
        self._environment: Any = made
        self._mode, self._port = mode, port
        self._unseen = iter(made.tasks(split))
        self._known: dict[str, Any] = {}
        """Tasks by their openings, as far as they were looked for."""
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_post("/v1/chat/completions", self._post)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on port {self._port}: {error}", hint="take another, or 0 for any") from error
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(chat_completions.models())

    async def _post(self, request: web.Request) -> web.Response:
        try:
            raw = await request.read()
            body = decode(raw)
            call = chat_completions.parse(body)
            reply = self._reply(call, body.get("seed"))
        except Refusal as refusal:
            return web.json_response(chat_completions.error(refusal), status=refusal.status)
        stamp = Stamp(hashlib.sha256(raw).hexdigest()[:24], 0)
        if call.stream:
            events = b"".join(chat_completions.events(reply, call, stamp))
            return web.Response(body=events, content_type="text/event-stream")
        return web.json_response(chat_completions.answer(reply, call, stamp))

    def _reply(self, call: Call, seed: Any) -> Reply:
        task, opening = self._task(call.messages)
        turns = [i for i in range(opening, len(call.messages)) if call.messages[i]["role"] == "assistant"]
        if self._mode == "random" and not isinstance(seed, int):
            raise bad("mode random goes by `seed`, which is missing")
        if self._mode == "perfect" or lucky(seed - len(turns)):  # a session adds 1 with every turn
            text = said(self._environment.solver(task), call.messages, [*turns, len(call.messages)])
        else:
            text = GIVES_UP
        content, calls = hermes(text, len(turns), call.tools)
        prompt = len(json.dumps([call.messages, call.tools]).split())
        return Reply(content, calls, "stop", prompt_tokens=prompt, completion_tokens=len(text.split()))

    def _task(self, messages: Sequence[Message]) -> tuple[Any, int]:
        """The task that the conversation opens, and the messages of its opening. Tasks that open alike must be solved alike."""
        openings = {_name(messages[:n]): n for n in range(1, len(messages) + 1)}
        for name in filter(self._known.__contains__, openings):
            return self._known[name], openings[name]
        for task in self._unseen:
            name = _name(chat_completions.parse({"messages": list(task.messages)}).messages)
            self._known.setdefault(name, task)
            if name in openings:
                return task, openings[name]
        raise bad("no task of this split opens like this; the agent must send a task's messages as they are")


def said(script: Script, messages: Sequence[Message], turns: Sequence[int]) -> str:
    """What a script says in the last of its turns; `turns` are the lengths of the conversation before each of them."""
    texts = [
        script(_CHATML.render(messages=messages[:length], add_generation_prompt=True), random.Random(turn))
        for turn, length in enumerate(turns)
    ]
    return texts[-1]


def _name(messages: Sequence[Message]) -> str:
    return json.dumps(messages, sort_keys=True)


async def _serve(endpoint: ScriptedEndpoint) -> None:
    async with endpoint:
        sys.stdout.write(f"{endpoint.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main(words: Sequence[str]) -> int:
    """Serve until interrupted; 2 with one message for what cannot be served."""
    parser = argparse.ArgumentParser("python -m evals.scripted_endpoint", description="An endpoint that plays a solver.")
    parser.add_argument("environment", help="name of the environment")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="options of the environment")
    parser.add_argument("--mode", choices=get_args(Mode), default="perfect")
    parser.add_argument("--split", choices=get_args(Split), default="heldout")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    args = parser.parse_intermixed_args(words)
    try:
        made = environment({"id": args.environment, **overrides(args.settings)})
        asyncio.run(_serve(ScriptedEndpoint(made, args.mode, args.split, args.port)))
    except SaoError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
