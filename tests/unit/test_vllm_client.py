"""`VllmEngine` against fake replicas over real sockets: broken streams, inexact answers, replicas that die and come back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from harness.engines.stream import Lost, Stream
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import Deadlines
from harness.errors import EngineError
from harness.protocols import Generation
from tests.unit.vllm_support import PROMPT, ask, engine_test, received, weights
from tests.vllm.fake_replica import STOP, FakeReplica, check, event, logprob_at, until

# --- whole answers ---------------------------------------------------------------------------------------------------


def test_a_generation_is_exact_and_asks_for_what_it_must() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for turn in range(30):
            prompt = [turn, turn + 1]
            check(prompt, await engine.generate(ask(60, f"e/{turn}", prompt=prompt)), 60)
        bodies = fakes[0].requests
        assert len({body["request_id"] for body in bodies}) == 30
        assert {body["cache_salt"] for body in bodies} == {"policy-0"}
        assert bodies[0]["sampling_params"]["seed"] == 5 and bodies[0]["sampling_params"]["stop_token_ids"] == [STOP]
        await engine.update_weights(weights(3), 3, "abc")
        assert set((await engine.generate(ask(5))).versions) == {3}
        assert bodies[-1]["cache_salt"] == "policy-3"

    engine_test(1, test)


def test_a_session_stays_and_new_ones_spread() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for turn in range(4):
            for session in range(6):
                await engine.generate(ask(3, f"run/{session}/{turn}"))
        homes = [{body["request_id"].split("/")[1] for body in fake.requests} for fake in fakes]
        assert [len(home) for home in homes] == [2, 2, 2] and len(set.union(*homes)) == 6

    engine_test(3, test)


# --- broken streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 17, 39])
def test_a_death_in_mid_stream_goes_on_elsewhere(k: int) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].die_at = [k]
        fakes[0].restartable = False
        check(PROMPT, generation := await engine.generate(ask()), 40)
        (first,), (second,) = fakes[0].requests, fakes[1].requests
        kept = len(second["token_ids"]) - 3
        assert 0 <= kept <= k and second["token_ids"][3:] == generation.token_ids[:kept]
        assert second["sampling_params"]["max_tokens"] == 40 - kept
        same_seed = second["sampling_params"]["seed"] == first["sampling_params"]["seed"]
        assert same_seed == (kept == 0) and first["request_id"] != second["request_id"]
        assert engine.lost == 1

    engine_test(2, test)


def test_the_other_seed_is_always_the_same() -> None:
    seeds = []

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].die_at, fakes[0].hold_at = [20], 20
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 20))
        fakes[0].released.set()
        check(PROMPT, await going, 40)
        assert len(fakes[1].requests[0]["token_ids"]) == 23, "all that was received is kept"
        seeds.append(fakes[1].requests[0]["sampling_params"]["seed"])

    for _ in range(2):
        engine_test(2, test)
    assert seeds[0] == seeds[1] != 5


def test_a_death_before_the_first_token_is_a_plain_retry() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].die_at = [0]
        check(PROMPT, await engine.generate(ask()), 40)
        assert [{k: v for k, v in fake.requests[0].items() if k != "request_id"} for fake in fakes][0] == {
            k: v for k, v in fakes[1].requests[0].items() if k != "request_id"
        }

    engine_test(2, test)


@pytest.mark.parametrize("seed", [None, 5])
def test_what_came_after_an_update_began_is_sampled_again(seed: int | None) -> None:
    """12 tokens of version 0, an update, more tokens, death: the 12 are kept, no other is, and no label is a guess."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at, fakes[0].die_at = 12, [25]
        going = asyncio.create_task(engine.generate(ask(60, seed=seed)))
        await until(received(engine, 12))
        await engine.update_weights(weights(1), 1)
        fakes[0].released.set()
        check(PROMPT, generation := await going, 60)
        rest = fakes[1].requests[0]
        assert rest["token_ids"] == PROMPT + generation.token_ids[:12] and rest["cache_salt"] == "policy-1"
        assert (rest["sampling_params"].get("seed") is None) == (seed is None)
        assert generation.versions == [0] * 12 + [1] * 48

    engine_test(2, test)


def test_a_lone_replica_is_restarted_loaded_and_goes_on() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(4), 4)
        fakes[0].die_at = [10]
        check(PROMPT, generation := await engine.generate(ask()), 40)
        assert set(generation.versions) == {4} and fakes[0].starts == 2
        assert [route for _, route in fakes[0].calls].count("/finish_weight_update") == 2

    engine_test(1, test)


