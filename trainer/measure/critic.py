"""The critic against what came: V of the state before a token, G its target, e = G - V, over the action tokens.

Success: reward > 0.5. The explained variance is SAO's (arXiv 2607.07508): 1 - Var(G - V) / Var(G), centred population
variances, None if Var(G) < 1e-8.

| name | formula |
|---|---|
| `value/ev`, `value/ev_traj`, `value/ev_first` | every token weighs 1; every trajectory weighs 1; first tokens only |
| `value/bias`, `value/mae`, `value/mse` | mean(V - G), mean abs(V - G), mean (V - G)^2 |
| `value/calib_g_0` .. `9`, `value/calib_n_0` .. `9` | mean G, number of tokens by V in ten equal bins of [R_min, R_max] |
| `value/ece` | sum over bins of n_b / N abs(mean V - mean G) |
| `value/auroc_first` | P(V of a success > V of a failure) at first tokens, ties count half; None if there is but one class |
| `value/first_success`, `value/first_failure` | mean over trajectories of V at the first action token |
| `value/mid_success`, `value/mid_failure` | of V at token floor(l / 2) |
| `value/last_success`, `value/last_failure` | of the mean V over the last position decile (at least the last token) |
| `value/clip_oob` | share of tokens with V outside [R_min, R_max] |
| `value/leak` | mean abs(A_post - A_pre) / mean abs(A_pre) |
| `value/leak_signflip` | share of tokens whose A changes between positive and negative |

Bins at the ends take the V beyond them. The last two are absent unless `leak` was added.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.measure.sums import Metrics, Sums, divide, finite
from trainer.measure.tokens import TokenFacts

MIN_VARIANCE = 1e-8
"""Of the targets: below it the explained variance is undefined, not 0."""
BINS = 10
_STAGES = ("first", "mid", "last")


def add(sums: Sums, values: Tensor, targets: Tensor, facts: TokenFacts, success: Tensor, *, r_min: float, r_max: float) -> None:
    """One micro-batch: values and targets of its action tokens [n] float, success of its trajectories [B] bool."""
    v, g = values.detach().double(), targets.detach().double()
    error, each = g - v, torch.ones_like(v)
    for name, weight in (("token", each), ("traj", each / facts.length), ("first", facts.first_of_trajectory.double())):
        sums.add(f"value/{name}/n", weight)
        sums.add(f"value/{name}/g", weight * g)
        sums.add(f"value/{name}/g^2", weight * g.square())
        sums.add(f"value/{name}/e", weight * error)
        sums.add(f"value/{name}/e^2", weight * error.square())
    sums.add("value/abs_error", error.abs())
    sums.add("value/outside", (v < r_min) | (v > r_max))

    scaled = BINS * (v - r_min) / max(r_max - r_min, MIN_VARIANCE)
    index = scaled.nan_to_num(0.0).clamp(0, BINS - 1).long()
    for name, x in (("n", each), ("v", v), ("g", g)):
        sums.add_by(f"value/bin/{name}", index, x, BINS)
    _add_stages(sums, v, facts, success)


def _add_stages(sums: Sums, v: Tensor, facts: TokenFacts, success: Tensor) -> None:
    won, first = success[facts.row], facts.first_of_trajectory
    sums.collect("value/first", v[first])
    sums.collect("value/success", won[first])
    tail = (facts.length // 10).clamp(min=1)
    weights = {
        "first": first.double(),
        "mid": (facts.rank == facts.length // 2).double(),
        "last": (facts.rank >= facts.length - tail) / tail,
    }
    sums.add_by("value/outcomes", won[first].long(), torch.ones_like(v[first]), 2)
    for stage in _STAGES:
        sums.add_by(f"value/{stage}/v", won.long(), weights[stage] * v, 2)


def leak(sums: Sums, pre: Tensor, post: Tensor) -> None:
    """Advantages [n] from values before and after the critic's updates: what those told about their own outcomes."""
    pre, post = pre.double(), post.double()
    sums.add("leak/n", torch.ones_like(pre))
    sums.add("leak/change", (post - pre).abs())
    sums.add("leak/size", pre.abs())
    sums.add("leak/flipped", pre.sign() * post.sign() < 0)


def report(sums: Sums) -> Metrics:
    """From reduced sums."""
    t = {name: total.item() for name, total in sums.totals.items() if total.ndim == 0}
    n = t["value/token/n"]
    metrics = {
        "value/ev": _explained_variance(t, "value/token"),
        "value/ev_traj": _explained_variance(t, "value/traj"),
        "value/ev_first": _explained_variance(t, "value/first"),
        "value/bias": divide(-t["value/token/e"], n),
        "value/mae": divide(t["value/abs_error"], n),
        "value/mse": divide(t["value/token/e^2"], n),
        "value/clip_oob": divide(t["value/outside"], n),
        "value/auroc_first": _auroc(sums.values("value/first"), sums.values("value/success") > 0),
    }
    counts, v, g = (sums.vector(f"value/bin/{name}") for name in ("n", "v", "g"))
    metrics["value/ece"] = divide(sum(abs(a - b) for a, b in zip(v, g, strict=True)), n)
    for b in range(BINS):
        metrics |= {f"value/calib_g_{b}": divide(g[b], counts[b]), f"value/calib_n_{b}": counts[b]}
    failures, successes = sums.vector("value/outcomes")
    for stage in _STAGES:
        failed, won = sums.vector(f"value/{stage}/v")
        metrics |= {f"value/{stage}_success": divide(won, successes), f"value/{stage}_failure": divide(failed, failures)}
    if "leak/n" in t:
        metrics["value/leak"] = divide(t["leak/change"], t["leak/size"])
        metrics["value/leak_signflip"] = divide(t["leak/flipped"], t["leak/n"])
    return finite(metrics)


def _explained_variance(t: dict[str, float], key: str) -> float:
    n = t[f"{key}/n"]
    variance_g = divide(t[f"{key}/g^2"], n) - divide(t[f"{key}/g"], n) ** 2
    variance_e = divide(t[f"{key}/e^2"], n) - divide(t[f"{key}/e"], n) ** 2
    return 1 - variance_e / variance_g if variance_g >= MIN_VARIANCE else math.nan


def _auroc(scores: Tensor, positive: Tensor) -> float:
    won, lost = scores[positive], scores[~positive].sort().values
    below = torch.searchsorted(lost, won) + torch.searchsorted(lost, won, right=True)
    return divide(float(below.sum()) / 2, len(won) * len(lost))
