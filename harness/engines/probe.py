"""Whether an engine samples from the policy that the trainer trains, with the samplers that were asked for and no others.

Flows in: log-probs of the same tokens from both sides. Flows out: how far apart they are, judged by both number types, or an
`EngineError` that names the likely cause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation, InferenceEngine

Scorer = Callable[[list[list[int]]], Awaitable[list[list[float]]]]
"""The trainer: texts -> log p of their tokens 1.., nats."""

SEQUENCES = 8
TOKENS = 48
"""Of each sequence, at most."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Largest |log-prob difference| allowed, nats: of any token, and in the mean."""

    max_abs: float
    mean_abs: float


LIMITS = {
    "float32": Limit(1e-3, 1e-3),
    "bfloat16": Limit(math.inf, 0.1),
    "float16": Limit(math.inf, 0.1),
}
"""By number type; the coarser of two sides decides. In bf16 rounding alone moves single tokens of a mixture by up to 2.6, as
another expert is chosen, and the mean by 0.02 to 0.05."""


@dataclass(frozen=True, slots=True)
class Apart:
    """How far the log-probs of two sides are apart."""

    max_abs: float
    mean_abs: float
    tokens: int
    dtypes: tuple[str, str]
    """Number types of the two sides."""

    @property
    def limit(self) -> Limit:
        """What is allowed."""
        return max((LIMITS[dtype] for dtype in self.dtypes), key=lambda limit: limit.mean_abs)

    @property
    def within(self) -> bool:
        """Whether that is no more than rounding."""
        return self.max_abs <= self.limit.max_abs and self.mean_abs <= self.limit.mean_abs

    def __str__(self) -> str:
        limit = self.limit
        allowed = f"{limit.mean_abs:g} in the mean" if math.isinf(limit.max_abs) else f"{limit.max_abs:g}"
        return (
            f"apart by up to {self.max_abs:.2e} nats, {self.mean_abs:.2e} in the mean, on {self.tokens} tokens"
            f" ({' and '.join(self.dtypes)}: allowed is {allowed})"
        )


def compare(ours: Sequence[float], theirs: Sequence[float], dtypes: tuple[str, str]) -> Apart:
    """Log-probs of the same tokens, [L] each. What is not finite is infinitely far."""
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, apart)):
        return Apart(math.inf, math.inf, len(apart), dtypes)
    return Apart(max(apart, default=0.0), math.fsum(apart) / max(1, len(apart)), len(apart), dtypes)


async def probe_sampling(
    engine: InferenceEngine,
    trainer: Scorer,
    prompts: Sequence[list[int]],
    *,
    version: int,
    stop: tuple[int, ...],
    max_context: int,
    dtypes: tuple[str, str],
) -> dict[str, Any]:
    """Let the engine sample with all samplers neutral, and the trainer score the same tokens at zero staleness.

    `dtypes`: the engine's and the trainer's. Returns the facts. Raises `EngineError` if a token is of another version or the
    two sides are further apart than rounding can bring them.
    """
    length = min(TOKENS, max_context // 2)
    requests = [
        GenerateRequest(prompts[n % len(prompts)][: max_context - length], length, ends, seed=n, request_id=f"probe-{n}/0")
        for n, ends in zip(range(SEQUENCES), cycle([stop, ()]))  # turns as in a run, and long ones
    ]
    generations = await _all(engine, requests)
    if wrong := {v for g in generations for v in g.versions} - {version}:
        raise EngineError(
            f"the engine samples with version {min(wrong)}, not {version}",
            hint="a server that somebody else started must serve the model of model.path as version 0",
        )
    texts = [request.token_ids + g.token_ids for request, g in zip(requests, generations, strict=True)]
    scored = await trainer(texts)
    sampled = [x for g in generations for x in g.logprobs]
    trained = [x for g, row in zip(generations, scored, strict=True) for x in row[-len(g.token_ids) :]]
    apart = compare(sampled, trained, dtypes)
    if not apart.within:
        raise EngineError(
            f"engine and trainer disagree on tokens that the engine has sampled: {apart}",
            hint=await _cause(engine, texts[0], scored[0], dtypes),
        )
    return {
        "max_abs": apart.max_abs,
        "mean_abs": apart.mean_abs,
        "tokens": apart.tokens,
        "engine_dtype": dtypes[0],
        "trainer_dtype": dtypes[1],
        "version": version,
    }


async def _all(engine: InferenceEngine, requests: list[GenerateRequest]) -> list[Generation]:
    """Together, as in a run. The first failure is raised and ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in requests]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _cause(engine: InferenceEngine, text: list[int], trained: list[float], dtypes: tuple[str, str]) -> str:
    """The weights, if the engine also scores a given text otherwise; else what it does between logits and tokens."""
    try:
        if not compare(await engine.score(text), trained, dtypes).within:
            return "the weights are other ones than the trainer's: look at what the engine was started with (model.path)"
        found = "the weights are the same, so another sampler is at work than was asked for"
    except EngineError as error:
        found = f"probably another sampler is at work than was asked for; the weights are not known ({error.message})"
    return (
        f"{found}: look at the server's --generation-config, --logprobs-mode and whatever else changes sampling parameters"
        " (min_tokens, penalties)"
    )
