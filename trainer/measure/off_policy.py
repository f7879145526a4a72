"""How far the trainer's policy is from the one that sampled, and what the loss rejected for it.

S: action tokens of the batch, N of them; k, w: keep flag and weight of the loss; Delta = log pi_theta - log pi_rollout, fp32;
rho = exp(Delta), Delta clamped to +-20 in exponentials. Means of Delta are over the tokens where it is finite (the loss rejects
the others). F: tokens of S with staleness 0; T: trajectories.

| name | formula |
|---|---|
| `dis/mask_frac` | 1 - sum(k) / N |
| `dis/mask_low`, `dis/mask_high` | share of S that is rejected with Delta < 0, with Delta > 0 |
| `dis/mask_{frac,low,high}/adv_pos`, `../adv_neg` | the same over the tokens with A > 0, with A < 0 |
| `../stale_0`, `stale_1`, `stale_2`, `stale_3_4`, `stale_5_8`, `stale_9` | over the tokens of a staleness |
| `../pos_0` .. `pos_9`, `../len_0` .. `len_9` | over a position decile, over a length decile of trajectories |
| `dis/traj_all_masked` | share of T with every action token rejected |
| `dis/max_traj_mask_frac` | largest share of rejected tokens in one trajectory |
| `dis/kept_tokens` | sum(k): effective learning tokens |
| `dis/lost_abs_adv` | sum abs(A) (1 - k) / sum abs(A) |
| `dis/mean_ratio` | mean rho |
| `dis/ess`, `dis/ess_kept` | (sum w)^2 / (N sum w^2), (sum w)^2 / (sum(k) sum w^2) |
| `delta/p0.1`, `p1`, `p50`, `p99`, `p99.9` | exact percentiles of the finite Delta |
| `delta/max_abs` | max abs(Delta) of the finite ones |
| `kl/k1`, `kl/k2`, `kl/k3` | KL(rollout to train): mean(-Delta), mean(Delta^2 / 2), mean(rho - 1 - Delta) |
| `kl_train/k1`, `kl_train/k3` | KL(train to rollout): mean(rho Delta), mean(rho Delta - (rho - 1)) |
| `mismatch/abs_logp_diff`, `mismatch/token_mult_prob_error` | mean abs(Delta), mean exp(abs(Delta)) |
| `dis/mean_ratio_fresh`, `mismatch/.._fresh`, `kl/k1_fresh`, `kl/k3_fresh` | over F |
| `entropy/exact`, `entropy/exact_turn_first` | mean entropy of the trainer's distribution, over S, over first tokens of turns |
| `entropy/sampled`, `entropy/rollout_sampled` | mean(-log pi_theta); mean(-log pi_rollout) of the finite ones |
| `data/nonfinite_rollout_logp` | number of tokens without a finite log pi_rollout |
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.measure.sums import Metrics, Sums, divide, finite, percentiles
from trainer.measure.tokens import BUCKETS, DECILES, TokenFacts

MAX_EXPONENT = 20.0
"""Delta is clamped to +-this before exp, in metrics only."""
_SPLITS = {
    "adv": ("adv_pos", "adv_neg"),
    "stale": tuple(f"stale_{b}" for b in BUCKETS),
    "pos": tuple(f"pos_{d}" for d in DECILES),
    "len": tuple(f"len_{d}" for d in DECILES),
}
_REJECTED = ("frac", "low", "high")
_PERCENTS = (0.1, 1, 50, 99, 99.9)


def add(sums: Sums, inputs: PolicyLossInput, output: PolicyLossOutput, facts: TokenFacts, entropy: Tensor) -> None:
    """One micro-batch. `inputs` and `output` hold its n action tokens only; entropy [n] float, exact, nats."""
    logprobs, rollout = inputs.logprobs.detach().float(), inputs.rollout_logprobs.float()
    delta, advantages = logprobs - rollout, inputs.advantages.detach()
    _add_rejected(sums, ~output.keep, delta, advantages, facts)

    weight, size = output.weight.double(), advantages.double().abs()
    sums.add("dis/kept", output.keep)
    sums.add("dis/weight", weight)
    sums.add("dis/weight^2", weight.square())
    sums.add("dis/abs_adv", size)
    sums.add("dis/abs_adv_lost", size * ~output.keep)
    sums.add("entropy/exact", entropy)
    sums.add("entropy/turn_first", entropy[facts.first_of_turn])
    sums.add("entropy/n_turn_first", facts.first_of_turn)
    sums.add("entropy/sampled", -logprobs)
    sums.add("entropy/rollout_sampled", -rollout[rollout.isfinite()])
    sums.add("entropy/n_rollout", rollout.isfinite())

    usable = delta.isfinite()
    fresh = facts.staleness[usable] == 0
    sums.collect("delta", delta[usable])
    _add_delta(sums, "delta", delta[usable].double())
    _add_delta(sums, "delta_fresh", delta[usable][fresh].double())


def _add_rejected(sums: Sums, rejected: Tensor, delta: Tensor, advantages: Tensor, facts: TokenFacts) -> None:
    kinds = dict(zip(_REJECTED, (rejected, rejected & (delta < 0), rejected & (delta > 0)), strict=True))
    # A third bin, of A = 0, belongs to neither sign.
    sign = torch.where(advantages > 0, 0, torch.where(advantages < 0, 1, 2))
    splits = {
        "adv": (sign, 3),
        "stale": (facts.bucket, len(BUCKETS)),
        "pos": (facts.position_decile, 10),
        "len": (facts.length_decile, 10),
    }
    sums.add("dis/n", torch.ones_like(rejected))
    for split, (index, bins) in splits.items():
        sums.add_by(f"dis/n/{split}", index, torch.ones_like(rejected), bins)
    for kind, hit in kinds.items():
        sums.add(f"dis/{kind}", hit)
        for split, (index, bins) in splits.items():
            sums.add_by(f"dis/{kind}/{split}", index, hit, bins)

    share = (facts.per_row(rejected) / facts.counts)[facts.acted]
    sums.add("dis/trajectories", facts.acted)
    sums.add("dis/trajectories_rejected", share == 1)
    sums.maximum("dis/trajectory", share)


def _add_delta(sums: Sums, key: str, delta: Tensor) -> None:
    ratio = delta.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    sums.add(f"{key}/n", torch.ones_like(delta))
    sums.add(f"{key}/ratio", ratio)
    sums.add(f"{key}/abs", delta.abs())
    sums.add(f"{key}/error", delta.abs().clamp(max=MAX_EXPONENT).exp())
    sums.add(f"{key}/sum", delta)
    sums.add(f"{key}/sum^2", delta.square())
    sums.add(f"{key}/ratio_delta", ratio * delta)
    sums.maximum(f"{key}/abs", delta.abs())


def report(sums: Sums) -> Metrics:
    """From reduced sums."""
    t = {name: total.item() for name, total in sums.totals.items() if total.ndim == 0}
    n = t["dis/n"]
    metrics = {
        "dis/traj_all_masked": divide(t["dis/trajectories_rejected"], t["dis/trajectories"]),
        "dis/max_traj_mask_frac": float(sums.maxima["dis/trajectory"]),
        "dis/kept_tokens": t["dis/kept"],
        "dis/lost_abs_adv": divide(t["dis/abs_adv_lost"], t["dis/abs_adv"]),
        "dis/ess": divide(t["dis/weight"] ** 2, n * t["dis/weight^2"]),
        "dis/ess_kept": divide(t["dis/weight"] ** 2, t["dis/kept"] * t["dis/weight^2"]),
        "kl/k2": divide(t["delta/sum^2"], 2 * t["delta/n"]),
        "kl_train/k1": divide(t["delta/ratio_delta"], t["delta/n"]),
        "kl_train/k3": divide(t["delta/ratio_delta"] - t["delta/ratio"] + t["delta/n"], t["delta/n"]),
        "delta/max_abs": float(sums.maxima["delta/abs"]),
        "entropy/exact": divide(t["entropy/exact"], n),
        "entropy/exact_turn_first": divide(t["entropy/turn_first"], t["entropy/n_turn_first"]),
        "entropy/sampled": divide(t["entropy/sampled"], n),
        "entropy/rollout_sampled": divide(t["entropy/rollout_sampled"], t["entropy/n_rollout"]),
        "data/nonfinite_rollout_logp": n - t["entropy/n_rollout"],
    }
    for key, suffix in (("delta", ""), ("delta_fresh", "_fresh")):
        count, ratio, total = t[f"{key}/n"], t[f"{key}/ratio"], t[f"{key}/sum"]
        metrics |= {
            f"dis/mean_ratio{suffix}": divide(ratio, count),
            f"mismatch/abs_logp_diff{suffix}": divide(t[f"{key}/abs"], count),
            f"mismatch/token_mult_prob_error{suffix}": divide(t[f"{key}/error"], count),
            f"kl/k1{suffix}": divide(-total, count),
            f"kl/k3{suffix}": divide(ratio - count - total, count),
        }
    percents = percentiles(sums.values("delta"), _PERCENTS)
    metrics |= {f"delta/p{p}": x for p, x in zip(_PERCENTS, percents, strict=True)}
    return finite(metrics | _report_rejected(sums, t))


def _report_rejected(sums: Sums, t: dict[str, float]) -> dict[str, float]:
    metrics = {}
    for kind in _REJECTED:
        metrics[f"dis/mask_{kind}"] = divide(t[f"dis/{kind}"], t["dis/n"])
        for split, labels in _SPLITS.items():
            shares = zip(labels, sums.vector(f"dis/{kind}/{split}"), sums.vector(f"dis/n/{split}"), strict=False)
            metrics |= {f"dis/mask_{kind}/{label}": divide(hit, n) for label, hit, n in shares}
    return metrics
