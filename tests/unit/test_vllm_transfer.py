"""Weights that the trainer sends to fake replicas: every failure is one whole repetition while paused, or the replica's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engines.vllm import VllmEngine
from harness.engines.vllm_launch import VllmServer, described
from harness.engines.vllm_replica import Deadlines
from harness.engines.vllm_transfer import Backend, Sender, _facing, choose
from harness.errors import ConfigError, EngineError, LearnerError
from tests.unit.vllm_support import PROMPT, ask, engine_test
from tests.vllm.fake_replica import FakeReplica, FakeTrainer, announced, check, until

PAUSE = "/pause?mode=keep&clear_cache=false"
MEET = "/init_weight_transfer_engine"
STEPS = [PAUSE, "/start_weight_update", MEET, "/update_weights", "/finish_weight_update"]
IMPATIENT = Deadlines(10.0, 50.0, 50.0, 55.0, control_s=10.0, update_s=10.0, restart_s=20.0)
Test = Callable[[VllmEngine, list[FakeReplica], FakeTrainer, Callable[[int], Awaitable[None]]], Awaitable[None]]


def sending_test(n: int, test: Test, *, backend: Backend = "gloo", **options: Any) -> None:
    """Run `test` with a trainer that keeps versions 1 and 2, and with what publishes one of them."""

    async def work(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        trainer = FakeTrainer(1, 2)
        sender = Sender(trainer, backend)  # type: ignore[arg-type] # all that it needs of a Learner
        for fake in fakes:
            fake.trainer = trainer

        async def publish(version: int) -> None:
            await engine.publish(sender.weights(version, announced(version)), version)

        await test(engine, fakes, trainer, publish)

    engine_test(n, work, **options)


def routes(fake: FakeReplica) -> list[str]:
    return [route for name, route in fake.calls if name == fake.name]


def states(engine: VllmEngine) -> list[str]:
    return [lane.state for lane in engine.router.lanes]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_each_replica_meets_the_trainer_by_itself_and_all_resume_together(backend: Backend) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        fakes[1].gates["/finish_weight_update"] = gate = asyncio.Event()
        update = asyncio.create_task(publish(1))
        await until(lambda: sum(fake.label == "1" for fake in fakes) == 2)
        assert all(fake.paused for fake in fakes)
        gate.set()
        await update
        assert all(routes(fake) == [*STEPS, "/resume"] for fake in fakes)
        assert [fake.weights for fake in fakes] == [1] * 3 and len(trainer.rooms) == 3
        assert {room.backend for room in trainer.rooms.values()} == {backend}
        check(PROMPT, answer := await engine.generate(ask()), 40)
        assert set(answer.versions) == {1}

    sending_test(3, test, backend=backend)


@pytest.mark.parametrize("fault", ["breaks", "other bytes", "absent"])
def test_one_failed_sending_is_one_whole_repetition_while_paused(fault: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        trainer.faults = [fault]
        await publish(1)
        first = STEPS[:3] if fault == "absent" else STEPS[:4]
        assert routes(fakes[0]) == [*first, *STEPS, "/resume"] and fakes[0].starts == 1
        assert fakes[0].weights == 1 and trainer.sent == [1, 1] and not trainer.broken

    sending_test(1, test, deadlines=IMPATIENT)


@pytest.mark.parametrize("route", [MEET, "/update_weights"])
@pytest.mark.parametrize("fault", ["failing", "hanging"])
def test_one_failure_of_a_replica_is_one_whole_repetition_while_paused(route: str, fault: str) -> None:
    """The trainer that waits for it in vain gives up in time and sends again."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        getattr(fakes[0], fault)[route] = 1
        await publish(1)
        assert routes(fakes[0]) == [*STEPS[: STEPS.index(route) + 1], *STEPS, "/resume"] and fakes[0].starts == 1
        assert [fake.weights for fake in fakes] == [1, 1] and len(trainer.sent) == 3 and not trainer.broken

    sending_test(2, test, deadlines=IMPATIENT)


