"""One vLLM server as `VllmEngine` uses it: streamed generations, and updates in steps that each have a time limit.

Flows in: a request and the `Stream` to fill; a `Policy` to load. Flows out: events; a server that is paused, loaded or resumed,
or an error. The answers' exactness is `stream.py`'s business, the order among replicas `vllm.py`'s.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp

from harness.engines.http import HttpEngine
from harness.engines.load import Load, read_load
from harness.engines.stream import Lost, Mislabelled, Stream
from harness.engines.wire import GENERATE, generate_body
from harness.errors import EngineError
from harness.protocols import GenerateRequest

HEALTH_S = 30.0
TOKENS_PER_EVENT = 8
"""Events cost both sides time; of a generation that is lost, one event less may be continued."""
KvMode = Literal["keep", "recompute"]


class ReplicaHandle(Protocol):
    """A server that somebody can start again; its `url` may be another one afterwards."""

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    async def restart(self) -> None:
        """End it and start it again, until it is healthy and labelled. Raises `SaoError`."""
        ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. The clocks of a generation stand still while its replica is paused; `total_s` does not."""

    connect_s: float = 10.0
    first_token_s: float = 1_800.0
    """A request may queue in the server, and a long prompt takes its time."""
    between_tokens_s: float = 300.0
    total_s: float = 7_200.0
    """One `generate`, with the wait for a place and every further attempt."""
    control_s: float = 60.0
    """Pause, start, resume, metrics."""
    update_s: float = 900.0
    """Reading the weights; putting them in force."""
    restart_s: float = 1_800.0
    """A lost replica's return."""


class Weights(Protocol):
    """Published weights (`vllm_transfer.py`), to be had by any server at any time while they are kept."""

    async def deliver(self, server: VllmReplica) -> None:
        """The server, which has an update open, has received all of them when this returns. Raises `EngineError`."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights and their label."""

    weights: Weights
    version: int


class VllmReplica(HttpEngine):
    """A client of one server. `version` is what it was last made to serve."""

    def __init__(self, server: str | ReplicaHandle, version: int, kv: KvMode, deadlines: Deadlines) -> None:
        url = server if isinstance(server, str) else server.url
        super().__init__(url, request_s=deadlines.first_token_s, connect_s=deadlines.connect_s)
        self.handle = None if isinstance(server, str) else server
        self.version = version
        self._clear_cache = "true" if kv == "recompute" else "false"
        self.deadlines = deadlines
        self._streams: set[Stream] = set()

    # --- generations ---

    def open(self) -> Stream:
        """An attempt on this replica; from here on updates are noted in it."""
        stream = Stream(self.version)
        self._streams.add(stream)
        return stream

    def shut(self, stream: Stream) -> None:
        """The attempt is over."""
        self._streams.discard(stream)

    async def stream(self, request: GenerateRequest, stream: Stream) -> None:
        """Receive until the server has finished. Cancelled or failed, the connection is closed, which makes the server abort.

        Raises `Lost` where another attempt may help, `EngineError` where not.
        """
        body = generate_body(request) | {
            "stream": True,
            "cache_salt": f"policy-{stream.labels[0]}",
            "request_id": f"{request.request_id}#{uuid.uuid4().hex}",
        }
        body["sampling_params"]["ignore_eos"] = True  # only the request's own stop tokens end it
        body["sampling_params"]["stream_interval"] = TOKENS_PER_EVENT
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.deadlines.connect_s)
        try:
            async with (
                stream.timed(self.deadlines.first_token_s),
                self.session.post(self.url + GENERATE, json=body, timeout=timeout) as response,
            ):
                await self._receive(response, stream)
        except (aiohttp.ClientError, TimeoutError, Lost) as error:
            if stream.finish is None:  # once finished, how the connection ends says nothing
                raise Lost(f"{self.url}: {error!r}", hung=isinstance(error, Lost) and error.hung) from error
        if stream.finish is None:
            raise Lost(f"{self.url}: the stream ended unfinished after {len(stream.ids)} tokens")

    async def _receive(self, response: aiohttp.ClientResponse, stream: Stream) -> None:
        if response.status != 200:
            text = f"{self.url}: HTTP {response.status}: {(await response.text())[:500]}"
            raise Lost(text) if response.status >= 500 else EngineError(text)
        rest = b""
        async for piece in response.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    stream.take(line[5:].strip())
            if lines:
                stream.allow(self.deadlines.between_tokens_s)

    # --- updates ---

    async def load(self, policy: Policy) -> None:
        """Pause, start, update, finish: loaded, labelled, still paused. Raises `EngineError` and is paused or unreachable."""
        for stream in self._streams:
            stream.freeze()
        brief, long = self.deadlines.control_s, self.deadlines.update_s
        await self._text("POST", f"/pause?mode=keep&clear_cache={self._clear_cache}", None, brief)
        await self._text("POST", "/start_weight_update", None, brief)
        await policy.weights.deliver(self)
        await self._text("POST", "/finish_weight_update", {"weight_version": str(policy.version)}, long)
        self.version = policy.version
        for stream in self._streams:
            stream.labels.append(policy.version)

    async def workers(self) -> int:
        """How many of them take part in a broadcast."""
        answer = await self._call("GET", "/get_world_size", None, self.deadlines.control_s)
        try:
            return int(answer["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/get_world_size: {error!r}", hint="is it a vLLM with our plug-in?") from error

    async def meet(self, info: dict[str, Any]) -> None:
        """Let all workers come to a trainer's meeting."""
        await self._text("POST", "/init_weight_transfer_engine", {"init_info": info}, self.deadlines.control_s)

    async def receive(self, info: dict[str, Any]) -> None:
        """Let the server take these weights, within an open update."""
        await self._text("POST", "/update_weights", {"update_info": info}, self.deadlines.update_s)

    async def resume(self) -> None:
        """Go on, with running requests too."""
        await self._text("POST", "/resume", None, self.deadlines.control_s)
        for stream in self._streams:
            stream.thaw(self.deadlines.first_token_s)

    async def sleep(self) -> None:
        """Weights to the host's memory, keys and values away, nothing runs."""
        await self._text("POST", "/sleep?level=1&mode=wait", None, self.deadlines.control_s)

    async def wake(self) -> None:
        """Weights back."""
        await self._text("POST", "/wake_up", None, self.deadlines.update_s)

    def cut(self, trusted: bool) -> None:
        """End every attempt here: the replica is taken out. Not `trusted`: nobody knows which weights it had."""
        for stream in self._streams:
            stream.give_up(trusted)

    # --- state ---

    async def healthy(self) -> bool:
        """Whether the server says so, soon."""
        try:
            await self._text("GET", "/health", None, HEALTH_S)
        except EngineError:
            return False
        return True

    async def check_label(self) -> None:
        """Raise `Mislabelled` unless the server names the version that it was made to serve."""
        label = (await self._call("GET", "/weight_info", None, self.deadlines.control_s)).get("weight_version")
        if label != str(self.version):
            raise Mislabelled(f"{self.url} serves version {label!r}, not {self.version}")

    async def load_figures(self) -> Load:
        """How busy it is now."""
        return read_load(await self._text("GET", "/metrics", None, self.deadlines.control_s))

    async def restart(self) -> None:
        """Start the server again, if it can be; else it must come back by itself."""
        if self.handle is not None:
            async with asyncio.timeout(self.deadlines.restart_s):
                await self.handle.restart()
            self.url = self.handle.url.rstrip("/")
