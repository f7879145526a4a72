"""Rank 0 sends snapshots to other processes over gloo: all of it, or an error within the limit and nothing lost by it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import TrainerConfig
from harness.engines.vllm_replica import Deadlines
from harness.engines.vllm_transfer import Sender
from harness.errors import ConfigError
from harness.learner import Learner
from tests.trainer import support
from trainer import broadcast
from trainer.broadcast import BroadcastError, Door, Snapshot
from trainer.weights import read_file
from trainer.worker import Worker

pytestmark = pytest.mark.timeout(900)
LONG_S = 300.0
"""A limit that no test is meant to meet."""
BRIEF_S = 2.0
"""A limit that a test waits for."""
STEP = {"sampling": "s", "number": 1, "version": 5, "critic_updates": 0, "update_policy": True, "max_length": 100, "seed": 0}


def snapshot(seed: int = 0) -> Snapshot:
    """Three tensors, the last too large for a socket's buffers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7,), "b.c": (3, 5), "d": (4_000_000,)}
    return Snapshot.of({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


@contextmanager
def receiver(
    port: int,
    announced: dict[str, Any],
    meeting: str,
    *,
    rank: int = 1,
    world: int = 2,
    limit_s: float = LONG_S,
    taken: int = 10**6,
) -> Iterator[subprocess.Popen[str]]:
    """A worker that comes to a meeting."""
    told = [str(port), meeting, str(rank), str(world), str(limit_s), str(taken), json.dumps(announced["shapes"])]
    command = [sys.executable, "-m", "tests.trainer.receiver", *told]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def door() -> Door:
    return Door("127.0.0.1")


def test_the_digest_is_that_of_all_bytes_in_order() -> None:
    made = snapshot()
    assert made.sha256 == hashlib.sha256(b"".join(t.numpy().tobytes() for t in made.tensors.values())).hexdigest()
    assert made.announced() == {
        "names": ["a", "b.c", "d"],
        "dtype_names": ["float32"] * 3,
        "shapes": [[7], [3, 5], [4_000_000]],
        "sha256": made.sha256,
    }


@pytest.mark.parametrize("world", [2, 3])
def test_every_worker_gets_every_byte(door: Door, world: int) -> None:
    made, meeting = snapshot(world), f"all-{world}"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(receiver(door.port, made.announced(), meeting, rank=rank, world=world))
            for rank in range(1, world)
        ]
        door.send(made, meeting, world, "gloo", LONG_S, LONG_S)
        assert list(map(said, workers)) == [made.sha256] * (world - 1)


def test_nobody_comes(door: Door) -> None:
    with pytest.raises(BroadcastError, match="did not come"):
        door.send(snapshot(), "nobody", 2, "gloo", BRIEF_S, LONG_S)
    made = snapshot()
    with receiver(door.port, made.announced(), "after-nobody") as process:
        door.send(made, "after-nobody", 2, "gloo", LONG_S, LONG_S)
        assert said(process) == made.sha256


def test_one_of_two_does_not_come(door: Door) -> None:
    made = snapshot()
    with receiver(door.port, made.announced(), "one", world=3, limit_s=2 * BRIEF_S) as process:
        with pytest.raises(BroadcastError, match="did not come"):
            door.send(made, "one", 3, "gloo", BRIEF_S, LONG_S)
        assert said(process).startswith("broke: "), "and the one that came does not wait for ever"


@pytest.mark.parametrize("taken", [0, 2])
def test_a_worker_that_dies_ends_the_sending_at_once(door: Door, taken: int) -> None:
    made = snapshot()
    meeting = f"dies-{taken}"
    with receiver(door.port, made.announced(), meeting, taken=taken) as process:
        assert process.stdin is not None
        process.stdin.close()
        with pytest.raises(BroadcastError, match=r"broke off after [012] of 3 tensors"):
            door.send(made, meeting, 2, "gloo", LONG_S, LONG_S)
    with receiver(door.port, made.announced(), meeting + "-again") as process:
        door.send(made, meeting + "-again", 2, "gloo", LONG_S, LONG_S)
        assert said(process) == made.sha256


@pytest.mark.parametrize(("step_s", "whole_s"), [(BRIEF_S, LONG_S), (LONG_S, BRIEF_S)])
def test_a_worker_that_stops_taking_is_given_up_in_time(door: Door, step_s: float, whole_s: float) -> None:
    made, meeting = snapshot(), f"stops-{step_s}"
    with receiver(door.port, made.announced(), meeting, taken=2) as process:
        group = broadcast.Group(door._store, meeting, 0, 2, "gloo", door.address, LONG_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broadcast, "Group", lambda *_: group)  # it has come already: its start takes no part of the limit
            with pytest.raises(BroadcastError, match=r"broke off after [0-2] of 3 tensors"):
                door.send(made, meeting, 2, "gloo", step_s, whole_s)
        assert process.poll() is None, "it is not its death that ended it"


def test_a_trainer_that_falls_out_is_noticed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real, left = snapshot(), broadcast.Group.broadcast, iter(range(2))

    def falls_out(group: Any, tensor: torch.Tensor, limit_s: float) -> None:
        if next(left, None) is None:
            raise RuntimeError("planted")
        real(group, tensor, limit_s)

    monkeypatch.setattr(broadcast.Group, "broadcast", falls_out)
    with receiver(door.port, made.announced(), "falls") as process:
        with pytest.raises(BroadcastError, match="after 2 of 3 tensors: planted"):
            door.send(made, "falls", 2, "gloo", LONG_S, LONG_S)
        assert said(process).startswith("broke: ")


def test_a_trainer_that_does_not_come_is_not_waited_for(door: Door) -> None:
    with receiver(door.port, snapshot().announced(), "empty", limit_s=BRIEF_S) as process:
        assert said(process).startswith("broke: ")


def test_the_door_is_open_on_its_own_address_only(door: Door) -> None:
    socket.create_connection((door.address, door.port), timeout=LONG_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", door.port), timeout=LONG_S)


@pytest.mark.usefixtures("rank")
def test_what_is_sent_is_what_was_published(moe: Path, tmp_path: Path) -> None:
    """Not what the trainer has meanwhile made of it; two versions are kept."""
    worker = Worker()
    worker.setup(TrainerConfig(dtype="float32", micro_batch_tokens=64, optimizer=support.optimizer()).model_dump())
    worker.init(str(moe), support.arm(advantage={"id": "batch_norm"}))
    first = worker.publish([1, 2, 3], version=1)
    written = worker.publish([1, 2, 3], version=1, path=str(tmp_path / "v1.safetensors"))
    assert first["probe"] == written["probe"] and "announced" not in written
    paths = []
    for trajectory in support.batch(2, 12):
        paths.append(str(tmp_path / f"{trajectory.episode_id}.parquet"))
        trajectory.save(Path(paths[-1]))
    assert worker.step(paths, **STEP)["stepped"]
    kept = worker.snapshots[1]
    assert support.equal(kept.tensors, read_file(tmp_path / "v1.safetensors"))
    assert Snapshot.of(kept.tensors).announced() == first["announced"]
    assert worker.publish([1, 2, 3], version=2)["announced"]["sha256"] != kept.sha256
    worker.publish([1, 2, 3], version=3)
    assert list(worker.snapshots) == [2, 3]
    how = {"meeting": "m", "world": 2, "backend": "gloo", "step_s": 0.1, "whole_s": 0.1}
    assert worker.send("127.0.0.1", 1, **how) == {"failed": "version 1 is not kept any more"}
    port = worker.listen("127.0.0.1")["port"]
    assert worker.listen("127.0.0.1") == {"port": port}
    assert "did not come" in str(worker.send("127.0.0.1", 2, **how)["failed"])
    with pytest.raises(ConfigError, match="cannot listen at 203.0.113.1"):
        worker.listen("203.0.113.1")


class Server:
    """What a `Sender` needs of a server: a worker in a process of its own comes; or it hangs."""

    url = "http://127.0.0.1:1"

    def __init__(self, control_s: float, hangs: bool = False) -> None:
        self.deadlines = Deadlines(control_s=control_s, update_s=LONG_S)
        self.hangs, self.met = hangs, asyncio.Event()
        self.got = ""

    async def workers(self) -> int:
        return 1

    async def meet(self, info: dict[str, Any]) -> None:
        self.info = info
        self.met.set()
        if self.hangs:
            await asyncio.Event().wait()

    async def receive(self, announced: dict[str, Any]) -> None:
        def run() -> str:
            with receiver(self.info["master_port"], announced, self.info["meeting"]) as process:
                return said(process)

        self.got = await asyncio.to_thread(run)


def test_two_ranks_publish_and_rank_0_sends(moe: Path, tmp_path: Path) -> None:
    """And a sending that was cancelled, or to which nobody came, leaves them as they were."""

    async def test() -> None:
        learner = await Learner.launch(tmp_path / "trainer.log", ranks=2, threads=1, start_s=LONG_S)
        try:
            settings = TrainerConfig(dtype="float32", ranks=2, micro_batch_tokens=64, optimizer=support.optimizer())
            await learner.call("setup", trainer=settings.model_dump())
            await learner.call("init", model=str(moe), arm=support.arm(advantage={"id": "batch_norm"}))
            sender, taken = Sender(learner, "gloo"), await learner.call("publish", probe=[1, 2, 3], version=1)
            path = tmp_path / "v1.safetensors"
            written = await learner.call("publish", probe=[1, 2, 3], version=1, path=str(path))
            assert written["probe"] == taken["probe"]
            tensors, announced = read_file(path), taken["announced"]
            assert sorted(tensors) == sorted(announced["names"])
            assert Snapshot.of({name: tensors[name] for name in announced["names"]}).sha256 == announced["sha256"]

            hanging = Server(2 * BRIEF_S, hangs=True)
            update = asyncio.create_task(sender.weights(1, announced).deliver(hanging))  # type: ignore[arg-type]
            await asyncio.wait_for(hanging.met.wait(), LONG_S)
            update.cancel()
            await asyncio.wait({update})
            assert update.cancelled()
            server = Server(LONG_S)
            await sender.weights(1, announced).deliver(server)  # type: ignore[arg-type]
            assert server.got == announced["sha256"] and learner.idle
            assert (await learner.call("publish", probe=[1, 2, 3], version=2))["announced"] == announced
        finally:
            await learner.close()

    asyncio.run(asyncio.wait_for(test(), 850))
