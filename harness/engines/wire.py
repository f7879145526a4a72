"""The engine contract's JSON (`docs/engine.md`): requests are written here, answers are read here, whole or in pieces.

Flows in: a `GenerateRequest`, or what an engine answered. Flows out: the body to send, tokens with log-probs, versions, scores.
What is inexact is an `EngineError`.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation, SamplingContract

GENERATE = "/inference/v1/generate"
NO_LOGPROB = -9_999.0
"""vLLM writes this where it has no log-prob, or one that is not finite."""


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """What asks for a continuation."""
    params: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        **asdict(request.sampling),
        "stop_token_ids": list(request.stop_token_ids),
        "logprobs": 0,
        "detokenize": False,
    }
    if request.seed is not None:
        params["seed"] = request.seed
    if request.routed:
        params["routed_experts_prompt_start"] = request.routed
    return {"token_ids": request.token_ids, "sampling_params": params, "request_id": request.request_id}


def score_body(token_ids: list[int]) -> dict[str, Any]:
    """What asks for the log-probs of a text."""
    return {"token_ids": token_ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}}


def generation(answer: Mapping[str, Any]) -> Generation:
    """A whole answer. Raises `EngineError` unless it is finished and exact."""
    try:
        choice = answer["choices"][0]
        ids, logprobs = sampled(choice)
        versions = versions_of(choice)
        sampling = None if answer.get("sampling") is None else _sampling(answer["sampling"])
        finish = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the engine's answer is incomplete: {error!r}") from error
    if finish not in ("stop", "length"):
        raise EngineError(f"the engine ended with finish_reason={finish!r}")
    if not ids or len(ids) != len(versions):
        raise EngineError(f"the engine answered {len(ids)} tokens and {len(versions)} versions")
    return Generation(ids, logprobs, versions, finish, sampling)


def sampled(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and their log-probs, of a whole choice or of a piece. Raises `EngineError`, `KeyError`, `TypeError`."""
    ids = [int(token) for token in choice["token_ids"]]
    entries = choice["logprobs"]["content"]
    logprobs = [float(entry["logprob"]) for entry in entries]
    if len(ids) != len(logprobs):
        raise EngineError(f"the engine answered {len(ids)} tokens and {len(logprobs)} log-probs")
    if any(entry.get("token_id", token) != token for entry, token in zip(entries, ids, strict=True)):
        raise EngineError("the engine answered the log-probs of other tokens")
    if not all(NO_LOGPROB < x <= 1e-4 for x in logprobs):
        raise EngineError("the engine answered a log-prob that is none")
    return ids, logprobs


def versions_of(choice: Mapping[str, Any]) -> list[int]:
    """One version per token, from spans that tile the output. Raises `EngineError`, `KeyError`, `TypeError`, `ValueError`."""
    versions: list[int] = []
    for span in choice["weight_versions"]:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise EngineError(f"a version span covers {span['start']} to {span['end']} after token {len(versions)}")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if versions and min(versions) < 0:
        raise EngineError("the engine answered a version below 0")
    return versions


def experts_of(choice: Mapping[str, Any], request: GenerateRequest, sampled: int) -> npt.NDArray[np.integer[Any]] | None:
    """Where a mixture's tokens were sent, if the engine tells it. Raises `EngineError` unless it is whole.

    A token's experts of one layer all differ: an array that nobody filled is found out.
    """
    packed = choice.get("routed_experts")
    if packed is None:
        return None
    try:
        experts: npt.NDArray[np.integer[Any]] = np.load(io.BytesIO(base64.b64decode(packed, validate=True)), allow_pickle=False)
    except (ValueError, TypeError, EOFError) as error:
        raise EngineError(f"the engine's routed experts cannot be read: {error!r}") from error
    rows = len(request.token_ids) + sampled - 1 - request.routed
    if experts.ndim != 3 or experts.shape[0] != rows or not np.issubdtype(experts.dtype, np.integer):
        raise EngineError(f"the engine answered routed experts {experts.dtype}{list(experts.shape)} for {rows} tokens")
    if (np.diff(np.sort(experts, axis=-1)) == 0).any():
        raise EngineError("the engine answered the same expert twice for one token and layer")
    return experts


def scores(answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
    """log p of tokens 1.. as an engine answered it, [L-1]."""
    try:
        rows = answer["prompt_logprobs"]
        found = [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the engine's scores are incomplete: {error!r}") from error
    if not all(math.isfinite(x) and x > NO_LOGPROB for x in found):
        raise EngineError("the engine answered a score that is not finite")
    return found


def _sampling(used: dict[str, Any]) -> SamplingContract:
    """What the engine says it has used: every setting, each a number."""
    names = {field.name for field in fields(SamplingContract)}
    if set(used) != names or not all(type(value) in (int, float) for value in used.values()):
        raise ValueError(f"sampling must give a number for each of {', '.join(sorted(names))}; it is {used}")
    return SamplingContract(**used)
