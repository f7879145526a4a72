"""How published weights get into one vLLM server that has an update open: as a file, or sent by the trainer.

Flows in: what the trainer has published. Flows out: a server that has all of it, or an `EngineError` within its limits, after
which everything can be done once more. Which way a run takes is chosen from what both sides have (`choose`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from harness.engines.vllm_launch import VllmServer
from harness.engines.vllm_plugin.sao_address import facing
from harness.engines.vllm_replica import VllmReplica, Weights
from harness.errors import ConfigError, EngineError
from harness.learner import Learner

Backend = Literal["gloo", "nccl"]
Transfer = Literal["disk", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file that the server can read."""

    path: Path
    sha256: str | None

    async def deliver(self, server: VllmReplica) -> None:
        """The server reads it."""
        await server.receive({"path": str(self.path), "sha256": self.sha256})


class Sender:
    """The trainer as a sender over `backend`, to one server at a time."""

    def __init__(self, learner: Learner, backend: Backend) -> None:
        self._learner, self._backend = learner, backend
        self._ports: dict[str, int] = {}
        """By the address of this machine at which the trainer listens."""
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    def weights(self, version: int, announced: dict[str, Any]) -> Weights:
        """A version that the trainer has published. Over NCCL no digest of its bytes can be checked."""
        return _Broadcast(self, version, announced | ({"sha256": None} if self._backend == "nccl" else {}))

    async def send(self, version: int, announced: dict[str, Any], server: VllmReplica) -> None:
        """Bring the server and the trainer together, once the trainer has time. Raises `EngineError`, `LearnerError`.

        Each side has limits of its own, shorter than those of whoever waits for it.
        """
        step_s, whole_s = server.deadlines.control_s / 2, server.deadlines.update_s / 2
        world = 1 + await server.workers()
        address = await _facing(server.url)
        if address not in self._ports:
            self._ports[address] = (await asyncio.shield(self._call("listen", address=address)))["port"]
        meeting, begun = uuid.uuid4().hex, asyncio.Event()
        how = {"meeting": meeting, "world": world, "backend": self._backend, "step_s": step_s, "whole_s": whole_s}
        limit_s = 4 * step_s + whole_s
        sending = self._call("send", limit_s, begun=begun, address=address, version=version, **how)
        sending.add_done_callback(lambda _: begun.set())
        try:
            await begun.wait()
        except asyncio.CancelledError:
            if not begun.is_set():
                sending.cancel()
            raise
        if sending.done():
            sending.result()
        place = {"master_address": address, "master_port": self._ports[address], "meeting": meeting}
        try:
            await server.meet(place | {"world_size": world, "backend": self._backend, "timeout_s": step_s})
            await server.receive(announced | {"step_s": step_s, "whole_s": whole_s})
        except EngineError as error:
            failed = (await asyncio.shield(sending))["failed"]
            raise EngineError(f"{error.message}; the trainer: {failed or 'everything was sent'}", hint=error.hint) from error
        if (failed := (await asyncio.shield(sending))["failed"]) is not None:
            raise EngineError(f"the trainer could not send version {version} to {server.url}: {failed}", hint="see both logs")

    def _call(self, command: str, timeout_s: float = 600.0, **arguments: Any) -> asyncio.Task[dict[str, Any]]:
        """A command in a task of its own: who waits may be cancelled, but a command that is broken off costs the trainer."""
        task = asyncio.create_task(self._learner.call(command, timeout_s, **arguments))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody is left to ask
        return task


@dataclass(frozen=True, slots=True)
class _Broadcast:
    sender: Sender
    version: int
    announced: dict[str, Any]

    async def deliver(self, server: VllmReplica) -> None:
        await self.sender.send(self.version, self.announced, server)


def choose(description: VllmServer, urls: Sequence[str], device: str) -> Transfer:
    """The way of a run whose trainer computes on `device`; no `urls`: it starts the servers itself.

    Raises `ConfigError` where the way that was asked for does not exist.
    """
    cuda = device.startswith("cuda") and description.platform == "cuda"
    if description.weight_transfer == "nccl" and not cuda:
        raise ConfigError(
            f"`engine.vllm.server.weight_transfer` = 'nccl' needs CUDA on both sides, but the trainer is on {device}",
            hint="drop it, or set it to disk or gloo",
        )
    if description.weight_transfer != "auto":
        return description.weight_transfer
    if cuda:
        return "nccl"
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return "gloo" if any(host != "localhost" and not host.startswith("127.") and host != "::1" for host in hosts) else "disk"


async def _facing(url: str) -> str:
    """This machine's address (IPv4) on the way to a server. No packet is sent."""
    parts = urlsplit(url)
    try:
        return await asyncio.to_thread(facing, parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise EngineError(f"there is no way (IPv4) to {url}: {error}", hint="check engine.url") from error
