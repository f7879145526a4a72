"""What a policy loss reads and returns: packed tensors indexed by the token they score, nothing normalised."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLossInput:
    """N packed tokens. Whatever stands on observation tokens (NaN included) is never read."""

    logprobs: Tensor
    """log pi_theta(token | before) under the weights being trained, nats, [N] float, with gradient."""
    rollout_logprobs: Tensor
    """log pi_rollout(token | before) as the engine sampled it, nats, [N] float; NaN on observations."""
    advantages: Tensor
    """Reward units, [N] float; a constant."""
    mask: Tensor
    """True on action tokens, [N] bool."""


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """The caller divides the sum of `token_loss` by the action tokens of the GLOBAL batch, rejected tokens included."""

    token_loss: Tensor
    """Loss per token, [N] fp32, with gradient; zero where not kept."""
    keep: Tensor
    """True on action tokens that give a gradient, [N] bool."""
    weight: Tensor
    """Detached factor of A * grad log pi, [N] fp32; zero where not kept."""
