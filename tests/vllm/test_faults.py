"""Faults of two real vLLM servers under requests that stream through our client: nothing is lost that need not be, and nothing
wrong is returned. Servers that die: `test_deaths.py`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from harness.engines.vllm_replica import Deadlines
from harness.errors import EngineError
from tests.contracts.engine_support import FAR, STEP_S, TOLERANCE, load, logprobs
from tests.vllm.support import PROMPT, Fleet, Flight, Server, both_serve, flipped, until
from trainer.weights import read_file, sha256, write_file

pytestmark = [pytest.mark.timeout(1_500), pytest.mark.usefixtures("mended")]
STREAMS, TOKENS = 8, 400
IMPATIENT = Deadlines(between_tokens_s=15.0, control_s=15.0)


def test_a_slow_replica_gets_less_and_nothing_fails(fleet: Fleet) -> None:
    """Requests go where the fewest tokens are in flight; the one that the slow replica has stays there and ends well."""

    async def work() -> None:
        async with fleet.client() as engine:
            start = await fleet.sampled(engine, 0)
            await fleet.pace(3.0, 1)
            pair = Flight(fleet, engine, 2, 40).start()
            await asyncio.wait(pair.tasks, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(10):
                await Flight(fleet, engine, 1, 20).start().land()
            assert await fleet.sampled(engine, 0, start + 240) == start + 240 and len(engine.replicas[1]._streams) == 1
            await fleet.pace(0, 1)
            await pair.land()
            assert engine.lost == 0 and await fleet.sampled(engine, 0) == start + 240

    fleet.run(work())


def test_a_hung_replica_is_taken_out_and_comes_back_with_the_current_policy(fleet: Fleet) -> None:
    async def work() -> None:
        async with fleet.client(deadlines=IMPATIENT) as engine:
            versions = [fleet.version]
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            moved, received = flight.at(1), flight.received(1)
            fleet.servers[1].signal(signal.SIGSTOP)
            await until(lambda: engine.router.lanes[1].state == "out")
            versions.append(await fleet.publish(engine, 1))
            await fleet.pace(0, 0)
            answers = await flight.land()
            assert engine.lost >= len(moved) == STREAMS // 2
            assert all(set(answer.versions) <= set(versions) for answer in answers)
            begun = [answers[i].token_ids for i in moved]
            assert all(any(ids == whole[: len(ids)] for whole in begun) for ids in received), "they went on from there"
            fleet.servers[1].signal(signal.SIGCONT)
            await both_serve(fleet, engine, versions[-1])

    fleet.run(work())


# --- wrong versions --------------------------------------------------------------------------------------------------


async def another_number(server: Server) -> None:
    await server.post("/update_weight_version", new_version="99999")


async def no_number(server: Server) -> None:
    await server.post("/update_weight_version", new_version="latest")


async def as_restarted(server: Server) -> None:
    """What somebody else's restart looks like from outside: the weights of the start, labelled 0."""
    await server.post("/pause?mode=keep&clear_cache=true")
    await load(server.engine, server.folders[0], 0)
    await server.post("/resume")


@pytest.mark.parametrize("fault", [another_number, no_number, as_restarted])
def test_another_version_behind_our_back_is_found_and_mended(fleet: Fleet, fault: Callable[[Server], Awaitable[None]]) -> None:
    """What it had sampled is an error, or was sampled again; the other replica's requests do not notice."""

    async def work() -> None:
        async with fleet.client() as engine:
            version = await fleet.publish(engine, 1)
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            there = flight.at(1)
            await fault(fleet.servers[1])
            await fleet.pace(0)
            results = await asyncio.gather(*flight.tasks, return_exceptions=True)
            errors = [i for i, result in enumerate(results) if isinstance(result, EngineError)]
            assert errors and set(errors) <= set(there)
            assert "version" in str(results[errors[0]])
            for i, result in enumerate(results):
                assert i in errors or fleet.check(flight.requests[i], result) == {version}
            await both_serve(fleet, engine, version)

    fleet.run(work())


def test_other_weights_under_the_right_label_are_found_by_the_score(fleet: Fleet) -> None:
    """No answer can show it. The run scores a probe after every publish, before it trains on anything of that version."""

    async def work() -> None:
        async with fleet.client() as engine:
            await fleet.servers[1].post("/pause?mode=keep&clear_cache=true")
            await load(fleet.servers[1].engine, fleet.servers[1].folders[3], fleet.version)
            await fleet.servers[1].post("/resume")
            with pytest.raises(EngineError, match="disagree"):
                await engine.score(PROMPT)
            expected = logprobs(fleet.policies[0], PROMPT)
            right, wrong = ((torch.tensor(scores) - expected).abs().max() for _, scores in await engine.canary(PROMPT))
            assert right < TOLERANCE and wrong > FAR
            await both_serve(fleet, engine, await fleet.publish(engine, 0))

    fleet.run(work())


# --- bad updates -----------------------------------------------------------------------------------------------------


def shard_missing(good: Path, bad: Path) -> str:
    tensors = read_file(good)
    write_file({name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}, bad)
    return sha256(bad)


@pytest.mark.parametrize(("spoil", "reason"), [(flipped, "sha256"), (shard_missing, "lacks")])
def test_nothing_of_a_bad_update_is_ever_sampled(
    fleet: Fleet, spoil: Callable[[Path, Path], str], reason: str, tmp_path: Path
) -> None:
    """Requests in flight are errors: nobody knows whether a good update will come. One that comes mends everything."""

    async def work() -> None:
        async with fleet.client() as engine:
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            bad = tmp_path / "bad.safetensors"
            digest = spoil(fleet.servers[0].file(1)[0], bad)
            with pytest.raises(EngineError, match=reason):
                await engine.update_weights(bad, fleet.version + 1, digest)
            before = [await fleet.sampled(engine, number) for number in (0, 1)]
            for result in await asyncio.gather(*flight.tasks, return_exceptions=True):
                assert isinstance(result, EngineError) and "no replica is left" in str(result)
            await fleet.pace(0)
            assert [await fleet.sampled(engine, number) for number in (0, 1)] == before
            await both_serve(fleet, engine, await fleet.publish(engine, 2))

    fleet.run(work())


@pytest.mark.parametrize("times", [1, 2])
def test_an_update_that_one_replica_does_not_get_whole(fleet: Fleet, times: int) -> None:
    """Once: it is done again, while all are paused. Twice: the replica is taken out, loaded, and let in again."""

    async def work() -> None:
        async with fleet.client() as engine:
            versions = [fleet.version]
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            await fleet.servers[1].plant("break_next_load", 7, times)
            versions.append(await fleet.publish(engine, 1))
            await fleet.pace(0)
            for answer in await flight.land():
                assert sorted(set(answer.versions)) == versions
            assert engine.lost == (STREAMS // 2 if times == 2 else 0)
            await both_serve(fleet, engine, versions[-1])

    fleet.run(work())