def at(n_spoiled: int, last: bool = False, **changes: Any) -> Callable[[int, list[dict[str, Any]]], list[bytes]]:
    """The choice of this token says something else, and no other comes after the `last`."""

    def spoil(n: int, events: list[dict[str, Any]]) -> list[bytes]:
        if last and n > n_spoiled:
            return []
        if n == n_spoiled:
            events[0]["choices"][0] |= changes
        return list(map(event, events))

    return spoil


def test_a_lost_generation_keeps_its_turn() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        gate, restart = asyncio.Event(), fakes[0].restart

        async def slowly() -> None:
            await gate.wait()
            await restart()

        fakes[0].restart = slowly  # type: ignore[method-assign]
        fakes[0].hold_at, fakes[0].die_at = 5, [5]
        going = [asyncio.create_task(engine.generate(ask(request_id=f"s{i}/0"))) for i in range(3)]
        await until(received(engine, 5))
        fakes[0].released.set()
        await until(lambda: len(engine.router.queue) == 3)
        gate.set()
        for answer in await asyncio.gather(*going):
            check(PROMPT, answer, 40)
        assert [body["request_id"].split("/")[0] for body in fakes[0].requests] == ["s0", "s0", "s1", "s2"]

    engine_test(1, test, window=1)


def drop(n_lost: int, *instead: bytes) -> Callable[[int, list[dict[str, Any]]], list[bytes]]:
    """The stream ends at this token, with these last words."""
    return lambda n, events: list(map(event, events)) if n < n_lost else [*instead][: n == n_lost]


