"""Servers that share their devices with a trainer: asleep nothing runs and nothing is lost; who fails is replaced."""

from __future__ import annotations

import asyncio

import pytest

from harness.engines.vllm import VllmEngine
from harness.errors import EngineError
from tests.unit.vllm_support import PROMPT, ask, engine_test, received, weights
from tests.vllm.fake_replica import FakeReplica, check, until


def test_asleep_requests_wait_and_nothing_is_published() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(4), 4, "x")
        await engine.sleep()
        assert all(fake.paused for fake in fakes)
        with pytest.raises(EngineError, match="asleep"):
            await engine.update_weights(weights(5), 5, "x")
        with pytest.raises(EngineError, match="asleep"):
            await engine.sleep()
        waiting = asyncio.create_task(engine.generate(ask()))
        await until(lambda: bool(engine.router.queue))
        assert not any(fake.requests for fake in fakes)
        await engine.wake()
        generation = await waiting
        check(PROMPT, generation, 40)
        assert set(generation.versions) == {4}
        await engine.update_weights(weights(5), 5, "x")

    engine_test(2, test)


def test_who_is_busy_does_not_sleep() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at = 7
        running = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 7))
        with pytest.raises(EngineError, match="busy"):
            await engine.sleep()
        assert not fakes[0].paused
        fakes[0].released.set()
        check(PROMPT, await running, 40)

    engine_test(1, test)


@pytest.mark.parametrize("route", ["/sleep", "/wake_up"])
def test_who_cannot_sleep_or_wake_is_restarted_with_the_current_policy(route: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(4), 4, "x")
        fakes[1].failing[route] = 1
        await engine.sleep()
        await engine.wake()
        await until(lambda: engine.router.lanes[1].state == "open")
        assert [fake.starts for fake in fakes] == [1, 2]
        answers = await asyncio.gather(*(engine.generate(ask(request_id=f"e{n}/0")) for n in range(4)))
        for generation in answers:
            check(PROMPT, generation, 40)
            assert set(generation.versions) == {4}
        assert fakes[1].requests

    engine_test(2, test)


def test_where_nobody_can_sleep_that_is_an_error_and_work_goes_on() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].failing["/sleep"] = 1
        with pytest.raises(EngineError, match="no replica could sleep"):
            await engine.sleep()
        check(PROMPT, await engine.generate(ask()), 40)
        assert fakes[0].starts == 2

    engine_test(1, test)
