"""Real vLLM servers that are killed, in mid-stream and in mid-update, and that come back, with or without our doing."""

from __future__ import annotations

import signal

import pytest

from harness.engines import vllm
from harness.engines.vllm import VllmEngine
from harness.errors import EngineError
from tests.contracts.engine_support import STEP_S, request
from tests.vllm.support import PROMPT, Fleet, Flight, both_serve, until

pytestmark = [pytest.mark.timeout(1_500), pytest.mark.usefixtures("mended")]
STREAMS, TOKENS = 8, 400


def test_killed_in_mid_stream_its_requests_go_on_and_it_comes_back(fleet: Fleet) -> None:
    """The process with the model dies: vLLM then ends every stream with [DONE], as if all were well."""

    async def work() -> None:
        async with fleet.client(handles=True) as engine:
            versions, start = [fleet.version], await fleet.sampled(engine, 1)
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            moved, received = flight.at(0), flight.received(0)
            fleet.servers[0].signal(signal.SIGKILL, worker=True)
            await until(lambda: engine.router.lanes[0].state == "out")
            versions.append(await fleet.publish(engine, 1))
            await fleet.pace(0, 1)
            answers = await flight.land()
            assert engine.lost >= len(moved) == STREAMS // 2
            assert all(set(answer.versions) <= set(versions) for answer in answers)
            begun = [answers[i].token_ids for i in moved]
            assert all(any(ids == whole[: len(ids)] for whole in begun) for ids in received), "they went on from there"
            sampled = await fleet.sampled(engine, 1) - start
            assert sampled <= TOKENS * STREAMS - sum(map(len, received)), "nothing that had come was sampled again"
            while engine.router.lanes[0].state != "open":  # a replica that let traffic in too early would be found out here
                for answer in await Flight(fleet, engine, 1, 50).start().land():
                    assert set(answer.versions) == {versions[-1]}
            await both_serve(fleet, engine, versions[-1])

    fleet.run(work())


def test_killed_in_an_update_then_started_by_somebody_else(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one takes the update and its requests. A client that has not looked meanwhile finds version 0 in its answer."""

    async def work() -> None:
        async with fleet.client() as engine:
            versions = [fleet.version]
            unaware = VllmEngine([fleet.servers[1].process.url], fleet.version)
            path, digest = fleet.servers[1].file(0)
            await unaware.update_weights(path, fleet.version, digest)
            await fleet.pace(STEP_S)
            flight = Flight(fleet, engine, STREAMS, TOKENS).start()
            await flight.grow(12)
            await fleet.servers[1].plant("die_in_next_load", 7)
            versions.append(await fleet.publish(engine, 1))
            assert [lane.state for lane in engine.router.lanes] == ["open", "out"]
            await fleet.pace(0, 0)
            for answer in await flight.land():
                assert sorted(set(answer.versions)) == versions
            assert engine.lost >= STREAMS // 2
        try:
            await fleet.servers[1].process.restart()
            with pytest.raises(EngineError, match=r"of versions \[\(0, 20\)\]"):
                await unaware.generate(request(PROMPT, 20))
            asked = request(PROMPT, 20)
            assert fleet.check(asked, await unaware.generate(asked)) == {versions[0]}
        finally:
            await unaware.close()

    monkeypatch.setattr(vllm, "POLL_S", 1e6)
    fleet.run(work())
