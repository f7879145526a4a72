"""The metrics once more, token by token on plain numbers (algorithm.md, section 8)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from tests.unit.measure_support import Token
from trainer.measure.tokens import length_deciles

LABELS = {0: "0", 1: "1", 2: "2", 3: "3_4", 4: "3_4", 5: "5_8", 6: "5_8", 7: "5_8", 8: "5_8"}
"""Staleness buckets; all else is 9 and more."""


def mean(x: Iterable[float]) -> float:
    values = [float(v) for v in x]
    return sum(values) / len(values) if values else math.nan


def variance(pairs: list[tuple[float, float]]) -> float:
    """Of (weight, x)."""
    total = sum(w for w, _ in pairs)
    center = sum(w * x for w, x in pairs) / total
    return sum(w * (x - center) ** 2 for w, x in pairs) / total


def percentile(x: list[float], p: float) -> float:
    """Linear between neighbours."""
    x = sorted(x)
    at = p / 100 * (len(x) - 1)
    low = math.floor(at)
    return x[low] + (at - low) * (x[min(low + 1, len(x) - 1)] - x[low])


def capped(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def expected_off_policy(tokens: list[Token]) -> dict[str, float]:
    out: dict[str, float] = {}
    deciles = length_deciles([max(t["l"] for t in tokens if t["row"] == r) for r in range(1 + tokens[-1]["row"])])
    subsets: dict[str, list[Token]] = {f"/stale_{b}": [] for b in (*LABELS.values(), "9")}
    subsets |= {"": tokens} | {f"/adv_{s}": [] for s in ("pos", "neg")}
    subsets |= {f"/{name}_{d}": [] for name in ("pos", "len") for d in range(10)}
    for t in tokens:
        subsets[f"/stale_{LABELS.get(t['s'], '9')}"].append(t)
        subsets[f"/pos_{math.floor(10 * t['j'] / t['l'])}"].append(t)
        subsets[f"/len_{deciles[t['row']]}"].append(t)
        if t["advantages"]:
            subsets["/adv_pos" if t["advantages"] > 0 else "/adv_neg"].append(t)
    for label, subset in subsets.items():
        out[f"dis/mask_frac{label}"] = mean(not t["keep"] for t in subset)
        out[f"dis/mask_low{label}"] = mean(t["delta"] <= math.log(0.7) for t in subset)
        out[f"dis/mask_high{label}"] = mean(t["delta"] >= math.log(6.0) for t in subset)
    rejected = [mean(not t["keep"] for t in tokens if t["row"] == r) for r in range(len(deciles))]
    usable = [t for t in tokens if math.isfinite(t["delta"])]
    w = [math.exp(t["delta"]) for t in tokens if t["keep"]]
    squared = sum(x * x for x in w)
    lost = sum(abs(t["advantages"]) * (not t["keep"]) for t in tokens)
    points = [percentile([t["delta"] for t in usable], p) for p in (0.1, 1, 50, 99, 99.9)]
    for suffix, some in (("", usable), ("_fresh", [t for t in usable if t["s"] == 0])):
        d = [t["delta"] for t in some]
        out[f"dis/mean_ratio{suffix}"] = mean(capped(x) for x in d)
        out[f"mismatch/abs_logp_diff{suffix}"] = mean(abs(x) for x in d)
        out[f"mismatch/token_mult_prob_error{suffix}"] = mean(capped(abs(x)) for x in d)
        out[f"kl/k1{suffix}"] = mean(-x for x in d)
        out[f"kl/k3{suffix}"] = mean(capped(x) - 1 - x for x in d)
    return out | {
        "dis/traj_all_masked": mean(x == 1 for x in rejected),
        "dis/max_traj_mask_frac": max(rejected),
        "dis/kept_tokens": len(w),
        "dis/lost_abs_adv": lost / sum(abs(t["advantages"]) for t in tokens),
        "dis/ess": sum(w) ** 2 / (len(tokens) * squared) if w else math.nan,
        "dis/ess_kept": sum(w) ** 2 / (len(w) * squared) if w else math.nan,
        "kl/k2": mean(t["delta"] ** 2 / 2 for t in usable),
        "kl_train/k1": mean(capped(t["delta"]) * t["delta"] for t in usable),
        "kl_train/k3": mean(capped(t["delta"]) * t["delta"] - (capped(t["delta"]) - 1) for t in usable),
        "delta/max_abs": max(abs(t["delta"]) for t in usable),
        **{f"delta/p{p}": x for p, x in zip(("0.1", "1", "50", "99", "99.9"), points, strict=True)},
        "entropy/exact": mean(t["entropy"] for t in tokens),
        "entropy/exact_turn_first": mean(t["entropy"] for t in tokens if t["turn_first"]),
        "entropy/sampled": mean(-t["logprobs"] for t in tokens),
        "entropy/rollout_sampled": mean(-t["rollout"] for t in tokens),
        "data/nonfinite_rollout_logp": 0,
    }


def by_row(tokens: list[Token]) -> list[list[Token]]:
    rows = defaultdict(list)
    for t in tokens:
        rows[t["row"]].append(t)
    return list(rows.values())


def expected_staleness(tokens: list[Token]) -> dict[str, float]:
    s = [t["s"] for t in tokens]
    rows = [[t["s"] for t in row] for row in by_row(tokens)]
    return {
        "staleness/mean": mean(s),
        "staleness/max": max(s),
        "staleness/p50": percentile(s, 50),
        "staleness/p95": percentile(s, 95),
        "staleness/traj_max": mean(max(row) for row in rows),
        "staleness/traj_span": mean(max(row) - min(row) for row in rows),
        "staleness/traj_versions": mean(len(set(row)) for row in rows),
        "async/mixed_version_frac": mean(len(set(row)) > 1 for row in rows),
        **{f"staleness/frac_{b}": mean(LABELS.get(x, "9") == b for x in s) for b in (*LABELS.values(), "9")},
    }


def expected_value(tokens: list[Token]) -> dict[str, float]:
    out: dict[str, float] = {}
    weights = {"ev": lambda t: 1.0, "ev_traj": lambda t: 1 / t["l"], "ev_first": lambda t: float(t["j"] == 0)}
    for name, weight in weights.items():
        error = variance([(weight(t), t["targets"] - t["values"]) for t in tokens])
        spread = variance([(weight(t), t["targets"]) for t in tokens])
        out[f"value/{name}"] = 1 - error / spread if spread > 1e-8 else math.nan
    e = [t["values"] - t["targets"] for t in tokens]
    out |= {"value/bias": mean(e), "value/mae": mean(map(abs, e)), "value/mse": mean(x * x for x in e)}
    out["value/clip_oob"] = mean(not 0 <= t["values"] <= 1 for t in tokens)
    bins = [[t for t in tokens if min(9, max(0, math.floor(10 * t["values"]))) == b] for b in range(10)]
    for b, some in enumerate(bins):
        out |= {f"value/calib_n_{b}": len(some), f"value/calib_g_{b}": mean(t["targets"] for t in some)}
    gaps = [len(b) * abs(mean(t["values"] for t in b) - mean(t["targets"] for t in b)) for b in bins if b]
    out["value/ece"] = sum(gaps) / len(tokens)
    rows = by_row(tokens)
    won, lost = ([r[0]["values"] for r in rows if r[0]["success"] is flag] for flag in (True, False))
    out["value/auroc_first"] = mean((a > b) + (a == b) / 2 for a in won for b in lost)
    for name, flag in (("success", True), ("failure", False)):
        some = [[t["values"] for t in r] for r in rows if r[0]["success"] is flag]
        out[f"value/first_{name}"] = mean(v[0] for v in some)
        out[f"value/mid_{name}"] = mean(v[len(v) // 2] for v in some)
        out[f"value/last_{name}"] = mean(mean(v[-max(1, len(v) // 10) :]) for v in some)
    change = sum(abs(t["post"] - t["advantages"]) for t in tokens)
    out["value/leak"] = change / sum(abs(t["advantages"]) for t in tokens)
    out["value/leak_signflip"] = mean(t["post"] * t["advantages"] < 0 for t in tokens)
    return out


def expected_advantages(tokens: list[Token], lam: list[float]) -> dict[str, float]:
    a = [t["advantages"] for t in tokens]
    lengths = [len(row) for row in by_row(tokens)]
    return {
        "adv/mean": mean(a),
        "adv/std": variance([(1, x) for x in a]) ** 0.5,
        "adv/abs": mean(map(abs, a)),
        "adv/min": min(a),
        "adv/max": max(a),
        "adv/frac_pos": mean(x > 0 for x in a),
        "lambda/mean": mean(lam),
        "lambda/length_mean": mean(lengths),
        "lambda/end_weight": mean(x ** (n - 1) for x, n in zip(lam, lengths, strict=True)),
        **{f"adv/pos_{d}": mean(t["advantages"] for t in tokens if 10 * t["j"] // t["l"] == d) for d in range(10)},
    }
