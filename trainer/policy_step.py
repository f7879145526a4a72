"""The policy's part of a step: one forward and backward pass over the batch (algorithm.md 1.3-1.4).

Flows in: micro-batches with advantages and loss weights. Flows out: gradients, and sums for the metrics. Only action tokens
reach the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import parallel
from trainer.batch import MicroBatch
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.model import Policy
from trainer.objective import Objective

Observer = Callable[[MicroBatch, PolicyLossInput, PolicyLossOutput, Tensor], None]
"""(micro-batch, the loss's input and output on its action tokens, their exact entropies)."""


def backward(policy: Policy, batches: Sequence[MicroBatch], objective: Objective, *, update: bool, observe: Observer) -> float:
    """Gradient of the policy loss (if `update`); the number of kept tokens over all ranks. A collective."""
    kept = 0.0
    with torch.set_grad_enabled(update):
        for batch in batches:
            packed, where, counts = batch.packed, batch.packed.where, batch.counts
            logprobs, entropy = policy(packed.tokens, packed.positions, packed.cu_seqlens, where)
            chosen = PolicyLossInput(
                logprobs,
                packed.rollout_logprobs[where],
                batch.advantages[where],
                torch.ones_like(where, dtype=torch.bool),
                cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            )
            output = objective.loss(chosen)
            kept += float(output.keep.sum())
            if update:
                loss = (output.token_loss * torch.repeat_interleave(batch.weights, counts)).sum()
                (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            observe(batch, chosen, output, entropy)
    return parallel.total(kept)
