"""The sampling probe between a real embedded engine and the trainer: right ones pass, planted faults are found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import TrainerConfig
from harness.engines.embedded import EmbeddedEngine
from harness.engines.probe import probe_sampling
from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation
from tests.trainer import support
from trainer.worker import Worker

pytestmark = pytest.mark.usefixtures("rank")
WAIT_S = 120.0
PROMPTS = [list(range(3, 30)), list(range(50, 20, -1)), [9] * 12]


def made(dtype: str = "float32") -> Worker:
    worker = Worker()
    worker.setup(TrainerConfig(dtype=dtype, threads=1, optimizer=support.optimizer()).model_dump())  # type: ignore[arg-type]
    return worker


class Tampered:
    """The engine, to which somebody changes what it is asked for."""

    def __init__(self, engine: EmbeddedEngine, **sampling: Any) -> None:
        self.engine, self.sampling, self.score = engine, sampling, engine.score

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.engine.generate(replace(request, sampling=replace(request.sampling, **self.sampling)))


@pytest.fixture(scope="module")
def serve(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Run some work on an engine that serves `moe` as version 0."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    options = {"slots": 4, "max_len": 256, "version": 0, "threads": 1, "seed": 0, "start_s": WAIT_S}
    with asyncio.Runner() as runner:
        engine = runner.run(EmbeddedEngine.launch(moe, log, **options))
        try:
            yield lambda work: runner.run(asyncio.wait_for(work(engine), WAIT_S))
        finally:
            runner.run(engine.close())


def probe(engine: Any, folder: Path, dtype: str = "float32", **changes: Any) -> Awaitable[dict[str, Any]]:
    """Against the policy of a folder."""
    worker = made(dtype)

    async def trainer(texts: list[list[int]]) -> list[list[float]]:
        return worker.logprobs(texts, model=str(folder))["logprobs"]  # type: ignore[no-any-return]

    options = {"version": 0, "stop": (11,), "max_context": 256, "dtypes": ("float32", dtype)} | changes
    return probe_sampling(engine, trainer, PROMPTS, **options)


def test_a_right_engine_passes(serve: Any, moe: Path) -> None:
    facts = serve(lambda engine: probe(engine, moe))
    assert facts["max_abs"] < 1e-4 and facts["tokens"] > 192


def test_so_does_a_trainer_in_bf16(serve: Any, moe: Path) -> None:
    """Even one whose log-probs differ by nats (`support.SHAPE`)."""
    facts = serve(lambda engine: probe(engine, moe, "bfloat16"))
    assert 1e-3 < facts["mean_abs"] < 0.1 and facts["trainer_dtype"] == "bfloat16"


@pytest.mark.parametrize("temperature", [0.99, 1.01])
def test_another_temperature_is_found(serve: Any, moe: Path, temperature: float) -> None:
    with pytest.raises(EngineError, match="disagree") as caught:
        serve(lambda engine: probe(Tampered(engine, temperature=temperature), moe))
    assert "sampler" in caught.value.hint


def test_a_cold_engine_is_found_in_bf16(serve: Any, moe: Path) -> None:
    with pytest.raises(EngineError, match="in the mean"):
        serve(lambda engine: probe(Tampered(engine, temperature=0.5), moe, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_are_found(serve: Any, tmp_path: Path, dtype: str) -> None:
    folder = support.write_model(tmp_path, support.policy("qwen3_moe", seed=1))
    with pytest.raises(EngineError, match="disagree") as caught:
        serve(lambda engine: probe(engine, folder, dtype))
    assert "weights are other" in caught.value.hint


def test_another_version_is_found(serve: Any, moe: Path) -> None:
    with pytest.raises(EngineError, match="version 0, not 4"):
        serve(lambda engine: probe(engine, moe, version=4))


def test_the_command_scores_the_present_policy_or_a_folders(moe: Path, tmp_path: Path) -> None:
    """The same numbers as the probe of a publish, and as a plain forward; it changes nothing."""
    worker, other = made(), support.policy("qwen3_moe", seed=1)
    folder = support.write_model(tmp_path / "other", other)
    worker.init(str(moe), support.arm(advantage={"id": "batch_norm"}))
    before = support.state(worker.learners)
    texts = [*PROMPTS, [5], [5, 6]]
    present = worker.logprobs(texts)["logprobs"]
    assert [len(row) for row in present] == [len(text) - 1 for text in texts]
    assert present[0] == worker.publish(path=str(tmp_path / "w.safetensors"), probe=PROMPTS[0])["probe"]
    foreign = worker.logprobs(texts, model=str(folder))["logprobs"]
    tokens, n = torch.tensor(PROMPTS[1], dtype=torch.int32), len(PROMPTS[1])
    with torch.no_grad():
        expected = other(tokens, torch.arange(n), [0, n], torch.arange(1, n))[0]
    torch.testing.assert_close(torch.tensor(foreign[1]), expected, atol=1e-5, rtol=0)
    assert abs(foreign[1][0] - present[1][0]) > 1e-3
    assert support.equal(before, support.state(worker.learners))
