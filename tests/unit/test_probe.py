"""The sampling probe's arithmetic and its verdicts, on an engine that is a function."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.engines.probe import LIMITS, SEQUENCES, TOKENS, compare, probe_sampling
from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation, SamplingContract

FP32 = ("float32", "float32")
STOP = 7


def logprob(text: list[int], at: int) -> float:
    """The policy: of token `at` of a text."""
    return -0.01 * (1 + (31 * text[at] + 17 * text[at - 1] + at) % 200)


async def trainer(texts: list[list[int]]) -> list[list[float]]:
    return [[logprob(text, at) for at in range(1, len(text))] for text in texts]


@dataclass
class Engine:
    """Tokens from the request's seed; `sampled` and `scored` are added to their log-probs."""

    sampled: Callable[[int], float] = lambda number: 0.0
    scored: float = 0.0
    versions: Callable[[int], int] = lambda number: 3
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        text = list(request.token_ids)
        ids: list[int] = []
        while len(ids) < request.max_tokens and not set(ids) & set(request.stop_token_ids):
            assert request.seed is not None
            ids.append((13 * request.seed + 5 * len(ids)) % 97)
        text += ids
        first = len(request.token_ids)
        logprobs = [logprob(text, first + n) + self.sampled(n) for n in range(len(ids))]
        versions = [self.versions(n) for n in range(len(ids))]
        return Generation(ids, logprobs, versions, "stop" if ids[-1] in request.stop_token_ids else "length")

    async def score(self, token_ids: list[int]) -> list[float]:
        return [x + self.scored for x in (await trainer([token_ids]))[0]]


def probe(engine: Any, dtypes: tuple[str, str] = FP32, max_context: int = 1_000, scorer: Any = trainer) -> dict[str, Any]:
    prompts = [list(range(10, 60)), list(range(30, 200))]
    work = probe_sampling(engine, scorer, prompts, version=3, stop=(STOP,), max_context=max_context, dtypes=dtypes)
    return asyncio.run(work)


def test_the_facts() -> None:
    engine = Engine(lambda n: 5e-4 if n == 2 else 0.0)
    facts = probe(engine)
    assert set(facts) == {"max_abs", "mean_abs", "tokens", "engine_dtype", "trainer_dtype", "version"}
    assert facts["max_abs"] == pytest.approx(5e-4) and facts["mean_abs"] == pytest.approx(5e-4 * SEQUENCES / facts["tokens"])
    assert facts["version"] == 3 and facts["tokens"] >= SEQUENCES // 2 * TOKENS


def test_it_asks_for_neutral_samplers_distinct_seeds_and_several_prompts() -> None:
    engine = Engine()
    probe(engine)
    assert len(engine.requests) == SEQUENCES
    assert all(request.sampling == SamplingContract() and request.sampling.temperature == 1 for request in engine.requests)
    assert len({request.seed for request in engine.requests}) == len({r.request_id for r in engine.requests}) == SEQUENCES
    assert len({tuple(request.token_ids) for request in engine.requests}) == 2
    assert {request.stop_token_ids for request in engine.requests} == {(STOP,), ()}


@pytest.mark.parametrize("max_context", [2, 3, 60, 97, 128])
def test_it_fits_into_a_short_context(max_context: int) -> None:
    engine = Engine()
    probe(engine, max_context=max_context)
    for request in engine.requests:
        assert request.token_ids and request.max_tokens >= 1
        assert len(request.token_ids) + request.max_tokens <= max_context


def test_one_token_is_enough_in_fp32() -> None:
    with pytest.raises(EngineError, match=r"disagree.*up to 2\.00e-03.*float32 and float32: allowed is 0.001"):
        probe(Engine(lambda n: 2e-3 if n == 5 else 0.0))


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")])
def test_coarser_types_are_judged_by_their_mean(dtypes: tuple[str, str]) -> None:
    facts = probe(Engine(lambda n: 2.6 if n == 0 else 0.0), dtypes)
    assert facts["max_abs"] > 2.5 and facts["mean_abs"] < 0.1
    with pytest.raises(EngineError, match=r"1\.20e-01 in the mean.*allowed is 0.1 in the mean"):
        probe(Engine(lambda n: -0.12), dtypes)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtypes", [FP32, ("bfloat16", "bfloat16")])
def test_what_is_no_number_is_infinitely_far(odd: float, dtypes: tuple[str, str]) -> None:
    async def scorer(texts: list[list[int]]) -> list[list[float]]:
        return [[*row[:-1], odd] for row in await trainer(texts)]

    with pytest.raises(EngineError, match="up to inf"):
        probe(Engine(), dtypes, scorer=scorer)


def test_the_hint_tells_samplers_from_weights() -> None:
    with pytest.raises(EngineError) as caught:
        probe(Engine(lambda n: 0.5))
    for word in ("sampler", "--generation-config", "--logprobs-mode"):
        assert word in caught.value.hint
    with pytest.raises(EngineError) as caught:
        probe(Engine(lambda n: 0.5, scored=0.5))
    assert "weights are other" in caught.value.hint and "model.path" in caught.value.hint


def test_an_engine_that_does_not_score_is_still_told_what_was_found() -> None:
    class Mute(Engine):
        async def score(self, token_ids: list[int]) -> list[float]:
            raise EngineError("HTTP 400: min_tokens is too large")

    with pytest.raises(EngineError, match="disagree") as caught:
        probe(Mute(lambda n: 0.5))
    assert "sampler" in caught.value.hint and "min_tokens is too large" in caught.value.hint


def test_every_token_is_of_the_version_that_is_expected() -> None:
    with pytest.raises(EngineError, match="version 2, not 3"):
        probe(Engine(versions=lambda n: 3 if n < 9 else 2))


def test_a_lost_sequence_is_the_error_itself() -> None:
    """Not a group of errors, and no other request goes on behind it."""
    ended = 0

    class Failing(Engine):
        async def generate(self, request: GenerateRequest) -> Generation:
            nonlocal ended
            if request.seed == 3:
                raise EngineError("lost")
            try:
                await asyncio.Event().wait()
            finally:
                ended += 1
            raise AssertionError

    with pytest.raises(EngineError, match="lost"):
        probe(Failing())
    assert ended == SEQUENCES - 1


def test_every_number_type_of_the_configuration_has_a_limit() -> None:
    from typing import get_args

    from harness.config import TrainerConfig
    from harness.engines.vllm_launch import VllmServer

    for model in (TrainerConfig, VllmServer):
        assert set(get_args(model.model_fields["dtype"].annotation)) <= set(LIMITS)


def test_nothing_to_compare_is_no_difference_and_a_lost_token_is_an_error() -> None:
    assert compare([], [], FP32).within
    with pytest.raises(ValueError):
        compare([0.0], [0.0, 0.0], FP32)