@pytest.mark.parametrize("route", [MEET, "/update_weights"])
def test_a_replica_that_dies_in_it_breaks_nobody_elses_update_and_is_replaced(route: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        fakes[0].dying[route] = 1
        await publish(1)
        assert fakes[1].weights == 1 and routes(fakes[1]) == [*STEPS, "/resume"]
        await until(lambda: states(engine) == ["open", "open"])
        assert fakes[0].starts == 2 and fakes[0].weights == 1 and not trainer.broken

    sending_test(2, test, deadlines=IMPATIENT)


def test_if_nobody_could_be_sent_it_all_stay_paused_until_a_further_update() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        trainer.faults = ["other bytes"] * 4
        with pytest.raises(EngineError, match="no replica has taken version 1: .*the trainer: everything was sent"):
            await publish(1)
        assert all(fake.paused and "/resume" not in routes(fake) for fake in fakes)
        await publish(2)
        await until(lambda: states(engine) == ["open", "open"])
        assert [fake.weights for fake in fakes] == [2, 2]

    sending_test(2, test)


def test_who_comes_back_later_is_sent_what_was_published() -> None:
    """By a trainer that is at a step now, once that is over; and that has taken the next version already."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        await publish(1)
        before = len(routes(fakes[0]))
        async with trainer.lock:
            fakes[0].die_at = [3]
            check(PROMPT, await engine.generate(ask()), 40)
            await until(lambda: routes(fakes[0])[before:] == STEPS[:2])
            assert fakes[0].starts == 2 and states(engine) == ["out", "open"]
        await until(lambda: states(engine) == ["open", "open"])
        assert routes(fakes[0])[before:] == [*STEPS, "/resume"]
        assert fakes[0].weights == 1 and trainer.sent == [1, 1, 1]

    sending_test(2, test)


def test_a_version_that_is_not_kept_is_an_error() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        with pytest.raises(EngineError, match="version 3 is not kept"):
            await publish(3)
        assert fakes[0].paused and fakes[0].weights == 0 and not trainer.broken

    sending_test(1, test, deadlines=IMPATIENT)


def test_closing_the_engine_breaks_off_no_command_of_the_trainer() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        await publish(1)
        fakes[0].gates["/update_weights"], fakes[0].die_at = asyncio.Event(), [3]
        check(PROMPT, await engine.generate(ask()), 40)
        await until(lambda: routes(fakes[0])[-1] == "/update_weights" and fakes[0].starts == 2)
        await engine.close()
        assert trainer.lock.locked(), "the sending goes on until its own limit"
        assert await trainer.call("listen", address="127.0.0.1") and not trainer.broken

    sending_test(2, test, deadlines=IMPATIENT)


def test_a_sending_that_had_not_begun_is_not_begun_after_the_close() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        await publish(1)
        async with trainer.lock:
            fakes[0].die_at = [3]
            check(PROMPT, await engine.generate(ask()), 40)
            await until(lambda: routes(fakes[0])[-1] == "/start_weight_update" and fakes[0].starts == 2)
            await until(lambda: trainer.lock._waiters)
            await engine.close()
        await trainer.call("listen", address="127.0.0.1")
        assert trainer.sent == [1, 1] and not trainer.broken

    sending_test(2, test)


def test_a_dead_trainer_is_its_own_error_and_nobody_resumes() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        await publish(1)
        trainer.dead = True
        with pytest.raises(LearnerError, match="the trainer died"):
            await publish(2)
        assert all(fake.paused and routes(fake).count(MEET) == 1 for fake in fakes)
        assert states(engine) == ["out", "out"]

    sending_test(2, test)


@pytest.mark.parametrize("answer", ["{}", "[]", '{"world_size": null}'])
def test_a_server_that_does_not_say_how_many_workers_it_has(answer: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica], trainer: FakeTrainer, publish: Any) -> None:
        async def text(*_: Any) -> str:
            return answer

        engine.replicas[0]._text = text  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="get_world_size"):
            await engine.replicas[0].workers()

    sending_test(1, test)


LOCAL, REMOTE = "http://127.0.0.1:8000", "http://10.1.2.3:8000"


@pytest.mark.parametrize(
    ("wanted", "platform", "urls", "device", "way"),
    [
        ("auto", "cpu", [], "cpu", "disk"),
        ("auto", "cpu", [LOCAL, "http://localhost:1", "http://[::1]:2"], "cpu", "disk"),
        ("auto", "cpu", [REMOTE], "cpu", "gloo"),
        ("auto", "cpu", [LOCAL, REMOTE], "cuda:0", "gloo"),
        ("auto", "cuda", [], "cuda:0", "nccl"),
        ("auto", "cuda", [REMOTE], "cuda:3", "nccl"),
        ("auto", "cuda", [], "cpu", "disk"),
        ("auto", "cuda", [REMOTE], "cpu", "gloo"),
        ("disk", "cuda", [REMOTE], "cuda:0", "disk"),
        ("gloo", "cpu", [], "cpu", "gloo"),
        ("gloo", "cuda", [], "cuda:0", "gloo"),
        ("nccl", "cuda", [], "cuda:0", "nccl"),
    ],
)
def test_the_way_follows_from_what_both_sides_have(wanted: Any, platform: Any, urls: list[str], device: str, way: str) -> None:
    server = VllmServer(python=Path("p"), model=Path("m"), platform=platform, weight_transfer=wanted)
    assert choose(server, urls, device) == way


def test_nccl_without_cuda_is_the_users_error() -> None:
    server = VllmServer(python=Path("p"), model=Path("m"), platform="cuda", weight_transfer="nccl")
    with pytest.raises(ConfigError, match="weight_transfer.*CUDA on both sides, but the trainer is on cpu") as caught:
        choose(server, [], "cpu")
    assert caught.value.hint
    for platform in ({}, {"platform": "cpu"}):
        with pytest.raises(ConfigError, match=r"engine\.vllm\.server\.weight_transfer.*nccl needs CUDA: set platform to cuda"):
            described({"model": ".", "weight_transfer": "nccl", **platform})


def test_the_trainer_listens_where_the_server_is_faced() -> None:
    assert asyncio.run(_facing("http://localhost:5")) == asyncio.run(_facing(LOCAL)) == "127.0.0.1"
    with pytest.raises(EngineError, match="no way .IPv4. to http"):
        asyncio.run(_facing("http://[::1]:5"))


def test_the_server_is_the_same_whatever_the_way() -> None:
    """Our own backend, which takes files and broadcasts."""
    for way in ("auto", "disk", "gloo", "nccl"):
        command = VllmServer(python=Path("p"), model=Path("m"), platform="cuda", weight_transfer=way).command(1)
        assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "sao"}'
