"""Training metrics as global sums: numerators and denominators are added up over micro-batches and ranks, then divided once.

A mean of means weighs ranks and micro-batches wrongly, so nothing is divided before `report`. The `add_*` functions always add
the same names, also for zero action tokens, because every rank must reduce the same ones. S below is the set of action tokens,
Delta = log pi_theta - log pi_rollout, w = f(rho). The explained variance is SAO's (arXiv 2607.07508): 1 - Var(G - V) / Var(G).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.losses.dis import log_band
from trainer.losses.types import PolicyLossInput, PolicyLossOutput

MIN_VARIANCE = 1e-8
"""Of the targets: below it the explained variance is undefined, not 0."""
MAX_EXPONENT = 20.0
"""Delta is clamped to +-this before exp, in metrics only."""


class Sums:
    """Named float64 totals, and named maxima, on the device of what was added."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Add the sum of all elements of x."""
        total = x.detach().sum(dtype=torch.float64)
        self.totals[name] = self.totals[name] + total if name in self.totals else total

    def maximum(self, name: str, x: Tensor) -> None:
        """Keep the largest element of x; -inf while there was none."""
        x = torch.cat([x.detach().flatten().double(), x.new_full((1,), -math.inf, dtype=torch.float64)]).max()
        self.maxima[name] = torch.maximum(self.maxima[name], x) if name in self.maxima else x


def reduce(sums: Sums, group: dist.ProcessGroup | None = None) -> Sums:
    """The totals and maxima over all ranks of `group`. Two collectives if `torch.distributed` is initialised; else `sums`."""
    if not (dist.is_available() and dist.is_initialized()):
        return sums
    out = Sums()
    for local, reduced, op in (
        (sums.totals, out.totals, dist.ReduceOp.SUM),
        (sums.maxima, out.maxima, dist.ReduceOp.MAX),
    ):
        if local:
            names = sorted(local)
            stacked = torch.stack([local[name] for name in names])
            dist.all_reduce(stacked, op=op, group=group)
            reduced.update(zip(names, stacked, strict=True))
    return out


