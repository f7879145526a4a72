"""Advantages A over the action tokens, and the length-adaptive lambda of the trajectories.

| name | formula |
|---|---|
| `adv/mean`, `adv/std`, `adv/abs` | mean A, its population standard deviation, mean abs(A) |
| `adv/min`, `adv/max`, `adv/frac_pos` | extremes; share of tokens with A > 0 |
| `adv/pos_0` .. `adv/pos_9` | mean A over a position decile |
| `lambda/mean`, `lambda/length_mean` | mean lambda, mean l over trajectories (l: steps of the recursion) |
| `lambda/end_weight` | mean lambda^(l - 1): what the first step hears of the last |

The last three are absent where no recursion ran (`add_lambda`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.measure.sums import Metrics, Sums, divide, finite
from trainer.measure.tokens import DECILES, TokenFacts


def add(sums: Sums, advantages: Tensor, facts: TokenFacts) -> None:
    """One micro-batch: advantages of its action tokens, [n] float."""
    a = advantages.double()
    sums.add("adv/n", torch.ones_like(a))
    sums.add("adv/sum", a)
    sums.add("adv/sum^2", a.square())
    sums.add("adv/abs", a.abs())
    sums.add("adv/positive", a > 0)
    sums.minimum("adv", a)
    sums.maximum("adv", a)
    sums.add_by("adv/pos", facts.position_decile, a, 10)
    sums.add_by("adv/n_pos", facts.position_decile, torch.ones_like(a), 10)


def add_lambda(sums: Sums, lam: float | Tensor, length: Tensor) -> None:
    """lambda (one or [B]) and l [B] int of a micro-batch; a trajectory of length 0 does not count."""
    acted = length > 0
    steps = length[acted].double()
    lam = lam[acted].double() if isinstance(lam, Tensor) else torch.full_like(steps, lam)
    sums.add("lambda/n", acted)
    sums.add("lambda/sum", lam)
    sums.add("lambda/length", steps)
    sums.add("lambda/end_weight", lam ** (steps - 1))


def report(sums: Sums) -> Metrics:
    """From reduced sums."""
    n = sums.scalar("adv/n")
    mean = divide(sums.scalar("adv/sum"), n)
    metrics = {
        "adv/mean": mean,
        "adv/std": max(divide(sums.scalar("adv/sum^2"), n) - mean**2, 0.0) ** 0.5,
        "adv/abs": divide(sums.scalar("adv/abs"), n),
        "adv/min": float(sums.minima["adv"]),
        "adv/max": float(sums.maxima["adv"]),
        "adv/frac_pos": divide(sums.scalar("adv/positive"), n),
    }
    by_position = zip(DECILES, sums.vector("adv/pos"), sums.vector("adv/n_pos"), strict=True)
    metrics |= {f"adv/pos_{d}": divide(total, count) for d, total, count in by_position}
    if "lambda/n" in sums.totals:
        for name, key in (("mean", "sum"), ("length_mean", "length"), ("end_weight", "end_weight")):
            metrics[f"lambda/{name}"] = divide(sums.scalar(f"lambda/{key}"), sums.scalar("lambda/n"))
    return finite(metrics)