@pytest.mark.parametrize("words", [b"", event({"error": {"message": "EngineDeadError", "code": 500}})], ids=["done", "error"])
def test_done_proves_nothing(words: bytes) -> None:
    """[DONE] without a finish_reason, with and without an error event: the rest is sampled by another attempt."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].spoil = drop(20, *([words] if words else []))
        check(PROMPT, await engine.generate(ask()), 40)
        assert len(fakes[1].requests[0]["token_ids"]) == 3 + 19

    engine_test(2, test)


def test_an_aborted_stream_goes_on() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        aborted = {"choices": [{"token_ids": [], "logprobs": {"content": []}, "finish_reason": "abort", "weight_versions": []}]}
        fakes[0].spoil = drop(9, event(aborted))
        check(PROMPT, await engine.generate(ask()), 40)
        assert len(fakes[1].requests) == 1

    engine_test(2, test)


def test_all_tokens_without_the_last_word_are_an_answer() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].spoil = at(40, finish_reason=None, weight_versions=None)
        check(PROMPT, await engine.generate(ask()), 40)
        assert len(fakes[0].requests) == 1 and not fakes[1].requests and engine.lost == 1

    engine_test(2, test)


def test_once_finished_the_end_of_the_connection_says_nothing() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].endless = True
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 40))
        await fakes[0].kill()
        check(PROMPT, await going, 40)
        assert engine.lost == 0

    engine_test(1, test)


def test_only_its_own_timer_makes_a_stream_hang() -> None:
    async def run(limit_s: float, work: Callable[[], Awaitable[Any]]) -> None:
        async with Stream(0).timed(limit_s):
            await work()

    async def other() -> None:
        raise TimeoutError("a connection was not made")

    with pytest.raises(TimeoutError, match="was not made"):
        asyncio.run(run(50.0, other))
    with pytest.raises(Lost) as lost:
        asyncio.run(run(0.01, asyncio.Event().wait))
    assert lost.value.hung


def test_a_stall_is_a_loss() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].stall_at, fakes[0].restartable = 14, False
        check(PROMPT, await engine.generate(ask()), 40)
        await until(lambda: engine.router.lanes[0].state == "out" and fakes[0].running == 0)
        assert fakes[0].aborted == 1

    engine_test(2, test, deadlines=Deadlines(10.0, 50.0, 1.0, 55.0, 20.0, 20.0, 20.0))


def test_a_first_token_that_never_comes_is_a_loss() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].stall_at = 0
        check(PROMPT, await engine.generate(ask()), 40)

    engine_test(2, test, deadlines=Deadlines(10.0, 1.0, 50.0, 55.0, 20.0, 20.0, 20.0))


def test_the_clock_stands_still_in_a_pause() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].gates["/update_weights"] = gate = asyncio.Event()
        fakes[0].hold_at = 5
        going = asyncio.create_task(engine.generate(ask()))
        await until(received(engine, 5))
        update = asyncio.create_task(engine.update_weights(weights(1), 1))
        await until(lambda: (0, "/update_weights") in fakes[0].calls)
        fakes[0].released.set()
        await asyncio.wait({going}, timeout=4.0)
        assert not going.done()
        gate.set()
        await update
        check(PROMPT, await going, 40)
        assert engine.lost == 0

    engine_test(1, test, deadlines=Deadlines(10.0, 50.0, 2.0, 55.0, 20.0, 20.0, 20.0))


def test_there_is_a_limit_to_all_of_it() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].stall_at = 3
        with pytest.raises(EngineError, match=r"no answer after 1 s \(0 tokens\)"):
            await engine.generate(ask())
        await until(lambda: fakes[0].running == 0)

    engine_test(1, test, deadlines=Deadlines(total_s=1.0))


# --- inexact answers -------------------------------------------------------------------------------------------------


def content(token: int, logprob: Any) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": logprob}]}


def spans(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (at(20, logprobs=None), "event that is none"),
        (at(20, logprobs={"content": None}), "event that is none"),
        (at(20, logprobs={"content": []}), "1 tokens and 0 log-probs"),
        (at(20, logprobs={"content": [{"token_id": 1}]}), "event that is none"),
        (at(20, logprobs=content(1_001, -1.0)), "other tokens"),
        (at(20, token_ids=[1, 2]), "2 tokens and 1 log-probs"),
        (at(20, token_ids="ab"), "event that is none"),
        (at(20, finish_reason="repetition"), "repetition"),
        (at(20, finish_reason="length", weight_versions=spans(("0", 0, 20)), last=True), "'length' after 20 of 40"),
        (at(20, finish_reason="stop", weight_versions=spans(("0", 0, 20)), last=True), "ended with 'stop' at token"),
        (at(20, finish_reason="stop", weight_versions=spans(("0", 0, 20))), "after its finish_reason"),
        (at(40, finish_reason="stop"), "ended with 'stop' at token"),
        (at(40, weight_versions=None), "event that is none"),
        (at(40, weight_versions=[]), "40 tokens and 0 versions"),
        (at(40, weight_versions=spans(("0", 0, 39))), "40 tokens and 39 versions"),
        (at(40, weight_versions=spans(("0", 0, 41))), "40 tokens and 41 versions"),
        (at(40, weight_versions=spans(("0", 0, 20), ("0", 21, 40))), "span"),
        (at(40, weight_versions=spans(("0", 0, 20), ("0", 19, 40))), "span"),
        (at(40, weight_versions=spans(("0", 0, 41), ("0", 41, 40))), "span"),
        (at(40, weight_versions=spans(("-1", 0, 40))), "below 0"),
        (lambda n, events: [b'data: {"choices": [{]}\n\n'] if n == 9 else list(map(event, events)), "event that is none"),
        (lambda n, events: [b"data: 5\n\n"] if n == 9 else list(map(event, events)), "event that is none"),
        (lambda n, events: [b"data: {}\n\n"] if n == 9 else list(map(event, events)), "event that is none"),
        (lambda n, events: [event(e) * (1 + (n == 40)) for e in events], "after its finish_reason"),
    ],
)
def test_what_is_inexact_is_an_error_and_not_tried_again(spoil: Any, message: str) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for fake in fakes:
            fake.spoil = spoil
        with pytest.raises(EngineError, match=message):
            await engine.generate(ask())
        assert sum(len(fake.requests) for fake in fakes) == 1

    engine_test(2, test)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5, -9_999.0, None, "x"])
def test_a_logprob_that_is_none_is_an_error(logprob: Any) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        def spoil(n: int, events: list[dict[str, Any]]) -> list[bytes]:
            events[0]["choices"][0]["logprobs"]["content"][0]["logprob"] = logprob if n == 20 else -1.0
            return list(map(event, events))

        fakes[0].spoil = spoil
        with pytest.raises(EngineError, match="log-prob|event that is none"):
            await engine.generate(ask())

    engine_test(1, test)


@pytest.mark.parametrize("label", ["9", "default", "0.5"])
def test_a_replica_with_another_label_is_loaded_again(label: str) -> None:
    """Somebody restarted it: its answer is refused, and so is what it had sent to others; then it is repaired."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        await engine.update_weights(weights(2), 2)
        fakes[0].lying_label, fakes[0].hold_at = label, 30
        other = asyncio.create_task(engine.generate(ask(40, "other/0")))
        await until(received(engine, 30))
        with pytest.raises(EngineError, match="version"):
            await engine.generate(ask(10))
        fakes[0].lying_label, fakes[0].hold_at = None, None
        check(PROMPT, await other, 40)
        assert fakes[0].starts == 2 and fakes[0].label == "2"
        assert fakes[0].requests[-1]["token_ids"] == PROMPT, "nothing that it had sent is kept"

    engine_test(1, test)


def test_what_the_server_refuses_is_not_tried_again() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for fake in fakes:
            fake.refuse = (400, "prompt is too long")
        with pytest.raises(EngineError, match="HTTP 400.*prompt is too long"):
            await engine.generate(ask())
        assert sum(len(fake.requests) for fake in fakes) == 1
        fakes[0].refuse, fakes[1].refuse = (503, "not now"), None
        for session in range(4):
            check(PROMPT, await engine.generate(ask(5, f"s{session}/0")), 5)
        fakes[1].refuse = (503, "not now")
        with pytest.raises(EngineError, match="10 attempts.*503.*not now"):
            await engine.generate(ask())

    engine_test(2, test)