def add_policy(
    sums: Sums,
    inputs: PolicyLossInput,
    output: PolicyLossOutput,
    staleness: Tensor,
    entropy: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> None:
    """DIS, mismatch, KL(rollout || train), entropy and advantage statistics of one micro-batch.

    staleness: [N] int, consuming version minus sampling version. entropy: [N] float, exact, nats. Both count on action tokens
    only. Tokens with a non-finite Delta count as rejected and are left out of the means of Delta.
    """
    mask = inputs.mask
    logprobs = inputs.logprobs.detach().float()[mask]
    rollout_logprobs = inputs.rollout_logprobs.float()[mask]
    delta = logprobs - rollout_logprobs
    low, high = log_band(eps_low, eps_high)
    weight, advantages = output.weight[mask].double(), inputs.advantages[mask].double()
    sums.add("actions", mask)
    sums.add("dis/kept", output.keep)
    sums.add("dis/low", delta <= delta.new_tensor(low))
    sums.add("dis/high", delta >= delta.new_tensor(high))
    sums.add("dis/weight", weight)
    sums.add("dis/weight^2", weight.square())
    sums.add("entropy/exact", entropy[mask])
    sums.add("entropy/sampled", -logprobs)
    sums.add("adv/sum", advantages)
    sums.add("adv/sum^2", advantages.square())
    sums.add("adv/sum_abs", advantages.abs())

    finite = delta.isfinite()
    delta, fresh = delta[finite].double(), staleness[mask][finite] == 0
    ratio = delta.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    sums.add("nonfinite_rollout", ~rollout_logprobs.isfinite())
    sums.add("finite", finite)
    sums.add("finite_fresh", fresh)
    sums.add("delta/ratio", ratio)
    sums.add("delta/abs", delta.abs())
    sums.add("delta/abs_fresh", delta.abs()[fresh])
    sums.add("delta/k1", -delta)
    sums.add("delta/k2", delta.square() / 2)
    sums.add("delta/k3", ratio - 1 - delta)


def add_value(sums: Sums, values: Tensor, targets: Tensor, mask: Tensor, cu_seqlens: Tensor) -> None:
    """Critic statistics of whole trajectories: values and targets [N] float, mask [N] bool, cu_seqlens [B+1] int64.

    Three weightings of the explained variance: every action token, every trajectory, first action tokens only.
    """
    g = targets.detach()[mask].double()
    error = g - values.detach()[mask].double()
    _, counts, first = _action_rows(mask, cu_seqlens)
    per_trajectory = 1.0 / torch.repeat_interleave(counts, counts).double()
    for name, weight in (("token", torch.ones_like(g)), ("traj", per_trajectory), ("first", first.double())):
        sums.add(f"value/{name}/n", weight)
        sums.add(f"value/{name}/g", weight * g)
        sums.add(f"value/{name}/g^2", weight * g.square())
        sums.add(f"value/{name}/e", weight * error)
        sums.add(f"value/{name}/e^2", weight * error.square())


def add_staleness(sums: Sums, staleness: Tensor, mask: Tensor, cu_seqlens: Tensor) -> None:
    """Token staleness s_t [N] int (action tokens), and how many trajectories were sampled by more than one version."""
    rows, counts, first = _action_rows(mask, cu_seqlens)
    s = staleness[mask]
    switched = (s[1:] != s[:-1]) & ~first[1:]
    mixed = torch.zeros_like(counts).index_add_(0, rows[1:], switched.to(counts.dtype)) > 0
    sums.add("staleness/n", mask)
    sums.add("staleness/sum", s)
    sums.maximum("staleness/max", s)
    sums.add("async/trajectories", counts > 0)
    sums.add("async/mixed", mixed)


def _action_rows(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trajectory of each action token [n], action tokens per trajectory [B], and whether a token is its first [n] bool."""
    edges = torch.searchsorted(mask.nonzero().squeeze(1), cu_seqlens)
    counts = edges.diff()
    rows = torch.repeat_interleave(counts)
    first = torch.zeros(len(rows), dtype=torch.bool, device=mask.device)
    first[edges[:-1][counts > 0]] = True
    return rows, counts, first


def report(sums: Sums) -> dict[str, float | None]:
    """The metrics of everything that was added, by name; None where the denominator is 0 or the result is not finite."""
    t = {name: x.item() for name, x in sums.totals.items()}
    metrics: dict[str, float] = {}
    if "actions" in t:
        metrics |= _policy_metrics(t)
    if "value/token/n" in t:
        metrics |= _value_metrics(t)
    if "staleness/n" in t:
        metrics |= {
            "staleness/mean": _divide(t["staleness/sum"], t["staleness/n"]),
            "staleness/max": sums.maxima["staleness/max"].item(),
            "async/mixed_version_frac": _divide(t["async/mixed"], t["async/trajectories"]),
        }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _policy_metrics(t: dict[str, float]) -> dict[str, float]:
    n, n_finite = t["actions"], t["finite"]
    mean = _divide(t["adv/sum"], n)
    return {
        "dis/mask_frac": 1 - _divide(t["dis/kept"], n),
        "dis/mask_low": _divide(t["dis/low"], n),
        "dis/mask_high": _divide(t["dis/high"], n),
        "dis/mean_ratio": _divide(t["delta/ratio"], n_finite),
        "dis/ess": _divide(t["dis/weight"] ** 2, n * t["dis/weight^2"]),
        "mismatch/abs_logp_diff": _divide(t["delta/abs"], n_finite),
        "mismatch/abs_logp_diff_fresh": _divide(t["delta/abs_fresh"], t["finite_fresh"]),
        "kl/k1": _divide(t["delta/k1"], n_finite),
        "kl/k2": _divide(t["delta/k2"], n_finite),
        "kl/k3": _divide(t["delta/k3"], n_finite),
        "entropy/exact": _divide(t["entropy/exact"], n),
        "entropy/sampled": _divide(t["entropy/sampled"], n),
        "adv/mean": mean,
        "adv/std": max(_divide(t["adv/sum^2"], n) - mean**2, 0.0) ** 0.5,
        "adv/abs": _divide(t["adv/sum_abs"], n),
        "data/nonfinite_rollout_logp": t["nonfinite_rollout"],
    }


def _value_metrics(t: dict[str, float]) -> dict[str, float]:
    return {
        "value/ev": _explained_variance(t, "value/token"),
        "value/ev_traj": _explained_variance(t, "value/traj"),
        "value/ev_first": _explained_variance(t, "value/first"),
        "value/bias": _divide(-t["value/token/e"], t["value/token/n"]),
        "value/mse": _divide(t["value/token/e^2"], t["value/token/n"]),
    }


def _explained_variance(t: dict[str, float], key: str) -> float:
    """1 - Var(G - V) / Var(G), centred population variances; NaN if G hardly varies."""
    n = t[f"{key}/n"]
    variance_g = _divide(t[f"{key}/g^2"], n) - _divide(t[f"{key}/g"], n) ** 2
    variance_e = _divide(t[f"{key}/e^2"], n) - _divide(t[f"{key}/e"], n) ** 2
    return 1 - variance_e / variance_g if variance_g >= MIN_VARIANCE else math.nan


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
