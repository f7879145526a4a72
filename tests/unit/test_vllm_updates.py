"""Publishing weights to fake replicas: all or those that can, exactly at the pause, and never a resume after a failure."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate
from typing import Any

import pytest

from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import Deadlines
from harness.errors import EngineError
from tests.unit.vllm_support import PROMPT, ask, engine_test, received, weights
from tests.vllm.fake_replica import FakeReplica, check, event, logprob_at, until

STEPS = ["/pause?mode=keep&clear_cache=false", "/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE_ROUTES = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
IMPATIENT = Deadlines(10.0, 50.0, 50.0, 55.0, 2.5, 2.5, 20.0)


def routes(fake: FakeReplica) -> list[str]:
    return [route for name, route in fake.calls if name == fake.name]


def states(engine: VllmEngine) -> list[str]:
    return [lane.state for lane in engine.router.lanes]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_nobody_resumes_before_all_have_loaded(kv: Any) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[1].gates["/finish_weight_update"] = gate = asyncio.Event()
        update = asyncio.create_task(engine.update_weights(weights(1), 1, "abc"))
        await until(lambda: all(fake.label == "1" for fake in (fakes[0], fakes[2])))
        late = asyncio.create_task(engine.generate(ask()))
        await until(lambda: engine.router.queue)
        assert states(engine) == ["held"] * 3 and all(fake.paused for fake in fakes)
        assert not any(route == "/resume" for _, route in fakes[0].calls) and not any(fake.requests for fake in fakes)
        gate.set()
        await update
        assert set((await late).versions) == {1}
        pause = STEPS[0].replace("false", "true") if kv == "recompute" else STEPS[0]
        assert all(routes(fake) == [pause, *STEPS[1:], "/resume"] for fake in fakes)

    engine_test(3, test, kv=kv)


def test_requests_in_flight_go_on_and_change_exactly_at_the_pause() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for fake in fakes:
            fake.hold_at = 10
        prompts = [[i, 3] for i in range(8)]
        going = [asyncio.create_task(engine.generate(ask(200, f"s{p[0]}/0", prompt=p))) for p in prompts]
        streams = await _streams(engine, 8, 10)
        await engine.update_weights(weights(1), 1)
        assert all(len(stream.ids) == 10 and stream.labels == [0, 1] for stream in streams)
        for fake in fakes:
            fake.released.set()
        for version in (2, 3):
            await until(lambda at=version: all(len(s.ids) > 20 * at or s.finish for s in streams))
            await engine.update_weights(weights(version), version)
        answers = await asyncio.gather(*going)
        for prompt, answer in zip(prompts, answers, strict=True):
            check(prompt, answer, 200)
            assert len(answer.token_ids) <= 10 or answer.versions[:11] == [0] * 10 + [1]
        assert engine.lost == 0 and sum(len(fake.requests) for fake in fakes) == 8

    engine_test(2, test)


@pytest.mark.parametrize(
    "spans", [[(0, 5), (1, 35)], [(0, 12), (9, 28)], [(0, 12), (1, 8), (0, 20)], [(1, 40)], [(0, 13), (2, 10), (1, 17)]]
)
def test_labels_that_cannot_be_are_refused(spans: list[tuple[int, int]]) -> None:
    """12 tokens had come when the pause for version 1 began, and 2 followed 1: anything else is a lie."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        def spoil(n: int, events: list[dict[str, Any]]) -> list[bytes]:
            if n == 40:
                ends = list(accumulate(length for _, length in spans))
                told = [
                    {"version": str(v), "start": end - length, "end": end} for (v, length), end in zip(spans, ends, strict=True)
                ]
                events[0]["choices"][0]["weight_versions"] = told
            return list(map(event, events))

        fakes[0].hold_at, fakes[0].spoil = 12, spoil
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 12))
        await engine.update_weights(weights(1), 1)
        await engine.update_weights(weights(2), 2)
        fakes[0].released.set()
        with pytest.raises(EngineError, match="12 tokens came before an update"):
            await going
        await until(lambda: fakes[0].starts == 2 and states(engine) == ["open"])

    engine_test(1, test)


async def _streams(engine: VllmEngine, n: int, tokens: int) -> list[Any]:
    """The n attempts, once each has so many tokens or has ended."""
    found: set[Any] = set()

    def all_there() -> bool:
        found.update(stream for replica in engine.replicas for stream in replica._streams)
        return len(found) == n and all(len(stream.ids) == tokens or stream.finish for stream in found)

    await until(all_there)
    return list(found)


