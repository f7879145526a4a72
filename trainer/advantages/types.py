"""What advantage estimators read and return.

Three kinds. `CriticEstimator`: token-level recursions over a critic's values, on packed micro-batches. `OutcomeEstimator`: one
advantage per episode from the rewards of the batch (and of earlier batches), given to all of its action tokens. `"return"`: the
discounted return of each token, whitened afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """N packed tokens of B trajectories."""

    values: Tensor
    """V(state before the token), reward units, [N] float; anything at all on observation tokens."""
    rewards: Tensor
    """Reward units, [N] float; on action tokens only."""
    mask: Tensor
    """True on action tokens, [N] bool."""
    turn_ids: Tensor
    """Turn of an action token, -1 on observations, [N] int."""
    cu_seqlens: Tensor
    """Trajectory b is tokens cu_seqlens[b]:cu_seqlens[b+1], [B+1] int64."""
    bootstrap: Tensor
    """Value after the last token of a truncated trajectory, else 0, [B] float."""
    gamma: float
    """Discount per step of the recursion."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages A and lambda-returns G = A + V, [N] fp32 each; zero on observation tokens."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class CriticEstimator:
    """A recursion over values. It runs twice: with the policy's lambda for A, with the critic's for the targets G."""

    estimate: Callable[[AdvantageInput, float | Tensor], Estimate]
    """(inputs, lambda: one or [B]) -> A and G."""
    length: Callable[[AdvantageInput], Tensor]
    """Steps of the recursion per trajectory, [B] int64: the `l` of the length-adaptive lambda."""
    supervised: Callable[[AdvantageInput], Tensor]
    """Tokens on which the critic is trained, [N] bool."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """E finished episodes of one batch in order of completion, the same on every rank."""

    rewards: Tensor
    """Sum of an episode's rewards, [E] fp64."""
    prompts: tuple[str, ...]
    """Task id of each; a group is the episodes of one task."""
    drift: float = 0.0
    """Estimated KL, nats, that the policy has moved through since the run began; only differences matter."""


State = dict[str, Any]
"""What an estimator remembers from earlier batches; JSON-serialisable, saved in checkpoints, empty at the start."""
OutcomeEstimator = Callable[[Outcomes, State], tuple[Tensor, State]]
"""(outcomes, state) -> (advantage of each episode [E] fp64, new state). Pure: the state passed in is not changed."""
