"""The embedded engine as its own process: `python -m trainer.engine.server MODEL`. The HTTP contract is in `docs/engine.md`.

Flows in: requests of token ids, weight files. Flows out: tokens with log-probs and version spans; on standard output one JSON
line with the port. It ends when standard input closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from harness.errors import ConfigError
from trainer.engine.core import EngineCore, Sequence
from trainer.model import build_policy
from trainer.weights import read_file

BODY_LIMIT = 64 * 1024**2
HONOURED = {"max_tokens", "temperature", "stop_token_ids", "seed", "prompt_logprobs", "logprobs", "detokenize"}
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters that are taken only at this value or as null; any other one must be absent or null."""


class Server:
    """HTTP around an `EngineCore`; all of it runs in one thread, one engine step at a time."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.seed = seed
        self.requests = 0
        self.paused = False
        self.pending: dict[str, torch.Tensor] | None = None
        self.failed = False
        self.work = asyncio.Event()
        self.busy_s = 0.0
        self.started = time.monotonic()
        self.tokens = 0

    def app(self) -> web.Application:
        """Routes of the contract."""
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_post("/start_weight_update", self.start_update)
        app.router.add_post("/update_weights", self.update)
        app.router.add_post("/finish_weight_update", self.finish_update)
        return app

    async def loop(self) -> None:
        """Step while there is work; handlers run between steps."""
        while True:
            if self.paused or not self.core.busy:
                self.work.clear()
                await self.work.wait()
                continue
            start = time.monotonic()
            self.core.step()
            self.busy_s += time.monotonic() - start
            await asyncio.sleep(0)

    async def health(self, _: web.Request) -> web.Response:
        """200 while alive."""
        return web.json_response({"weight_version": str(self.core.version), "paused": self.paused})

    async def metrics(self, _: web.Request) -> web.Response:
        """Load and time since the start."""
        running, waiting = self.core.load
        up = time.monotonic() - self.started
        return web.json_response(
            {"running": running, "waiting": waiting, "busy_s": self.busy_s, "up_s": up, "generated_tokens": self.tokens}
        )

    async def generate(self, request: web.Request) -> web.Response:
        """Sample a continuation, or score the prompt when `prompt_logprobs` is asked for."""
        try:
            body = await request.json()
            ids = [int(t) for t in body["token_ids"]]
            params = dict(body["sampling_params"])
            for name, value in params.items():
                if name not in HONOURED and value is not None and value != NEUTRAL.get(name):
                    raise ValueError(f"this engine does not honour {name}={value}")
            if params.get("prompt_logprobs") is not None:
                return web.json_response(self._scored(ids))
            self.requests += 1
            seed = params.get("seed")
            future: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
            sequence = Sequence(
                tokens=ids,
                max_tokens=int(params["max_tokens"]),
                stop=frozenset(int(t) for t in params.get("stop_token_ids", ())),
                temperature=float(params.get("temperature", 1.0)),
                rng=random.Random(seed if seed is not None else f"{self.seed}/{self.requests}"),
                done=lambda s: None if future.done() else future.set_result(s),
            )
            self.core.submit(sequence)
        except (KeyError, TypeError, ValueError) as error:
            return web.json_response({"error": {"message": f"bad request: {error!r}"}}, status=400)
        self.work.set()
        try:
            await future
        finally:
            sequence.aborted = sequence.finish is None
        self.tokens += len(sequence.logprobs)
        used = {"temperature": sequence.temperature, **NEUTRAL}
        return web.json_response({"choices": [_choice(sequence)], "sampling": used})

    def _scored(self, ids: list[int]) -> dict[str, Any]:
        logprobs = self.core.score(ids)
        rows = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], logprobs, strict=True)]
        return {"choices": [], "prompt_logprobs": [None, *rows], "weight_version": str(self.core.version)}

    async def pause(self, _: web.Request) -> web.Response:
        """Stop after the current step; running sequences stay where they are."""
        self.paused = True
        return web.json_response({"paused": True})

    async def resume(self, _: web.Request) -> web.Response:
        """Go on. Refused in the middle of an update or after a failed one."""
        if self.pending is not None or self.failed:
            return web.json_response({"error": {"message": "a weight update is unfinished or failed"}}, status=409)
        self.paused = False
        self.work.set()
        return web.json_response({"paused": False})

    async def start_update(self, _: web.Request) -> web.Response:
        """Open an update; only while paused."""
        if not self.paused:
            return web.json_response({"error": {"message": "pause first"}}, status=409)
        self.pending, self.failed = {}, True
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """Read a safetensors file, checked against its sha256."""
        if self.pending is None:
            return web.json_response({"error": {"message": "start an update first"}}, status=409)
        info = (await request.json())["update_info"]
        try:
            self.pending |= await asyncio.to_thread(read_file, Path(info["path"]), info.get("sha256"))
        except (ConfigError, OSError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return web.json_response({})

    async def finish_update(self, request: web.Request) -> web.Response:
        """Copy the weights in and take the new version label."""
        if self.pending is None:
            return web.json_response({"error": {"message": "start an update first"}}, status=409)
        version = int((await request.json())["weight_version"])
        try:
            self.core.set_weights(self.pending, version)
        except ConfigError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        self.pending, self.failed = None, False
        return web.json_response({"weight_version": str(version)})


def _choice(sequence: Sequence) -> dict[str, Any]:
    ids = sequence.tokens[sequence.prompt :]
    spans, at = [], 0
    for version, group in groupby(sequence.versions):
        count = len(list(group))
        spans.append({"version": str(version), "start": at, "end": at + count})
        at += count
    content = [{"token_id": t, "logprob": p} for t, p in zip(ids, sequence.logprobs, strict=True)]
    return {
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": sequence.finish,
        "weight_versions": spans,
    }


async def serve(args: argparse.Namespace) -> None:
    """Load the model, announce the port, serve until standard input closes."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # of the noise
    model = build_policy(Path(args.model)).model
    server = Server(EngineCore(model, args.slots, args.max_len, args.version, args.noise), args.seed)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", args.port)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    print(json.dumps({"port": port}), flush=True)
    closed = asyncio.Event()
    # A daemon thread on the bare descriptor: an executor's thread would keep a crashed engine from ending.
    threading.Thread(target=_watch_stdin, args=(asyncio.get_running_loop(), closed), daemon=True).start()
    engine = asyncio.create_task(server.loop())
    await asyncio.wait([asyncio.create_task(closed.wait()), engine], return_when=asyncio.FIRST_COMPLETED)
    engine.cancel()
    await runner.cleanup()
    if engine.done() and not engine.cancelled() and (error := engine.exception()):
        raise error


def _watch_stdin(loop: asyncio.AbstractEventLoop, closed: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is gone already
        loop.call_soon_threadsafe(closed.set)


def main() -> None:
    """Command line of the engine process."""
    parser = argparse.ArgumentParser(description="embedded engine")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--version", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0)
    try:
        asyncio.run(serve(parser.parse_args()))
    except ConfigError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
