"""How old the batch is: consuming version - sampling version, per action token s and per trajectory.

| name | formula |
|---|---|
| `staleness/mean`, `max`, `p50`, `p95` | of s over the action tokens; exact percentiles |
| `staleness/frac_0`, `frac_1`, `frac_2`, `frac_3_4`, `frac_5_8`, `frac_9` | share of action tokens with that s; 9: 9 and more |
| `staleness/traj_max` | mean over trajectories of s_max = max s: the age of the oldest token |
| `staleness/traj_span` | mean over trajectories of max s - min s |
| `staleness/traj_versions` | mean over trajectories of the number of versions that sampled it, n_versions |
| `async/mixed_version_frac` | share of trajectories with n_versions > 1 |
"""

from __future__ import annotations

import torch

from trainer.measure.sums import Metrics, Sums, divide, finite, percentiles
from trainer.measure.tokens import BUCKETS, TokenFacts


def add(sums: Sums, facts: TokenFacts) -> None:
    """One micro-batch."""
    s, acted = facts.staleness, facts.acted
    rows = torch.zeros_like(facts.counts)
    oldest = rows.scatter_reduce(0, facts.row, s, "amax", include_self=False)
    newest = rows.scatter_reduce(0, facts.row, s, "amin", include_self=False)
    # One int64 of (row, s) is a hundred times as fast as unique columns.
    row_of_version = torch.unique((facts.row << 32) + s + (1 << 31)) >> 32
    versions = rows.index_add(0, row_of_version, torch.ones_like(row_of_version))
    sums.add("staleness/n", torch.ones_like(s))
    sums.add("staleness/sum", s)
    sums.maximum("staleness", s)
    sums.collect("staleness", s)
    sums.add_by("staleness/bucket", facts.bucket, torch.ones_like(s), len(BUCKETS))
    sums.add("staleness/trajectories", acted)
    sums.add("staleness/traj_max", oldest[acted])
    sums.add("staleness/traj_span", (oldest - newest)[acted])
    sums.add("staleness/traj_versions", versions)
    sums.add("staleness/mixed", versions > 1)


def report(sums: Sums) -> Metrics:
    """From reduced sums."""
    n, trajectories = sums.scalar("staleness/n"), sums.scalar("staleness/trajectories")
    p50, p95 = percentiles(sums.values("staleness"), (50, 95))
    metrics = {
        "staleness/mean": divide(sums.scalar("staleness/sum"), n),
        "staleness/max": float(sums.maxima["staleness"]),
        "staleness/p50": p50,
        "staleness/p95": p95,
        "async/mixed_version_frac": divide(sums.scalar("staleness/mixed"), trajectories),
    }
    for name in ("traj_max", "traj_span", "traj_versions"):
        metrics[f"staleness/{name}"] = divide(sums.scalar(f"staleness/{name}"), trajectories)
    for bucket, count in zip(BUCKETS, sums.vector("staleness/bucket"), strict=True):
        metrics[f"staleness/frac_{bucket}"] = divide(count, n)
    return finite(metrics)
