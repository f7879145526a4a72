"""Updates through the client while requests stream from two servers: no token is lost, and each one's label is the policy that
sampled it, exactly from the pause on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import groupby, pairwise

import pytest

from harness.engines import vllm_replica
from harness.engines.stream import Stream
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import KvMode
from tests.contracts.engine_support import STEP_S, TOLERANCE, apart
from tests.vllm.support import WAIT_S, Fleet, Flight

pytestmark = pytest.mark.timeout(1_500)
STREAMS, TOKENS, UPDATES, TOKENS_BETWEEN = 8, 600, 20, 6


class Pauses:
    """How far each stream was at each pause: seen when a replica is about to go on and all that it had sampled has come."""

    def __init__(self, fleet: Fleet, engine: VllmEngine) -> None:
        self.fleet, self.engine = fleet, engine
        self.edges: dict[Stream, list[int]] = {}
        self.before = [0] * len(engine.replicas)

    async def begin(self) -> None:
        """From here on. Nothing may run."""
        for number, replica in enumerate(self.engine.replicas):
            self.before[number] = await self.fleet.sampled(self.engine, number)
            replica.resume = partial(self.resume, number, replica.resume)  # type: ignore[method-assign]

    async def resume(self, number: int, resume: Callable[[], Awaitable[None]]) -> None:
        """Take note, then go on."""
        streams = self.engine.replicas[number]._streams
        async with asyncio.timeout(WAIT_S):
            while await self.fleet.sampled(self.engine, number) - self.before[number] != sum(len(s.ids) for s in streams):
                pass
        for stream in streams:
            self.edges.setdefault(stream, []).append(len(stream.ids))
        await resume()


async def fly(fleet: Fleet, engine: VllmEngine) -> tuple[Flight, Pauses, list[int]]:
    """Streams through many updates, and the versions that there were."""
    versions = [fleet.version]
    flight, pauses = Flight(fleet, engine, STREAMS, TOKENS), Pauses(fleet, engine)
    await fleet.pace(STEP_S)
    try:
        await pauses.begin()
        flight.start()
        for update in range(UPDATES):
            await flight.grow(TOKENS_BETWEEN)
            versions.append(await fleet.publish(engine, (update + 1) % 4))
    finally:
        await fleet.pace(0)
    await asyncio.gather(*flight.tasks)
    for number in range(len(engine.replicas)):
        whole = pauses.before[number] + TOKENS * STREAMS // 2
        assert await fleet.sampled(engine, number, whole) == whole, "none twice"
    return flight, pauses, versions


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_every_token_is_labelled_by_the_policy_that_sampled_it(
    fleet: Fleet, kv: KvMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `keep`, later tokens have seen older policies' keys and values: only their labels can be judged.

    One token per event: in larger ones the last tokens before a pause come after it, and could not be counted at the pause.
    """
    monkeypatch.setattr(vllm_replica, "TOKENS_PER_EVENT", 1)

    async def work() -> None:
        async with fleet.client(kv=kv) as engine:
            flight, pauses, versions = await fly(fleet, engine)
            assert engine.lost == 0
            edges = {tuple(stream.ids): ends for stream, ends in pauses.edges.items()}
            for asked, task in zip(flight.requests, flight.tasks, strict=True):
                answer = await task
                told = [(version, len(list(group))) for version, group in groupby(answer.versions)]
                ends = [0, *edges[tuple(answer.token_ids)], TOKENS]
                assert told == [(version, b - a) for version, (a, b) in zip(versions, pairwise(ends), strict=True)]
                if kv == "recompute":
                    fleet.check(asked, answer)
                first = apart(fleet.policies[0], asked.token_ids, answer.token_ids, answer.logprobs)[: ends[1] + 1]
                assert first[:-1].max() < TOLERANCE < first[-1]

    fleet.run(work())
