"""Where each action token of a micro-batch stands: in its trajectory, in its turn, in time and in the batch.

| field | meaning |
|---|---|
| `staleness` | consuming version - version that sampled the token |
| `bucket` | of the staleness: 0, 1, 2, 3-4, 5-8, 9 and more (`BUCKETS`) |
| `position_decile` | floor(10 j / l) of the j-th of the trajectory's l action tokens |
| `length_decile` | floor(10 (trajectories of the global batch with fewer action tokens) / (trajectories)) |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch import Packed

BUCKETS = ("0", "1", "2", "3_4", "5_8", "9")
_BUCKET_ENDS = (0, 1, 2, 4, 8)
DECILES = tuple(str(d) for d in range(10))


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """n action tokens of B trajectories, in packed order; a trajectory without action tokens has no token here."""

    row: Tensor
    """Trajectory of the token, [n] int64."""
    rank: Tensor
    """0, 1, .. among the action tokens of its trajectory, [n] int64."""
    counts: Tensor
    """Action tokens per trajectory, [B] int64."""
    staleness: Tensor
    """[n] int64."""
    bucket: Tensor
    """Index into `BUCKETS`, [n] int64."""
    position_decile: Tensor
    """0 .. 9, [n] int64."""
    length_decile: Tensor
    """0 .. 9, [n] int64."""
    first_of_turn: Tensor
    """[n] bool."""
    first_of_trajectory: Tensor
    """[n] bool."""

    @property
    def acted(self) -> Tensor:
        """Trajectories with an action token, [B] bool."""
        return self.counts > 0

    @property
    def length(self) -> Tensor:
        """Action tokens of the token's trajectory, [n] int64."""
        return self.counts[self.row]

    def per_row(self, x: Tensor) -> Tensor:
        """Sums of x [n] over each trajectory, [B] fp64."""
        return torch.zeros(len(self.counts), dtype=torch.float64, device=x.device).index_add_(0, self.row, x.double())


def token_facts(packed: Packed, version: int, deciles: Sequence[int]) -> TokenFacts:
    """Facts of a micro-batch that the policy of `version` consumes; `deciles`: `length_deciles` of its B trajectories."""
    where, device = packed.where, packed.mask.device
    edges = torch.searchsorted(where, packed.boundaries)
    counts = edges.diff()
    row = torch.repeat_interleave(counts)
    rank = torch.arange(len(where), device=device) - edges[row]
    turns = packed.turn_ids[where]
    first_of_trajectory = rank == 0
    staleness = version - packed.versions[where].long()
    return TokenFacts(
        row=row,
        rank=rank,
        counts=counts,
        staleness=staleness,
        bucket=torch.bucketize(staleness, torch.tensor(_BUCKET_ENDS, device=device)),
        position_decile=10 * rank // counts[row],
        length_decile=torch.tensor(deciles, dtype=torch.int64, device=device)[row],
        first_of_turn=first_of_trajectory | (turns != turns.roll(1)),
        first_of_trajectory=first_of_trajectory,
    )


def length_deciles(counts: Sequence[int]) -> list[int]:
    """Decile of each trajectory of the GLOBAL batch by its number of action tokens; equal lengths share one."""
    ordered = sorted(counts)
    return [10 * bisect_left(ordered, count) // len(ordered) for count in counts]
