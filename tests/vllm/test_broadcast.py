"""The trainer sends weights to a real vLLM over gloo: exact there and back; what breaks off is made up for, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import TrainerConfig
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import Deadlines, VllmReplica
from harness.engines.vllm_transfer import Sender
from harness.errors import EngineError
from harness.learner import Learner
from tests.trainer.support import arm
from tests.vllm.support import PROMPT, TOLERANCE, WAIT_S, Server
from trainer import broadcast
from trainer.broadcast import BroadcastError, Door, Snapshot
from trainer.weights import read_file

pytestmark = pytest.mark.timeout(1_500)


class Trainer:
    """The product's trainer of one rank, and what it is moved to `server` with."""

    def __init__(self, server: Server, learner: Learner) -> None:
        self.server, self.learner = server, learner
        self.sender = Sender(learner, "gloo")

    async def take(self, policy: int) -> dict[str, Any]:
        """Have the trainer publish one of the policies as the next version; what it announces."""
        model = str(self.server.folders[policy])
        await self.learner.call("init", model=model, arm=arm(advantage={"id": "batch_norm"}))
        taken = await self.learner.call("publish", probe=PROMPT, version=self.server.version + 1)
        return dict(taken["announced"])

    async def publish(self, engine: VllmEngine, policy: int, **other: Any) -> float:
        """The whole way; how far the server is from the policy then. `other`: what is announced and not so."""
        announced = await self.take(policy)
        await publish(self.server, engine, self.sender, announced | other)
        return await self.server.distance(policy)


async def publish(server: Server, engine: VllmEngine, sender: Sender, announced: dict[str, Any]) -> None:
    version = server.version + 1
    await engine.publish(sender.weights(version, announced), version)
    server.version = version


@pytest.fixture(scope="module")
def trainer(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    log = tmp_path_factory.mktemp("trainer") / "trainer.log"
    learner = server.run(Learner.launch(log, ranks=1, threads=1, start_s=WAIT_S))
    try:
        server.run(learner.call("setup", trainer=TrainerConfig(dtype="float32").model_dump()))
        yield Trainer(server, learner)
    finally:
        server.run(learner.close())


def with_engine(server: Server, work: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
    """Run `work` on a client of the server that knows nothing of the updates before."""

    async def run() -> Any:
        engine = VllmEngine([server.process.url], server.version)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return server.run(run())


def test_what_the_trainer_sends_is_exact_there_and_back(trainer: Trainer) -> None:
    async def work(engine: VllmEngine) -> list[float]:
        return [await trainer.publish(engine, policy) for policy in (1, 0, 1)]

    assert max(with_engine(trainer.server, work)) < TOLERANCE


def test_a_server_that_falls_out_gets_all_of_it_once_more(trainer: Trainer) -> None:
    async def work(engine: VllmEngine) -> float:
        await trainer.server.plant("break_next_broadcast", 5)
        distance = await trainer.publish(engine, 0)
        assert trainer.learner.idle, "the trainer lives"
        return distance

    assert with_engine(trainer.server, work) < TOLERANCE


def test_other_bytes_than_announced_are_refused_and_a_broadcast_recovers(trainer: Trainer) -> None:
    server = trainer.server

    async def work(engine: VllmEngine) -> float:
        with pytest.raises(EngineError, match="sha256 of what came.*everything was sent"):
            await trainer.publish(engine, 1, sha256="0" * 64)
        with pytest.raises(EngineError, match="409"):
            await server.post("/resume")
        return await trainer.publish(engine, 1)

    assert with_engine(server, work) < TOLERANCE


def test_a_broadcast_without_sha256_is_for_nccl_only_and_nccl_needs_cuda(trainer: Trainer) -> None:
    server = trainer.server

    async def work(engine: VllmEngine) -> float:
        with pytest.raises(EngineError, match="over gloo announces its sha256"):
            await trainer.publish(engine, 1, sha256=None)
        replica = VllmReplica(server.process.url, server.version, "keep", Deadlines())
        place = {"master_address": "127.0.0.1", "master_port": 1, "meeting": "m", "world_size": 2, "backend": "nccl"}
        try:
            assert await replica.workers() == 1
            with pytest.raises(EngineError, match="nccl needs CUDA"):
                await replica.meet(place)
        finally:
            await replica.close()
        return await trainer.publish(engine, 0)

    assert with_engine(server, work) < TOLERANCE


class Unreliable:
    """The trainer's commands in this process: the first `send` ends as `fault` says."""

    def __init__(self, snapshot: Snapshot, fault: Callable[[], None]) -> None:
        self.snapshot, self.fault = snapshot, fault
        self.door = Door("127.0.0.1")
        self.sent: list[str | None] = []

    async def call(self, command: str, timeout_s: float, *, begun: Any = None, version: int = 0, **how: Any) -> dict[str, Any]:
        if command == "listen":
            return {"port": self.door.port}
        begun.set()
        how.pop("address")
        try:
            if not self.sent:
                self.fault()
            await asyncio.to_thread(self.door.send, self.snapshot, **how)
            self.sent.append(None)
        except BroadcastError as error:
            self.sent.append(str(error))
        return {"failed": self.sent[-1]}


@pytest.mark.parametrize("fault", ["it falls out", "it does not come"])
def test_a_trainer_that_falls_out_sends_all_of_it_once_more(
    server: Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = broadcast.Group.broadcast, iter(range(5))

    def falls_out(group: Any, tensor: torch.Tensor, limit_s: float) -> None:
        if next(left, None) is None:
            monkeypatch.setattr(broadcast.Group, "broadcast", real)
            raise RuntimeError("planted: the trainer fell out")
        real(group, tensor, limit_s)

    def does_not_come() -> None:
        raise BroadcastError("planted: it does not come")

    def plant() -> None:
        monkeypatch.setattr(broadcast.Group, "broadcast", falls_out)

    async def work(engine: VllmEngine) -> tuple[float, list[str | None]]:
        target = 1
        snapshot = Snapshot.of(read_file(Path(server.file(target)[0])))
        local = Unreliable(snapshot, plant if fault == "it falls out" else does_not_come)
        await publish(server, engine, Sender(local, "gloo"), snapshot.announced())  # type: ignore[arg-type] # `call` is all
        return await server.distance(target), local.sent

    distance, sent = with_engine(server, work)
    assert distance < TOLERANCE
    assert sent[0] is not None and "planted" in sent[0] and sent[1:] == [None]
