"""AdamW with global-norm clipping, warm-up and a guard: a non-finite gradient skips the step and is counted.

Flows in: a (sharded) model whose trainable set is final, gradients. Flows out: moved parameters and the norm before clipping.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.weights import optimizer_groups


class Optimizer:
    """One model's optimizer; `settings` are the fields of `OptimizerConfig`."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], head_lr_mult: float = 1.0) -> None:
        self.model = model
        self.adamw = torch.optim.AdamW(
            optimizer_groups(model, settings["lr"], settings["weight_decay"], head_lr_mult),
            betas=tuple(settings["betas"]),
        )
        self._base = [group["lr"] for group in self.adamw.param_groups]
        self._clip, self._warmup = settings["clip"], settings["warmup_steps"]
        self.steps = 0
        self.skipped = 0

    def step(self, scale: float = 1.0) -> float:
        """Clip, move, clear the gradients. `scale` multiplies the learning rate. Returns the global norm before clipping."""
        parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        norm = full(nn.utils.clip_grad_norm_(parameters, self._clip))
        if not math.isfinite(norm):
            self.skipped += 1
        else:
            warm = min(1.0, (self.steps + 1) / self._warmup) if self._warmup else 1.0
            for group, lr in zip(self.adamw.param_groups, self._base, strict=True):
                group["lr"] = lr * warm * scale
            self.adamw.step()
            self.steps += 1
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        self.adamw.zero_grad(set_to_none=True)


def full(tensor: Tensor) -> float:
    """A scalar that may be a partial DTensor, summed over its mesh."""
    return float((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).item())
