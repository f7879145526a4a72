"""Supervised warm start: next-token loss on the action spans of demonstrations, after and beside text that teaches a skill.

Flows in: stored trajectories, a corpus function, settings. Flows out: a moved policy and the curve. Two phases:

1. corpus      only the skill text, a curriculum of levels; a skill that does not come stops the run
2. imitation   `epochs` over the demonstrations, with the skill text beside them at weight `corpus_mix`
"""

from __future__ import annotations

import math
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

Corpus = Callable[[random.Random, int], list[tuple[str, bool]]]
"""(random numbers, level) -> one text as (piece, whether it carries loss)."""
SMOOTHING = 0.9
MIX_BATCH = 16
"""Skill texts beside each batch of demonstrations."""


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
    policy: Policy, demonstrations: Sequence[Trajectory], settings: dict[str, Any], source: Path, *, budget: int, seed: int
) -> dict[str, Any]:
    """Both phases; `settings` holds the fields of `SftConfig`. Raises `ConfigError` when the skill gate fails. A collective."""
    rng = random.Random(f"{seed}/sft")
    report: dict[str, Any] = {}
    skill: Skill | None = None
    if settings.get("corpus"):
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        skill = Skill(load_object(settings["corpus"]), tokenizer, random.Random(f"{seed}/corpus"))
        report |= teach(policy, skill, settings, budget)
    examples = [demonstration(t, settings["observation_weight"]) for t in demonstrations]
    optimizer = Optimizer(policy, settings["optimizer"])
    batch = min(settings["batch"], len(examples))
    steps = settings["epochs"] * (len(examples) // batch) if examples else 0
    order: list[int] = []
    smooth = 0.0
    for step in range(steps):
        if len(order) < batch:
            order = list(range(len(examples)))
            rng.shuffle(order)
        chosen, order = [examples[i] for i in order[:batch]], order[batch:]
        loss = weighted_loss(policy, chosen, budget)
        smooth = loss if step == 0 else SMOOTHING * smooth + (1 - SMOOTHING) * loss
        if skill is not None and settings["corpus_mix_levels"]:
            mixed = skill.draw(MIX_BATCH, settings["corpus_mix_levels"])
            weighted_loss(policy, mixed, budget, settings["corpus_mix"])
        optimizer.step(decay(step, steps, settings["decay"]))
    return report | {"steps": steps, "loss": smooth, "demonstrations": len(examples)}


class Skill:
    """Texts of a corpus as examples."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._corpus, self._tokenizer, self._rng = corpus, tokenizer, rng

    def draw(self, n: int, levels: Sequence[int]) -> list[Example]:
        """`n` texts of random levels."""
        return [corpus_example(self._corpus(self._rng, self._rng.choice(levels)), self._tokenizer) for _ in range(n)]


def teach(policy: Policy, skill: Skill, settings: dict[str, Any], budget: int) -> dict[str, Any]:
    """The curriculum: Muon on the attention matrices, AdamW on the rest. Raises `ConfigError` if the skill does not come."""
    optimizer = Optimizer(policy, settings["corpus_optimizer"], muon_lr=settings["corpus_muon_lr"])
    step, curve = 0, []
    for number, phase in enumerate(settings["corpus_phases"]):
        smooth = math.inf
        while smooth >= phase["loss"]:
            if step == settings["corpus_max_steps"]:
                raise ConfigError(
                    f"gate `skill`: phase {number} of the corpus is at loss {smooth:.3f} after {step} steps, not below "
                    f"{phase['loss']}: the warm policy would lack the skill that RL is to sharpen",
                    hint="take another seed, or raise sft.corpus_max_steps",
                )
            loss = weighted_loss(policy, skill.draw(settings["corpus_batch"], phase["levels"]), budget)
            optimizer.step()
            step += 1
            smooth = loss if math.isinf(smooth) else SMOOTHING * smooth + (1 - SMOOTHING) * loss
        curve.append({"levels": phase["levels"], "steps": step, "loss": smooth})
    return {"corpus_steps": step, "corpus": curve}


def decay(step: int, steps: int, share: float) -> float:
    """Learning-rate factor: 1, then linearly towards 0 over the last `share` of the steps."""
    left = (steps - step) / max(1.0, share * steps)
    return min(1.0, left) if share else 1.0
