"""The real engine behind the real OpenHands: a tiny policy samples every token, and its log-probs are those of its weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.openhands import OpenHands, OpenHandsConfig
from harness.chat import Chat
from harness.engines.embedded import EmbeddedEngine
from harness.protocols import GenerateRequest, Generation
from harness.task import Termination
from harness.trajectory import Trajectory
from harness.verify import remade, versions_back
from tests.agents.expert import SLIM, write_sampler
from tests.agents.support import TASK, Played, Stand, exact, stand
from trainer.weights import read_file, write_file

pytestmark = pytest.mark.timeout(300)
CONTEXT = 16_384
VERSION = 7
TOLERANCE = 1e-4
"""Nats; float32 in another order of summation. Most single wrong tokens in the context would make a larger difference."""


class Watched:
    """One episode's view of the engine; keeps what it was asked and what it said."""

    def __init__(self, engine: EmbeddedEngine, chat: Chat) -> None:
        self.engine, self.chat = engine, chat
        self.requests: list[GenerateRequest] = []
        self.generations: list[Generation] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the engine does."""
        generation = await self.engine.generate(request)
        self.requests.append(request)
        self.generations.append(generation)
        return generation


class Publishing(Watched):
    """New weights arrive while the third turn is asked for."""

    weights: Path

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the engine does."""
        if len(self.requests) == 2:
            await self.engine.update_weights(self.weights, VERSION + 1)
        return await super().generate(request)


class Bench:
    """A model folder, its engine, OpenHands with a slim prompt."""

    def __init__(self, made: Stand, engine: EmbeddedEngine, model: Path) -> None:
        self.stand, self.engine, self.model = made, engine, model

    async def episode(self, name: str, watched: Watched | None = None, **limits: Any) -> Played:
        """One episode, in a sandbox of its own."""
        sandbox = await self.stand.sandboxes.acquire(TASK)
        try:
            return await self.stand.on(sandbox, watched or Watched(self.engine, self.stand.chat), name, **limits)
        finally:
            await sandbox.close()

    def several(self, count: int, **limits: Any) -> list[Played]:
        """At once."""

        async def main() -> list[Played]:
            return list(await asyncio.gather(*(self.episode(f"e{i}", **limits) for i in range(count))))

        return self.stand.run(main())


def bench(model: Path, log: Path) -> Iterator[Bench]:
    """Opened, and closed at the end."""
    agent = OpenHands(OpenHandsConfig(system_prompt=SLIM, stuck_detection=False))
    with stand(Chat(model, ["<|im_end|>"]), agent=agent) as made:
        options = {"slots": 4, "max_len": CONTEXT, "version": VERSION, "threads": 1, "seed": 0, "start_s": 240.0}
        engine = made.run(EmbeddedEngine.launch(model, log, **options))
        try:
            yield Bench(made, engine, model)
        finally:
            made.run(engine.close())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The policy that has learnt to call tools."""
    folder = tmp_path_factory.mktemp("taught")
    yield from bench(write_sampler(folder / "model", seed=0), folder / "engine.log")


def sound(played: Played) -> Trajectory:
    """The episode's only trajectory, with everything proved of it that can be without the weights."""
    t = played.trajectory
    exact([t], played.engine)
    assert [*remade(t), *versions_back(t)] == []
    acted = t.loss_mask
    assert np.isfinite(t.rollout_logprobs[acted]).all()
    assert (t.rollout_logprobs[acted] <= 0.0).all()
    assert t.rollout_logprobs[acted].min() < -0.1, "it was sampled"
    assert len(t.info["calls"]) == t.n_turns == played.session.turns
    return t


def apart(bench: Bench, t: Trajectory) -> float:
    """The largest difference of the recorded log-probs and those of one pass of the engine over the whole, nats."""
    scored = np.array([math.nan, *bench.stand.run(bench.engine.score(t.tokens.tolist()))])
    return float(np.abs(scored - t.rollout_logprobs)[t.loss_mask].max())


@pytest.mark.parametrize(("turns", "count"), [(5, 4), (30, 2)])
def test_sampled_episodes_are_exact_and_score_as_they_were_sampled(taught: Bench, turns: int, count: int) -> None:
    texts = set()
    for played in taught.several(count, max_turns=turns, max_context=CONTEXT):
        assert played.end is Termination.MAX_TURNS, played.end
        t = sound(played)
        assert t.n_turns == turns
        assert set(t.policy_versions[t.loss_mask].tolist()) == {VERSION}
        assert apart(taught, t) < TOLERANCE
        text = taught.stand.chat.decode(t.tokens.tolist())
        assert text.count("Your thought has been logged") + text.count("[Command finished with exit code ") == turns - 1
        texts.add(tuple(t.tokens[t.loss_mask].tolist()))
    assert len(texts) == count, "each has sampled its own"


def test_new_weights_arrive_between_two_turns(taught: Bench) -> None:
    tensors = read_file(taught.model / "model.safetensors", None)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 0.95
    moved = Publishing(taught.engine, taught.stand.chat)
    moved.weights = taught.model.parent / "moved.safetensors"
    write_file(tensors, moved.weights)

    async def main() -> Played:
        try:
            return await taught.episode("moved", moved, max_turns=5, max_context=CONTEXT)
        finally:
            await taught.engine.update_weights(taught.model / "model.safetensors", VERSION)

    t = sound(taught.stand.run(main()))
    by_turn = [set(t.policy_versions[t.turn_ids == turn].tolist()) for turn in range(5)]
    assert by_turn == [{VERSION}] * 2 + [{VERSION + 1}] * 3
    assert apart(taught, t) > 100 * TOLERANCE, "the later turns are not of the old weights"


def test_a_policy_that_says_garbage(tmp_path: Path) -> None:
    opened = bench(write_sampler(tmp_path / "model", seed=1, steps=0), tmp_path / "engine.log")
    for garbage in opened:
        played = garbage.several(8, max_turns=3, max_context=CONTEXT, max_tokens_per_turn=200)
        for one in played:
            assert isinstance(one.end, Termination) or one.end.termination is Termination.MAX_TOKENS_PER_TURN, one.end
            assert apart(garbage, sound(one)) < TOLERANCE
        ends = {one.end for one in played if isinstance(one.end, Termination)}
        assert ends <= {Termination.FINISHED, Termination.MAX_TURNS}
