"""Where a mixture of experts sent each token: read from the engine, kept over turns, stored with the trajectory."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.chat import Chat
from harness.engines.vllm import VllmEngine
from harness.engines.wire import experts_of
from harness.errors import EngineError, InvariantError
from harness.protocols import GenerateRequest, Generation
from harness.trajectory import Trajectory
from tests.support import USER, PlayedEngine, Raw, session_of
from tests.unit.vllm_support import PROMPT, ask, engine_test
from tests.vllm.fake_replica import FakeReplica, event

LAYERS, TOP_K, EXPERTS = 3, 2, 50


def sent(start: int, stop: int) -> np.ndarray[Any, Any]:
    """Made up: [stop - start, layers, top k] of the tokens at these positions."""
    position, layer, k = np.ogrid[start:stop, :LAYERS, :TOP_K]
    return ((position + 7 * layer + 11 * k) % EXPERTS).astype(np.uint8)


def packed(experts: np.ndarray[Any, Any]) -> str:
    with io.BytesIO() as file:
        np.save(file, experts)
        return base64.b64encode(file.getvalue()).decode()


def request(prompt: int = 10, routed: int = 0) -> GenerateRequest:
    return GenerateRequest([1] * prompt, 20, (), routed=routed)


def test_all_tokens_but_the_last_are_read_from_where_the_request_says() -> None:
    found = experts_of({"routed_experts": packed(sent(4, 14))}, request(10, 4), 5)
    np.testing.assert_array_equal(found, sent(4, 14))
    assert experts_of({"routed_experts": None}, request(), 5) is None
    assert experts_of({}, request(), 5) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (packed(sent(0, 15)), "for 14 tokens"),
        (packed(sent(0, 13)), "for 14 tokens"),
        (packed(sent(0, 14)[:, 0]), "for 14 tokens"),
        (packed(sent(0, 14).astype(np.float32)), "float32"),
        (packed(np.zeros_like(sent(0, 14))), "same expert twice"),
        ("no base64!", "cannot be read"),
        (base64.b64encode(b"no array").decode(), "cannot be read"),
        ("", "cannot be read"),
        (5, "cannot be read"),
    ],
)
def test_what_is_not_whole_is_an_engine_error(answer: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        experts_of({"routed_experts": answer}, request(), 5)


def test_the_client_reads_them_also_after_a_loss() -> None:
    """The second attempt's prompt holds what the first had sampled: its answer covers all."""

    async def test(engine: VllmEngine, fakes: list[FakeReplica]) -> None:
        def with_experts(n: int, events: list[dict[str, Any]]) -> list[bytes]:
            choice = events[0]["choices"][0]
            if choice["finish_reason"]:
                choice["routed_experts"] = packed(sent(2, len(PROMPT) + 40 - 1))
            return list(map(event, events))

        for fake in fakes:
            fake.spoil = with_experts
        fakes[0].die_at = fakes[1].die_at = [7]
        generation = await engine.generate(replace(ask(), routed=2))
        np.testing.assert_array_equal(generation.experts, sent(2, len(PROMPT) + 40 - 1))
        bodies = [body["sampling_params"] for fake in fakes for body in fake.requests]
        assert len(bodies) > 1 and all(params["routed_experts_prompt_start"] == 2 for params in bodies)

    engine_test(2, test)


class Routed(PlayedEngine):
    """Says where the tokens went, in those turns in which it does."""

    silent: tuple[int, ...] = ()
    turn = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        self.turn += 1
        if self.turn in self.silent:
            return generation
        return replace(generation, experts=sent(request.routed, len(request.token_ids) + len(generation.token_ids) - 1))


@pytest.mark.parametrize("silent", [(), (1,), (2,), (1, 2, 3)])
def test_a_trajectory_has_those_of_all_its_turns(chat: Chat, silent: tuple[int, ...], tmp_path: Path) -> None:
    engine = Routed(chat, [Raw([*chat.encode(text), chat.stop_ids[0]]) for text in ("one", "two", "three")])
    engine.silent = silent
    session = session_of(chat, engine)

    async def play() -> None:
        messages = [USER]
        for _ in range(3):
            reply = await session.complete(messages, [])
            messages += [reply.message(), {"role": "user", "content": "go on"}]

    asyncio.run(play())
    (made,) = session.trajectories("t", {})
    made.save(tmp_path / "t.parquet")
    read = Trajectory.load(tmp_path / "t.parquet")
    np.testing.assert_array_equal(read.tokens, made.tokens)
    if silent == (1, 2, 3):
        assert made.experts is None and read.experts is None
        return
    np.testing.assert_array_equal(made.experts, sent(0, len(made) - 1))
    np.testing.assert_array_equal(read.experts, made.experts)


def test_more_rows_than_tokens_are_refused() -> None:
    one = np.zeros(1, np.int32)
    arrays = {"turn_ids": one - 1, "rollout_logprobs": np.full(1, np.nan, np.float32), "policy_versions": one - 1}
    with pytest.raises(InvariantError, match="experts has shape"):
        Trajectory("e", "t", one, **arrays, experts=sent(0, 2).astype(np.int32))  # type: ignore[arg-type]
