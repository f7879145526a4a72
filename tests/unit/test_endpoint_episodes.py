"""Whole episodes of a model behind an endpoint: limits are judged, failures of the endpoint are not, nothing stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from agents.tool_loop import ToolLoop, ToolLoopConfig
from harness.endpoint import Endpoint
from harness.endpoint_session import EndpointSession
from harness.episode import Episode, Stage, run_episode
from harness.errors import ConfigError
from harness.protocols import ToolResult
from harness.task import Limits, Score, Task, Termination, Usage
from tests.support import USER, FnAgent, FnEnvironment, WatchedSandboxes, one_turn
from tests.unit.endpoint_support import FULL, HANGS, Server, acts, answer, config_of, refusal

DONE = FnEnvironment(tool_hook=lambda _: ToolResult("bye", done=True), score_hook=lambda: Score(0.5))


def play(script: Sequence[Any], *, agent: Any = None, environment: Any = DONE, **limits: Any) -> tuple[Episode, Server]:
    async def main() -> tuple[Episode, Server]:
        async with Server(script) as server, Endpoint(config_of(server), 4) as endpoint:
            bound = Limits(**{"max_turns": 5} | limits)
            sandboxes: Any = WatchedSandboxes()
            session = partial(EndpointSession, endpoint, bound)
            stage = Stage(environment, agent or ToolLoop(ToolLoopConfig()), sandboxes, bound, session)
            played = await run_episode(stage, Task("train/0", (USER,)), "e1", 3)
            assert [s.closed for s in sandboxes.made] == [1]
            return played, server

    return asyncio.run(main())


def test_an_episode_is_judged_and_says_what_it_used() -> None:
    played, server = play([answer(), acts("{broken", prompt=20), acts(prompt=40, said=7)])
    assert (played.termination, played.reward, played.trajectories) == (Termination.FINISHED, 0.5, ())
    assert played.used == Usage(turns=3, tokens=47, action_tokens=17)
    assert not played.trainable
    told = [message["content"] for message in server.requests[2]["messages"]]
    assert told[-1] == "error: the arguments are not JSON" and "error: call a tool" in told


@pytest.mark.parametrize(
    ("script", "limits", "termination"),
    [
        ([answer()], {"max_turns": 2}, Termination.MAX_TURNS),
        ([answer(finish="length")], {}, Termination.MAX_TOKENS_PER_TURN),
        ([FULL[0]], {}, Termination.MAX_CONTEXT),
        ([answer(prompt=500)], {"max_context": 400}, Termination.MAX_CONTEXT),
        ([HANGS], {"wall_s": 0.3}, Termination.WALL_CLOCK),
    ],
)
def test_a_limit_is_judged(script: Sequence[Any], limits: dict[str, Any], termination: Termination) -> None:
    played, _ = play(script, **limits)
    assert (played.termination, played.reward) == (termination, 0.5)


def test_an_endpoint_that_fails_is_infrastructure_and_no_reward() -> None:
    played, _ = play([acts(), refusal(503, "overloaded")], environment=FnEnvironment())
    assert (played.termination, played.reward) == (Termination.ENGINE_ERROR, None)
    assert "overloaded" in played.error


def test_a_refusal_stops_the_run() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        play([refusal(404, "no such model")])


def test_a_run_shares_the_connections_and_leaves_none() -> None:
    async def main() -> None:
        async with Server([answer()]) as server:
            async with Endpoint(config_of(server), 2) as endpoint:
                sessions = [EndpointSession(endpoint, Limits(), f"e{i}") for i in range(12)]
                await asyncio.gather(*(session.complete([USER]) for session in sessions))
                assert len(server.requests) == 12 and len(server.connections) <= 2
            with pytest.raises(RuntimeError, match="closed"):
                await sessions[0].complete([{"role": "user", "content": "late"}])
            assert endpoint._client is not None and endpoint._client.closed

    asyncio.run(main())


def test_cancellation_leaves_nothing_open() -> None:
    async def main() -> None:
        async with Server([HANGS]) as server, Endpoint(config_of(server), 2) as endpoint:
            bound, sandboxes = Limits(), WatchedSandboxes()
            session = partial(EndpointSession, endpoint, bound)
            stage = Stage(FnEnvironment(), FnAgent(one_turn), sandboxes, bound, session)  # type: ignore[arg-type]
            running = asyncio.create_task(run_episode(stage, Task("train/0", (USER,)), "e1"))
            await server.entered.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await server.left.wait()  # the server has seen its client go
            assert [s.closed for s in sandboxes.made] == [1]
            assert len(server.requests) == 1, "what was cancelled is not asked again"

    asyncio.run(main())
