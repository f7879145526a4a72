"""Value pre-training: regress the critic on the initial policy's own returns before RL (algorithm.md 3.5).

Flows in: stored trajectories with rewards. Flows out: a critic with its held-out explained variance. The split is by prompt;
all parameters train; the optimizer is forgotten afterwards, because RL freezes part of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from harness.errors import ConfigError
from harness.trajectory import Trajectory
from trainer import metrics, parallel
from trainer.advantages.gae import value_targets
from trainer.batch import Packed, pack, plan
from trainer.losses.value import value_loss
from trainer.model import Critic
from trainer.optimizer import Optimizer
from trainer.step import state_values


def held_out(task_id: str, share: float) -> bool:
    """Whether a prompt is held out: a hash of its id, so that all its trajectories are on one side."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:4]) < share * 2**32


def pretrain(
    critic: Critic, trajectories: Sequence[Trajectory], settings: dict[str, Any], *, budget: int, seed: int
) -> dict[str, Any]:
    """Train for `epochs`, or until the held-out explained variance gains less than 0.01 in an epoch. A collective.

    Raises `ConfigError` if either side of the split is empty.
    """
    train = [t for t in trajectories if not held_out(t.task_id, settings["heldout"])]
    test = [t for t in trajectories if held_out(t.task_id, settings["heldout"])]
    if not train or not test:
        raise ConfigError(
            f"value pre-training: {len(train)} training and {len(test)} held-out trajectories",
            hint="raise value.episodes",
        )
    optimizer = Optimizer(critic, settings["optimizer"], settings["head_lr_mult"])
    curve = [evaluate(critic, test, budget)]
    for epoch in range(settings["epochs"]):
        order = list(range(len(train)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for at in range(0, len(order), settings["batch"]):
            _update(critic, optimizer, [train[i] for i in order[at : at + settings["batch"]]], budget)
        curve.append(evaluate(critic, test, budget))
        gain = (curve[-1]["value/ev"] or 0.0) - (curve[-2]["value/ev"] or 0.0)
        if epoch and gain < 0.01:
            break
    return {"train": len(train), "heldout": len(test), "steps": optimizer.steps, "curve": curve, **curve[-1]}


def _targets(packed: Packed) -> Any:
    return value_targets(
        packed.rewards, packed.rewards, packed.mask, packed.boundaries, gamma=1.0, lam=1.0
    )  # Monte-Carlo: independent of the values


def _update(critic: Critic, optimizer: Optimizer, trajectories: list[Trajectory], budget: int) -> None:
    actions = max(1, sum(t.n_actions for t in trajectories))
    for indices in plan([len(t) for t in trajectories], dist.get_world_size(), budget)[dist.get_rank()]:
        packed = pack([trajectories[i] for i in indices]).to(parallel.device())
        after = critic(packed.tokens, packed.positions, packed.cu_seqlens)
        loss = value_loss(after.roll(1), _targets(packed), packed.mask).sum() / actions
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def evaluate(critic: Critic, trajectories: list[Trajectory], budget: int) -> dict[str, float | None]:
    """Held-out critic metrics."""
    sums = metrics.Sums()
    for indices in plan([len(t) for t in trajectories], dist.get_world_size(), budget)[dist.get_rank()]:
        packed = pack([trajectories[i] for i in indices]).to(parallel.device())
        values, _ = state_values(critic, packed)
        metrics.add_value(sums, values, _targets(packed), packed.mask, packed.boundaries)
    return metrics.report(metrics.reduce(sums))