@pytest.mark.parametrize("route", UPDATE_ROUTES)
@pytest.mark.parametrize("fault", ["failing", "hanging"])
def test_one_failure_is_one_whole_retry_while_paused(route: str, fault: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        getattr(fakes[0], fault)[route] = 1
        await engine.update_weights(weights(1), 1)
        assert states(engine) == ["open", "open"] and [fake.weights for fake in fakes] == [1, 1]
        first = STEPS[: UPDATE_ROUTES.index(route) + 1]
        assert routes(fakes[0]) == [*first, *STEPS, "/resume"] and fakes[0].starts == 1
        assert set((await engine.generate(ask())).versions) == {1}

    engine_test(2, test, deadlines=IMPATIENT)


@pytest.mark.parametrize("route", [*UPDATE_ROUTES, "/resume"])
@pytest.mark.parametrize("fault", ["failing", "dying"])
def test_who_fails_twice_is_replaced_and_the_others_go_on(route: str, fault: str) -> None:
    """What it was generating goes on elsewhere; it is started again and loaded before it gets traffic."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at = 9
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 9))
        getattr(fakes[0], fault)[route] = 2 if fault == "failing" else 1
        await engine.update_weights(weights(1), 1)
        fakes[0].hold_at = None
        check(PROMPT, answer := await going, 40)
        assert answer.versions == [0] * 9 + [1] * 31
        await until(lambda: states(engine) == ["open", "open"])
        assert fakes[0].starts == 2 and fakes[0].weights == 1 and not fakes[0].paused
        if fault == "failing" and route != "/resume":
            assert "/resume" not in routes(fakes[0])[: routes(fakes[0]).index(STEPS[0], -5)]

    engine_test(2, test)


def test_a_replica_that_nobody_can_restart_is_loaded_whole_or_stays_out() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].failing["/update_weights"] = 3
        await engine.update_weights(weights(1), 1)
        assert states(engine) == ["out", "open"]
        await until(lambda: states(engine) == ["open", "open"])
        assert fakes[0].weights == 1 and fakes[0].label == "1" and routes(fakes[0]).count("/resume") == 1
        await fakes[0].kill()
        for session in range(2):
            check(PROMPT, await engine.generate(ask(5, f"t{session}/0")), 5)
        await until(lambda: states(engine) == ["out", "open"])
        await engine.update_weights(weights(2), 2)
        fakes[0].restartable = False
        await fakes[0].start()  # by somebody else, at the same address
        await until(lambda: states(engine) == ["open", "open"])
        assert fakes[0].weights == 2

    engine_test(2, test, urls=True)


@pytest.mark.parametrize("urls", [True, False])
def test_if_none_has_loaded_all_stay_paused_until_a_further_update(urls: bool) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for fake in fakes:
            fake.failing["/update_weights"] = 2
            fake.hold_at = 4
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 4))
        with pytest.raises(EngineError, match="no replica has taken version 1: .*it broke"):
            await engine.update_weights(weights(1), 1)
        assert all(fake.paused and fake.starts == 1 for fake in fakes)
        assert not any(route == "/resume" for _, route in fakes[0].calls)
        with pytest.raises(EngineError, match="no replica is left"):
            await going
        with pytest.raises(EngineError, match="no replica is left"):
            await engine.generate(ask())
        with pytest.raises(EngineError, match="no replica serves"):
            await engine.score(PROMPT)
        for fake in fakes:
            fake.hold_at, fake.failing["/update_weights"] = None, 2
        with pytest.raises(EngineError, match="no replica has taken version 2: .*it broke"):
            await engine.update_weights(weights(2), 2)
        await engine.update_weights(weights(3), 3)
        assert states(engine) == ["open", "open"] and [fake.starts for fake in fakes] == [1, 1], "they were only paused"
        check(PROMPT, answer := await engine.generate(ask()), 40)
        assert set(answer.versions) == {3}

    engine_test(2, test, urls=urls)


def test_an_update_waits_for_a_lone_replica_that_is_being_restarted() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        gate, restart = asyncio.Event(), fakes[0].restart

        async def slowly() -> None:
            await gate.wait()
            await restart()

        fakes[0].restart = slowly  # type: ignore[method-assign]
        await fakes[0].kill()
        going = asyncio.create_task(engine.generate(ask()))
        await until(lambda: states(engine) == ["out"])
        update = asyncio.create_task(engine.update_weights(weights(1), 1))
        await until(lambda: engine._policy is not None)
        gate.set()
        await update
        check(PROMPT, answer := await going, 40)
        assert set(answer.versions) == {1}

    engine_test(1, test)


def test_a_lone_replica_that_dies_in_an_update_is_restarted_and_takes_it() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at = 6
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 6))
        fakes[0].dying["/update_weights"], fakes[0].hold_at = 1, None
        healthy = engine.replicas[0].healthy

        async def somebody_else_ends_now() -> bool:
            await until(lambda: engine.router.queue)
            engine._pump()
            return await healthy()

        engine.replicas[0].healthy = somebody_else_ends_now  # type: ignore[method-assign]
        await engine.update_weights(weights(1), 1)
        check(PROMPT, answer := await going, 40)
        assert answer.versions == [0] * 6 + [1] * 34 and fakes[0].starts == 2

    engine_test(1, test)


def test_a_replica_that_comes_back_during_an_update_does_not_miss_it() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(1), 1)
        fakes[0].die_at, fakes[0].gates["/finish_weight_update"] = [3], asyncio.Event()
        fakes[1].gates["/update_weights"] = asyncio.Event()
        check(PROMPT, await engine.generate(ask(40, "a/0")), 40)
        await until(lambda: routes(fakes[0])[-1] == "/finish_weight_update" and fakes[0].starts == 2)
        update = asyncio.create_task(engine.update_weights(weights(2), 2))
        await until(lambda: routes(fakes[1])[-1] == "/update_weights")
        fakes[0].gates["/finish_weight_update"].set()
        await until(lambda: fakes[0].label == "1" and not fakes[0].paused)
        assert states(engine) == ["out", "held"]
        fakes[1].gates["/update_weights"].set()
        await update
        await until(lambda: states(engine) == ["open", "open"])
        assert [fake.label for fake in fakes] == ["2", "2"]

    engine_test(2, test)


def test_a_second_update_at_the_same_time_is_refused() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].gates["/update_weights"] = gate = asyncio.Event()
        update = asyncio.create_task(engine.update_weights(weights(1), 1))
        await until(lambda: "/update_weights" in routes(fakes[0]))
        with pytest.raises(EngineError, match="under way"):
            await engine.update_weights(weights(2), 2)
        gate.set()
        await update
        assert set((await engine.generate(ask())).versions) == {1}

    engine_test(1, test)


def test_a_cancelled_update_resumes_nobody() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].gates["/update_weights"] = asyncio.Event()
        update = asyncio.create_task(engine.update_weights(weights(1), 1))
        await until(lambda: fakes[1].label == "1" and "/update_weights" in routes(fakes[0]))
        update.cancel()
        await asyncio.wait({update})
        with pytest.raises(EngineError, match="no replica is left"):
            await engine.generate(ask())
        assert all(fake.paused for fake in fakes)
        fakes[0].gates.clear()
        await engine.update_weights(weights(2), 2)
        assert set((await engine.generate(ask())).versions) == {2}

    engine_test(2, test)


def test_who_comes_back_must_score_as_the_others_did() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(1), 1)
        assert await engine.score(PROMPT) == [logprob_at(token, 1) for token in PROMPT[1:]]
        fakes[0].off, fakes[0].die_at = 0.5, [3]
        check(PROMPT, await engine.generate(ask()), 40)
        await until(lambda: fakes[0].starts == 4 and not engine._revivals)
        assert states(engine) == ["out", "open"], "three starts, three wrong scores"

    engine_test(2, test)


def test_who_comes_back_with_another_label_gets_no_traffic() -> None:
    """Nothing was published yet, so nothing is loaded: the weights of the start must be labelled as they were."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].first, fakes[0].die_at = 5, [3]
        with pytest.raises(EngineError, match="no replica is left"):
            await engine.generate(ask())
        assert fakes[0].starts == 4 and len(fakes[0].requests) == 1

    engine_test(1, test)


def test_deaths_everywhere_while_versions_go_by() -> None:
    """Deaths in streams and in every step of updates, slow and quick: what comes out is right or an `EngineError`."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        rng = random.Random(8)
        done = asyncio.Event()

        async def session(i: int) -> None:
            turn = 0
            while not done.is_set():
                check([i, 2], await engine.generate(ask(50, f"s{i}/{turn}", prompt=[i, 2])), 50)
                turn += 1

        going = [asyncio.create_task(session(i)) for i in range(24)]
        for version in range(1, 13):
            for fake in fakes:
                fake.failing.clear()
                fake.dying.clear()
            victim = fakes[rng.randrange(3)]
            victim.die_at.append(rng.randrange(50))
            for fake in {victim, fakes[version % 3]}:
                getattr(fake, rng.choice(["failing", "dying"]))[rng.choice([*UPDATE_ROUTES, "/resume"])] += 1
            await engine.update_weights(weights(version), version)
            before = sum(len(fake.requests) for fake in fakes)
            await until(lambda n=before: sum(len(fake.requests) for fake in fakes) > n + 10)
        for fake in fakes:
            fake.failing.clear()
            fake.dying.clear()
        await engine.update_weights(weights(13), 13)  # whoever was given up gets another chance
        await until(lambda: states(engine) == ["open"] * 3)
        done.set()
        await asyncio.gather(*going)
        assert [fake.weights for fake in fakes] == [13] * 3 and [fake.label for fake in fakes] == ["13"] * 3
        assert sum(fake.starts for fake in fakes) > 6 and engine.lost > 0

    engine_test(3, test)
