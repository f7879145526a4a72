"""What a policy loss reads and returns: packed tensors indexed by the token they score, nothing normalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Behaviour = Literal["rollout", "trainer"]
"""Whose probability stands below the ratio: the engine's as it sampled, or the trainer's own just before this step."""


@dataclass(frozen=True, slots=True)
class PolicyLossInput:
    """N packed tokens of B trajectories. Whatever stands on observation tokens (NaN included) is never read."""

    logprobs: Tensor
    """log pi_theta(token | before) under the weights being trained, nats, [N] float, with gradient."""
    rollout_logprobs: Tensor
    """log pi_rollout(token | before) as the engine sampled it, nats, [N] float; NaN on observations."""
    advantages: Tensor
    """Reward units, [N] float; a constant."""
    mask: Tensor
    """True on action tokens, [N] bool."""
    cu_seqlens: Tensor | None = None
    """Trajectory b is tokens cu_seqlens[b]:cu_seqlens[b+1], [B+1] int64; only sequence-level losses need it."""
    old_logprobs: Tensor | None = None
    """The same under the trainer's weights before this step, [N] float; None: `logprobs`, as a batch is one step."""


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """The caller sums `token_loss` and divides by a count over the GLOBAL batch (`trainer.normalise`)."""

    token_loss: Tensor
    """Loss per token, [N] fp32, with gradient; zero where not kept."""
    keep: Tensor
    """True on action tokens that give a gradient, [N] bool."""
    weight: Tensor
    """Detached factor of A * grad log pi, [N] fp32; zero where not kept."""


def log_ratio(inputs: PolicyLossInput, behaviour: Behaviour) -> tuple[Tensor, Tensor]:
    """(Delta = log pi_theta - log pi_behaviour [N] fp32, 0 where invalid; valid [N] bool: action tokens with a finite Delta).

    Delta carries the gradient of `logprobs`. It is selected before anything else is computed, so that no infinity or NaN of an
    observation or of a broken record can reach an exponential or a gradient.
    """
    new = inputs.logprobs.float()
    if behaviour == "rollout":
        old = inputs.rollout_logprobs.float()
    else:
        old = (inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs).detach().float()
    valid = inputs.mask & (new.detach() - old).isfinite()
    zero = torch.zeros((), dtype=torch.float32, device=new.device)
    return torch.where(valid, new, zero) - torch.where(valid, old, zero), valid
