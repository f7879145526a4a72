"""A vLLM server that is none: the routes over real sockets, tokens from a function, faults on command.

The token at a position is a function of the token before it, the position and the weights' version: whoever loses a token, has
one twice, or labels one wrongly, is found out token by token (`check`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from harness.errors import LearnerError

VOCABULARY = 1_000
STOP = 7
WORKERS = 2
"""Of each server."""
STEPS = ("start_weight_update", "init_weight_transfer_engine", "update_weights", "finish_weight_update")
Events = Callable[[int, list[dict[str, Any]]], list[bytes]]
"""(number of the token in the answer, its events) -> what is really sent."""


def token_at(before: int, position: int, version: int) -> int:
    """What is "sampled" after `before` at this position of the whole text."""
    return (before * 31 + position * 7_919 + version * 104_729 + 17) % VOCABULARY


def logprob_at(token: int, version: int) -> float:
    """Its log-prob."""
    return -0.001 * (token % 89) - 0.1 * (version % 7) - 0.01


def check(prompt: list[int], generation: Any, max_tokens: int) -> None:
    """Every token, log-prob and version is what the function says, and the end is where it should be."""
    text = list(prompt)
    for token, logprob, version in zip(generation.token_ids, generation.logprobs, generation.versions, strict=True):
        assert token == token_at(text[-1], len(text), version), f"token {len(text) - len(prompt)} of version {version}"
        assert logprob == logprob_at(token, version)
        text.append(token)
    sampled = text[len(prompt) :]
    assert STOP not in sampled[:-1]
    assert generation.finish_reason == ("stop" if sampled[-1] == STOP else "length")
    assert sampled[-1] == STOP or len(sampled) == max_tokens
    assert generation.versions == sorted(generation.versions)


class FakeReplica:
    """One server. Everything a test may set is public; it holds nothing back between `restart`s but the faults."""

    def __init__(self, name: int = 0, calls: list[tuple[int, str]] | None = None, version: int = 0) -> None:
        self.name, self.first = name, version
        self.port = 0
        self.requests: list[dict[str, Any]] = []
        """Bodies of generate, in the order of their arrival."""
        self.calls = [] if calls is None else calls
        """Control calls with their arguments, of all replicas that share the list."""
        self.starts = 0
        self.aborted = 0
        self.running = 0
        # faults
        self.die_at: list[int] = []
        """One entry per death: the process dies after having sent so many tokens of one answer."""
        self.stall_at: int | None = None
        """Nothing comes after so many tokens of an answer."""
        self.endless = False
        """The last event is not followed by the end of the answer."""
        self.hold_at: int | None = None
        """Wait for `released` after so many tokens."""
        self.released = asyncio.Event()
        self.spoil: Events | None = None
        self.refuse: tuple[int, str] | None = None
        """Status and text of every generate."""
        self.failing: Counter[str] = Counter()
        """Route -> so many further calls are answered with 500."""
        self.hanging: Counter[str] = Counter()
        self.dying: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = {}
        """Route -> its calls wait for this."""
        self.lying_label: str | None = None
        self.load: dict[str, float] = {}
        """Figures of /metrics, over the true ones."""
        self.off = 0.0
        """Added to every score."""
        self.restartable = True
        self.trainer: FakeTrainer | None = None
        """Who may broadcast to it."""
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens; another port after each start."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """A new process: the start-up weights, nothing paused."""
        self.starts += 1
        self.weights = self.first
        self.label = str(self.first)
        self.paused = self.started = self.broken = False
        self.pending: int | None = None
        self.room: Room | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.updated = asyncio.Event()
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/inference/v1/generate", self._generate)
        for route in ("pause", "resume", "sleep", "wake_up", *STEPS):
            app.router.add_post(f"/{route}", self._control)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port if self.starts > 1 and not self.restartable else 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def restart(self) -> None:
        """As a launcher does it."""
        if not self.restartable:
            raise OSError("no memory for another process")
        await self.kill()
        await self.start()

    async def kill(self) -> None:
        """SIGKILL: every connection is gone, half an answer or not."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for site in list(runner.sites):
            site._server.close()  # type: ignore[attr-defined]
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self._runner is not None

    def _die(self) -> None:
        asyncio.get_running_loop().create_task(self.kill())

    # --- generate ---

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refuse is not None:
            status, text = self.refuse
            return web.json_response({"error": {"message": text}}, status=status)
        if body["sampling_params"].get("prompt_logprobs") is not None:
            return self._scores(body["token_ids"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._stream(body, response)
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return response

    def _scores(self, ids: list[int]) -> web.Response:
        rows = [{str(token): {"logprob": logprob_at(token, self.weights) + self.off}} for token in ids[1:]]
        return web.json_response({"choices": [], "prompt_logprobs": [None, *rows]})

    async def _stream(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        text, params = list(body["token_ids"]), body["sampling_params"]
        assert body["stream"] and params["logprobs"] == 0 and params["ignore_eos"]
        spans: list[dict[str, Any]] = []
        finish, n = None, 0
        while finish is None:
            if n == self.stall_at:
                await asyncio.Event().wait()
            if n == self.hold_at:
                await self.released.wait()
            if n in self.die_at:
                self.die_at.remove(n)
                self._die()
                await asyncio.Event().wait()
            await self.go.wait()
            token = token_at(text[-1], len(text), self.weights)
            text.append(token)
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": n, "end": n})
            n += 1
            spans[-1]["end"] = n
            finish = "stop" if token in params["stop_token_ids"] else "length" if n == params["max_tokens"] else None
            content = [{"token_id": token, "logprob": logprob_at(token, self.weights), "rank": 1, "top_logprobs": []}]
            choice = {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": content},
                "finish_reason": finish,
                "weight_versions": self._labelled(spans) if finish else None,
            }
            events = [{"request_id": body["request_id"], "choices": [choice]}]
            pieces = self.spoil(n, events) if self.spoil else list(map(event, events))
            for piece in pieces:
                await response.write(piece)
            if not pieces:
                break
            await asyncio.sleep(0)
        if self.endless:
            await asyncio.Event().wait()
        await response.write(b"data: [DONE]\n\n")

    def _labelled(self, spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [span if self.lying_label is None else span | {"version": self.lying_label} for span in spans]

    # --- control ---

    async def _control(self, request: web.Request) -> web.Response:
        route = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append((self.name, request.path_qs))
        if self.dying[route]:
            self.dying[route] -= 1
            self._die()
            await asyncio.Event().wait()
        if self.hanging[route]:
            self.hanging[route] -= 1
            await asyncio.Event().wait()
        if self.failing[route]:
            self.failing[route] -= 1
            self.broken = self.broken or self.started
            return web.json_response({"error": "it broke"}, status=500)
        if route in self.gates:
            await self.gates[route].wait()
        return await getattr(self, route.removeprefix("/"))(body)  # type: ignore[no-any-return]

    async def pause(self, _: dict[str, Any]) -> web.Response:
        """Not one token more."""
        self.paused = True
        self.go.clear()
        return web.json_response({"status": "paused"})

    async def start_weight_update(self, _: dict[str, Any]) -> web.Response:
        """From here on only a whole update makes it usable."""
        self.started = self.broken = True
        self.pending = None
        return web.json_response({})

    async def init_weight_transfer_engine(self, body: dict[str, Any]) -> web.Response:
        """Come to a meeting; within its limit the trainer must be there too."""
        assert self.trainer is not None
        told = body["init_info"]
        self.room = self.trainer.room(told)
        self.room.came.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(told["timeout_s"]):
                await self.room.opened.wait()
                return web.json_response({})
        return web.json_response({"error": "no trainer came"}, status=500)

    async def update_weights(self, body: dict[str, Any]) -> web.Response:
        """The file's name is the weights' version (v12.safetensors), or it comes from the trainer that was met."""
        if not self.started:
            return web.json_response({"error": "start first"}, status=500)
        info = body["update_info"]
        self.pending = int(Path(info["path"]).stem.removeprefix("v")) if "path" in info else await self._broadcast(info)
        if self.pending is None:
            return web.json_response({"error": "the broadcast broke off"}, status=500)
        return web.json_response({})

    async def _broadcast(self, info: dict[str, Any]) -> int | None:
        """The version whose bytes came, if they are what was announced."""
        room, self.room = self.room, None
        assert room is not None, "no trainer was met"
        with suppress(TimeoutError):
            async with asyncio.timeout(info["whole_s"]):
                version = await room.content
                room.taken.set()
                if version is None:
                    return None
                told = {name: info[name] for name in announced(version)}
                return version if told == announced(version) | ({"sha256": None} if room.backend == "nccl" else {}) else None
        return None

    async def finish_weight_update(self, body: dict[str, Any]) -> web.Response:
        """In force."""
        if self.pending is None:
            return web.json_response({"error": "nothing was loaded"}, status=500)
        self.weights, self.label = self.pending, body["weight_version"]
        self.started = self.broken = False
        self.updated.set()
        return web.json_response({})

    async def sleep(self, _: dict[str, Any]) -> web.Response:
        """Nothing runs."""
        return await self.pause({})

    async def wake_up(self, _: dict[str, Any]) -> web.Response:
        """Goes on."""
        return await self.resume({})

    async def resume(self, _: dict[str, Any]) -> web.Response:
        """After a failed update that is the end of a real server."""
        if self.broken:
            self._die()
            await asyncio.Event().wait()
        self.paused = False
        self.go.set()
        return web.json_response({})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": WORKERS})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        figures = {
            "num_requests_running": float(self.running),
            "num_requests_waiting": 0.0,
            "kv_cache_usage_perc": 0.1,
            "prefix_cache_hits_total": 30.0,
            "prefix_cache_queries_total": 40.0,
            "num_preemptions_total": 1.0,
            "generation_tokens_total": 100.0,
        } | self.load
        lines = ["# HELP vllm:num_requests_running Requests.", "process_cpu_seconds_total 4.5"]
        lines += [f'vllm:{name}{{engine="0",model_name="policy {{x}}"}} {value}' for name, value in figures.items()]
        lines += ['vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0']
        return web.Response(text="\n".join(lines) + "\n")


class Room:
    """A meeting of a fake trainer with one replica."""

    def __init__(self) -> None:
        self.backend = ""
        self.came, self.opened, self.taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.content: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """The version that is sent; None if it breaks off."""


def announced(version: int) -> dict[str, Any]:
    """What a trainer says of its snapshot."""
    return {"names": ["w"], "dtype_names": ["float32"], "shapes": [[version]], "sha256": f"digest of {version}"}


class FakeTrainer:
    """A `Learner` with snapshots: one command at a time, of no more use once one was broken off."""

    PORT = 7_001

    def __init__(self, *kept: int) -> None:
        self.kept = set(kept)
        self.lock = asyncio.Lock()
        self.broken = self.dead = False
        self.sent: list[int] = []
        """Versions, also of sendings that failed."""
        self.faults: list[str | None] = []
        """Of the next sendings: `absent`, `breaks`, `other bytes`, or none."""
        self.rooms: dict[str, Room] = {}

    def room(self, told: dict[str, Any]) -> Room:
        """Of the meeting that a replica was told of."""
        assert (told["master_address"], told["master_port"], told["world_size"]) == ("127.0.0.1", self.PORT, 1 + WORKERS)
        return self.rooms.setdefault(told["meeting"], Room())

    async def call(
        self, command: str, timeout_s: float = 3_600.0, *, begun: asyncio.Event | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """As `Learner.call`."""
        async with self.lock:
            if self.broken or self.dead:
                raise LearnerError("the trainer died")
            if begun is not None:
                begun.set()
            try:
                async with asyncio.timeout(timeout_s):
                    return await getattr(self, command)(**arguments)  # type: ignore[no-any-return]
            except BaseException:
                self.broken = True
                raise

    async def listen(self, address: str) -> dict[str, Any]:
        """One door."""
        assert address == "127.0.0.1"
        return {"port": self.PORT}

    async def send(
        self, address: str, version: int, meeting: str, world: int, backend: str, step_s: float, whole_s: float
    ) -> dict[str, Any]:
        """As `trainer.worker.Worker.send`."""
        assert address == "127.0.0.1" and world == 1 + WORKERS
        fault = self.faults.pop(0) if self.faults else None
        self.sent.append(version)
        if version not in self.kept or fault == "absent":
            return {"failed": f"version {version} is not kept" if fault is None else fault}
        room = self.rooms.setdefault(meeting, Room())
        room.backend = backend
        room.opened.set()
        try:
            async with asyncio.timeout(step_s):
                await room.came.wait()
            room.content.set_result({"breaks": None, "other bytes": version + 50}.get(fault or "", version))
            async with asyncio.timeout(whole_s):
                await room.taken.wait()
        except TimeoutError:
            return {"failed": "it took too long"}
        return {"failed": fault if fault == "breaks" else None}


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()


async def until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Give the others turns until something is so."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0)


async def with_replicas(n: int, work: Callable[[list[FakeReplica]], Awaitable[None]]) -> None:
    """Run `work` on `n` fresh replicas, within a minute."""
    calls: list[tuple[int, str]] = []
    fakes = [FakeReplica(name, calls) for name in range(n)]
    try:
        for fake in fakes:
            await fake.start()
        await asyncio.wait_for(work(fakes), 60.0)
    finally:
        for fake in fakes:
            await fake.kill()
