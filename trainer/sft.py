"""Supervised warm start: next-token loss on the action spans of demonstrations, after and beside text that teaches a skill.

Flows in: stored trajectories, a corpus function, settings. Flows out: a moved policy and the curve. Two phases:

1. corpus    only the skill text, until its smoothed loss is below `corpus_loss`; a skill that does not come stops the run
2. imitation `epochs` over the demonstrations, with the skill text beside them at weight `corpus_mix`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from harness.errors import ConfigError
from harness.registry import load_object
from harness.trajectory import Trajectory
from trainer import parallel
from trainer.batch import plan
from trainer.model import Policy
from trainer.optimizer import Optimizer

Corpus = Callable[[random.Random], list[tuple[str, bool]]]
"""One text as (piece, whether it carries loss)."""
SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens [n] int32 and the loss weight of each [n] fp32; the first token has weight 0."""

    tokens: np.ndarray
    weights: np.ndarray


def demonstration(trajectory: Trajectory, observation_weight: float) -> Example:
    """Weight 1 on action tokens, `observation_weight` on the rest."""
    weights = np.where(trajectory.loss_mask, 1.0, observation_weight).astype(np.float32)
    weights[0] = 0.0
    return Example(trajectory.tokens, weights)


def corpus_example(pieces: list[tuple[str, bool]], tokenizer: Tokenizer) -> Example:
    """Weight 1 on the tokens of the pieces that carry loss."""
    tokens: list[int] = []
    weights: list[float] = []
    for text, loss in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        weights += [float(loss)] * len(ids)
    weights[0] = 0.0
    return Example(np.asarray(tokens, np.int32), np.asarray(weights, np.float32))


def weighted_loss(policy: Policy, examples: Sequence[Example], budget: int, scale: float = 1.0) -> float:
    """Backward of scale * (weighted mean negative log-likelihood over all ranks' examples); the mean. A collective."""
    norm = max(float(sum(e.weights.sum() for e in examples)), 1e-9)
    device = parallel.device()
    loss_sum = 0.0
    for indices in plan([len(e.tokens) for e in examples], dist.get_world_size(), budget)[dist.get_rank()]:
        chosen = [examples[i] for i in indices] or [Example(np.zeros(2, np.int32), np.zeros(2, np.float32))]
        tokens = torch.from_numpy(np.concatenate([e.tokens for e in chosen])).to(device)
        weights = torch.from_numpy(np.concatenate([e.weights for e in chosen])).to(device)
        positions = torch.from_numpy(np.concatenate([np.arange(len(e.tokens)) for e in chosen])).to(device)
        boundaries = [0, *np.cumsum([len(e.tokens) for e in chosen]).tolist()]
        where = weights.nonzero()[:, 0]
        logprobs, _ = policy(tokens, positions, boundaries, where)
        loss: Tensor = -(logprobs * weights[where]).sum() / norm
        (loss * scale * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
    return parallel.total(loss_sum)


def train(
    policy: Policy,
    demonstrations: Sequence[Trajectory],
    settings: dict[str, Any],
    source: Path,
    *,
    budget: int,
    seed: int,
) -> dict[str, Any]:
    """Both phases; `settings` holds the fields of `SftConfig`. Raises `ConfigError` when the skill gate fails. A collective."""
    rng = random.Random(f"{seed}/sft")
    batch = settings["batch"]
    report: dict[str, Any] = {}
    draw: Callable[[int], list[Example]] | None = None
    if settings.get("corpus"):
        corpus: Corpus = load_object(settings["corpus"])
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))

        def draw(n: int) -> list[Example]:
            return [corpus_example(corpus(rng), tokenizer) for _ in range(n)]

        report |= _learn_corpus(policy, draw, settings, budget)
    examples = [demonstration(t, settings["observation_weight"]) for t in demonstrations]
    optimizer = Optimizer(policy, settings["optimizer"])
    steps = settings["epochs"] * max(1, len(examples) // batch)
    order: list[int] = []
    smooth = None
    for step in range(steps):
        if len(order) < batch:
            order = list(range(len(examples)))
            rng.shuffle(order)
        chosen, order = [examples[i] for i in order[:batch]], order[batch:]
        loss = weighted_loss(policy, chosen, budget)
        if draw is not None and settings["corpus_mix"]:
            weighted_loss(policy, draw(settings["corpus_batch"]), budget, settings["corpus_mix"])
        optimizer.step(decay(step, steps, settings["decay"]))
        smooth = loss if smooth is None else SMOOTHING * smooth + (1 - SMOOTHING) * loss
    return report | {"steps": steps, "loss": smooth, "demonstrations": len(examples)}


def _learn_corpus(
    policy: Policy, draw: Callable[[int], list[Example]], settings: dict[str, Any], budget: int
) -> dict[str, Any]:
    optimizer = Optimizer(policy, settings["optimizer"] | {"warmup_steps": settings["corpus_warmup"]})
    smooth = None
    for step in range(1, settings["corpus_max_steps"] + 1):
        loss = weighted_loss(policy, draw(settings["batch"]), budget)
        optimizer.step()
        smooth = loss if smooth is None else SMOOTHING * smooth + (1 - SMOOTHING) * loss
        if smooth < settings["corpus_loss"]:
            return {"corpus_steps": step, "corpus_loss": smooth}
    raise ConfigError(
        f"gate `skill`: after {settings['corpus_max_steps']} steps the corpus loss is {smooth:.3f}, not below "
        f"{settings['corpus_loss']}: the warm policy would lack the skill that RL is to sharpen",
        hint="take another seed, or raise sft.corpus_max_steps",
    )


def decay(step: int, steps: int, share: float) -> float:
    """Learning-rate factor: 1, then linearly towards 0 over the last `share` of the steps."""
    left = (steps - step) / max(1.0, share * steps)
    return min(1.0, left) if share else 1.0