# --- the end of it ---------------------------------------------------------------------------------------------------


def test_when_all_are_dead_nobody_waits() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        for fake in fakes:
            fake.hold_at, fake.restartable = 5, False
        going = [asyncio.create_task(engine.generate(ask(40, f"s{i}/0"))) for i in range(6)]
        await until(lambda: all(fake.running == 2 for fake in fakes))
        for fake in fakes:
            await fake.kill()
        answers = await asyncio.gather(*going, return_exceptions=True)
        assert all(isinstance(answer, EngineError) and "no replica is left" in str(answer) for answer in answers)
        with pytest.raises(EngineError):
            await engine.score([1, 2])

    engine_test(3, test, window=2)


@pytest.mark.parametrize("n", [0, 8], ids=["before a token", "in mid-stream"])
def test_cancelling_aborts(n: int) -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at = n
        going = [asyncio.create_task(engine.generate(ask(40, f"s{i}/0"))) for i in range(3)]
        await until(lambda: fakes[0].running == 2 and received(engine, n)())
        for task in going:
            task.cancel()
        await asyncio.wait(going)
        assert all(task.cancelled() for task in going)
        await until(lambda: fakes[0].running == 0)
        assert fakes[0].aborted == 2 and len(fakes[0].requests) == 2

    engine_test(1, test, window=2)


def test_closing_ends_what_runs_and_what_waits() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[0].hold_at = 8
        going = [asyncio.create_task(engine.generate(ask(40, f"s{i}/0"))) for i in range(3)]
        await until(lambda: fakes[0].running == 2 and received(engine, 8)())
        await engine.close()
        answers = await asyncio.gather(*going, return_exceptions=True)
        assert all(isinstance(answer, EngineError) for answer in answers)
        await until(lambda: fakes[0].running == 0)
        assert all(replica._session is None for replica in engine.replicas), "nothing is opened again"

    engine_test(1, test, window=2)


def test_many_sessions_random_deaths_and_updates() -> None:
    """Token by token: nothing lost, nothing twice, every label right."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        rng = random.Random(4)
        for fake in fakes:
            fake.die_at = [rng.randrange(60) for _ in range(4)]

        async def session(i: int) -> list[Generation]:
            text, answers = [i, i + 1], []
            for turn in range(3):
                answer = await engine.generate(ask(60, f"s{i}/{turn}", prompt=text, seed=i))
                check(text, answer, 60)
                answers.append(answer)
                text = text + answer.token_ids + [i]
            return answers

        going = asyncio.gather(*(session(i) for i in range(64)))
        for version in range(1, 6):
            await until(lambda at=version: sum(len(f.requests) for f in fakes) > 25 * at or going.done())
            await engine.update_weights(weights(version), version)
        answers = [answer for session in await going for answer in session]
        assert len(answers) == 192 and engine.lost > 0
        assert {version for answer in answers for version in answer.versions} >= {0, 1, 2}
        assert sum(fake.starts for fake in fakes) >= 5

    engine_test(3, test, window=8)


# --- scores and figures ----------------------------------------------------------------------------------------------


def test_scores_are_those_of_all() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        expected = [logprob_at(token, 0) for token in PROMPT[1:]]
        assert await engine.score(PROMPT) == expected
        assert await engine.canary(PROMPT) == [(fake.url, expected) for fake in fakes]
        fakes[2].off = -0.01
        with pytest.raises(EngineError, match=f"{fakes[2].url} and another replica disagree .* up to 1.00e-02"):
            await engine.score(PROMPT)
        fakes[2].restartable = False
        await fakes[2].kill()
        assert await engine.score(PROMPT) == expected, "one that has died is no reason to stop"
        fakes[1].off = float("nan")
        with pytest.raises(EngineError, match="not finite"):
            await engine.score(PROMPT)

    engine_test(3, test)


def test_metrics_are_sums() -> None:
    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        fakes[1].load = {"kv_cache_usage_perc": 0.3}
        figures = await engine.metrics()
        assert figures["generated_tokens"] == 200.0 and figures["prefix_hit_rate"] == 0.75 and figures["preemptions"] == 2.0
        assert figures["kv_usage"] == pytest.approx(0.2) and figures["running"] == 0.0 and figures["replicas"] == 2.0
        fakes[0].hold_at = 3
        going = asyncio.create_task(engine.generate(ask()))
        while (await engine.metrics())["running"] < 1:
            pass
        fakes[0].released.set()
        await going
        json.dumps(figures)

    engine_test(2, test)
