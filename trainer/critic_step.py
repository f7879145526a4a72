"""The critic's part of a step: values before any update, fixed targets, K updates on the whole batch (algorithm.md 3.2-3.3).

Flows in: micro-batches. Flows out: their `values` and `targets`; a moved critic. Every sum is divided by the supervised tokens
of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import parallel
from trainer.batch import MicroBatch, Packed
from trainer.estimate import advantage_input
from trainer.losses.value import value_loss
from trainer.model import Critic
from trainer.objective import Objective


@torch.no_grad()
def state_values(critic: Critic, packed: Packed) -> tuple[Tensor, Tensor]:
    """(V before each token [N], V after each trajectory's last token [B])."""
    after = critic(packed.tokens, packed.positions, packed.cu_seqlens)
    return after.roll(1), after[packed.boundaries[1:] - 1]


def evaluate(critic: Critic, batches: Sequence[MicroBatch], objective: Objective) -> None:
    """Values before any update, bootstrap values of truncated trajectories, and targets that stay fixed. A collective."""
    assert objective.critic is not None
    settings = objective.settings
    for batch in batches:
        batch.values, last = state_values(critic, batch.packed)
        batch.truncated = batch.truncated * last if settings["truncation"] == "bootstrap" else torch.zeros_like(last)
        inputs = advantage_input(batch, batch.values, settings["gamma"])
        batch.targets = objective.critic.estimate(inputs, settings["lam"]).returns


def supervised(batch: MicroBatch, objective: Objective) -> Tensor:
    """Tokens that the critic learns on, [N] bool."""
    assert objective.critic is not None
    return objective.critic.supervised(advantage_input(batch, batch.values, objective.settings["gamma"]))


def backward(critic: Critic, batches: Sequence[MicroBatch], objective: Objective) -> float | None:
    """Gradient of the mean value loss over the global batch; that mean before the update, None of no token. A collective."""
    masks = [supervised(batch, objective) for batch in batches]
    tokens = parallel.total(sum(int(mask.sum()) for mask in masks))
    clip = objective.settings["value_clip"]
    total = 0.0
    for batch, mask in zip(batches, masks, strict=True):
        values = critic(batch.packed.tokens, batch.packed.positions, batch.packed.cu_seqlens).roll(1)
        loss = value_loss(values, batch.targets, mask, old_values=batch.values, clip=clip).sum() / max(tokens, 1.0)
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return parallel.total(total) if tokens else None
