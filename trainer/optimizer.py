"""AdamW (fused) with global-norm clipping, warm-up and a guard: a non-finite gradient skips the step and is counted.

Flows in: a (sharded) model whose trainable set is final, gradients. Flows out: moved parameters and the norm before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.freeze import module_group


class Optimizer:
    """One model's optimizer; `settings` are the fields of `OptimizerConfig`. With `muon_lr`, attention matrices take Muon."""

    def __init__(
        self, model: nn.Module, settings: dict[str, Any], head_lr_mult: float = 1.0, muon_lr: float | None = None
    ) -> None:
        self.model = model
        attention = attention_matrices(model) if muon_lr is not None else []
        groups = optimizer_groups(model, settings["lr"], settings["weight_decay"], head_lr_mult, exclude=attention)
        self.adamw = torch.optim.AdamW(groups, betas=tuple(settings["betas"]), fused=True)
        self._optimizers: list[torch.optim.Optimizer] = [self.adamw]
        if muon_lr is not None:
            self._optimizers.append(torch.optim.Muon(attention, lr=muon_lr, weight_decay=0.0))
        self._base = [group["lr"] for group in self._groups]
        self.clip, self._warmup = settings["clip"], settings["warmup_steps"]
        self.steps = 0
        self.skipped = 0

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Not to be kept: loading a state makes new ones."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._groups for p in group["params"]]

    @property
    def names(self) -> list[str]:
        """The parameters that it moves."""
        mine = {id(p) for p in self._parameters}
        return [name for name, p in self.model.named_parameters() if id(p) in mine]

    @property
    def lr(self) -> float:
        """Learning rate of the last step, of the first group."""
        return float(self._groups[0]["lr"])

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient, before `step`."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step(self, scale: float = 1.0) -> float:
        """Clip, move, clear the gradients. `scale` multiplies the learning rate. Returns the global norm before clipping."""
        parameters = self._parameters
        norm = full(nn.utils.clip_grad_norm_(parameters, self.clip))
        if not math.isfinite(norm):
            self.skipped += 1
        else:
            warm = min(1.0, (self.steps + 1) / self._warmup) if self._warmup else 1.0
            for group, lr in zip(self._groups, self._base, strict=True):
                group["lr"] = lr * warm * scale
            for optimizer in self._optimizers:
                optimizer.step()
            self.steps += 1
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)


def attention_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable two-dimensional weights of the attention modules."""
    return [p for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and module_group(n) == "attention"]


def optimizer_groups(
    model: nn.Module, lr: float, weight_decay: float, head_lr_mult: float = 1.0, exclude: Sequence[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """AdamW groups of the trainable parameters: no decay on vectors and heads, the value head's own learning rate."""
    left_out = {id(p) for p in exclude}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    head: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in left_out:
            continue
        (head if "v_head" in name else decay if parameter.ndim > 1 else plain).append(parameter)
    groups = [
        {"params": decay, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
        {"params": head, "lr": lr * head_lr_mult, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def full(tensor: Tensor) -> float:
    """A scalar that may be a partial DTensor, summed over its mesh."""
    return float((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).item())
