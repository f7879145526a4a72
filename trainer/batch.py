"""Trajectories to packed tensors, and the plan of who computes what.

Flows in: `Trajectory` objects. Flows out: `Packed` micro-batches. The plan only decides layout: losses are normalised by global
counts, so that packing, micro-batch size, rank count and order change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from harness.errors import InvariantError
from harness.trajectory import Trajectory


@dataclass(slots=True)
class Packed:
    """B trajectories laid end to end: N tokens."""

    tokens: Tensor
    """int32 [N]"""
    positions: Tensor
    """int64 [N], restarting at 0"""
    cu_seqlens: list[int]
    """B + 1 boundaries"""
    mask: Tensor
    """bool [N], action tokens"""
    rewards: Tensor
    """fp32 [N], on action tokens only"""
    rollout_logprobs: Tensor
    """fp32 [N], NaN on observations"""
    versions: Tensor
    """int32 [N], -1 on observations"""
    turn_ids: Tensor
    """int32 [N], -1 on observations"""

    @property
    def boundaries(self) -> Tensor:
        """`cu_seqlens` as int64 [B + 1]."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int64, device=self.mask.device)

    @property
    def where(self) -> Tensor:
        """Indices of the action tokens, int64."""
        return self.mask.nonzero()[:, 0]

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "cu_seqlens"}
        return Packed(cu_seqlens=self.cu_seqlens, **moved)


@dataclass(slots=True)
class MicroBatch:
    """One packed micro-batch of a step and what the step computes about it."""

    packed: Packed
    episodes: Tensor
    """Episode of each trajectory, index into the global batch's episodes, int64 [B]."""
    truncated: Tensor
    """1 for a trajectory that a limit cut, fp32 [B]; becomes its bootstrap value."""
    success: Tensor
    """Whether each trajectory's reward is above 0.5, bool [B]."""
    length_deciles: list[int]
    """Of each trajectory within the global batch, by number of action tokens, [B]."""
    weights: Tensor
    """Factor of every policy-loss token of each trajectory (`trainer.normalise`), fp32 [B]."""
    values: Tensor
    """V before each token, fp32 [N]."""
    targets: Tensor
    """fp32 [N]"""
    advantages: Tensor
    """fp32 [N]"""

    @property
    def counts(self) -> Tensor:
        """Action tokens of each trajectory, int64 [B]."""
        ends = torch.cat([self.packed.mask.new_zeros(1, dtype=torch.int64), self.packed.mask.cumsum(0)])
        return ends[self.packed.boundaries].diff()


EMPTY = Packed(
    tokens=torch.zeros(2, dtype=torch.int32),
    positions=torch.arange(2),
    cu_seqlens=[0, 2],
    mask=torch.zeros(2, dtype=torch.bool),
    rewards=torch.zeros(2),
    rollout_logprobs=torch.full((2,), float("nan")),
    versions=torch.full((2,), -1, dtype=torch.int32),
    turn_ids=torch.full((2,), -1, dtype=torch.int32),
)
"""What a rank with nothing left computes, so that every rank joins every collective."""


def pack(trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray] | None = None) -> Packed:
    """Lay trajectories end to end. `rewards` replaces their own token rewards. Raises `InvariantError` on one that cannot
    be.
    """
    if not trajectories:
        return EMPTY
    for t in trajectories:
        if t.loss_mask[:1].any():
            raise InvariantError(f"trajectory {t.episode_id} starts with an action, which no state precedes")
    lengths = [len(t) for t in trajectories]
    if rewards is None:
        rewards = [t.token_rewards() for t in trajectories]

    def cat(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))

    return Packed(
        tokens=cat([t.tokens for t in trajectories]),
        positions=cat([np.arange(n) for n in lengths]),
        cu_seqlens=[0, *np.cumsum(lengths).tolist()],
        mask=cat([t.loss_mask for t in trajectories]),
        rewards=cat(rewards),
        rollout_logprobs=cat([t.rollout_logprobs for t in trajectories]),
        versions=cat([t.policy_versions for t in trajectories]),
        turn_ids=cat([t.turn_ids for t in trajectories]),
    )


def plan(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Micro-batches of trajectory indices, [rank][micro-batch][index]; every rank has the same number, some may be empty.

    Longest first to the rank with the least attention-weighted work, then first-fit into `budget` tokens. A trajectory longer
    than the budget is a micro-batch of its own.
    """
    work = [0.0] * ranks
    bins: list[list[list[int]]] = [[] for _ in range(ranks)]
    room: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = lengths[index]
        rank = min(range(ranks), key=lambda r: (work[r], r))
        work[rank] += n + n * n / 16_384
        fit = next((b for b, left in enumerate(room[rank]) if left >= n), None)
        if fit is None:
            bins[rank].append([index])
            room[rank].append(budget - n)
        else:
            bins[rank][fit].append(index)
            room[rank][fit] -= n
    most = max(1, *(len(b) for b in bins))
    return [b + [[] for _ in range(most - len(b))] for b in bins]
