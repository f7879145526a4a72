"""Every metric against a recomputation on plain numbers, on random ragged batches; micro-batches change nothing."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.trajectory import TrajectoryBuilder
from tests.unit.measure_formulas import expected_advantages, expected_off_policy, expected_staleness, expected_value
from tests.unit.measure_support import BAND, VERSION, case, measured, plain_facts, same
from trainer.batch import pack
from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput
from trainer.measure import advantages, critic, off_policy, staleness
from trainer.measure.sums import Metrics, Sums, divide, percentiles, reduce
from trainer.measure.tokens import length_deciles, token_facts

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "algorithm_vectors.json").read_text())


@pytest.mark.parametrize("seed", range(20))
def test_formulas_on_plain_lists(seed: int) -> None:
    made = case(seed, n=1 + seed % 12, longest=1 + 3 * (seed % 7))
    tokens = made.tokens()
    expected = expected_off_policy(tokens) | expected_staleness(tokens)
    expected |= expected_value(tokens) | expected_advantages(tokens, made.lam)
    same(measured(made, list(range(len(made.trajectories)))), expected)


@pytest.mark.parametrize("seed", range(10))
def test_micro_batches_and_order_change_nothing(seed: int) -> None:
    made, rows = case(seed, n=9), list(range(9))
    whole = measured(made, rows)
    random.Random(seed).shuffle(rows)
    cut = seed % 9
    same(measured(made, rows[:cut], rows[cut:], []), whole, rel=1e-9)


def test_nothing_to_measure_is_none() -> None:
    counts = {"dis/kept_tokens", "data/nonfinite_rollout_logp", *(f"value/calib_n_{b}" for b in range(10))}
    metrics = measured(case(0), [])
    assert {metrics.pop(name) for name in counts} == {0.0}
    assert set(metrics.values()) == {None}


def test_fields_of_tokens() -> None:
    builder = TrajectoryBuilder()
    builder.observe([5])
    builder.act([1, 2], [-1.0, -1.0], [3, 4])
    builder.act([1], [-1.0], [4])
    builder.observe([5, 5])
    builder.act([1], [-1.0], [13])
    t = builder.build("e", "t", reward=1.0)
    facts = token_facts(pack([t, t]), VERSION, [0, 7])
    assert facts.row.tolist() == [0] * 4 + [1] * 4
    assert facts.rank.tolist() == [0, 1, 2, 3] * 2
    assert facts.counts.tolist() == [4, 4]
    assert facts.staleness.tolist() == [11, 10, 10, 1] * 2
    assert facts.bucket.tolist() == [5, 5, 5, 1] * 2
    assert facts.position_decile.tolist() == [0, 2, 5, 7] * 2
    assert facts.length_decile.tolist() == [0] * 4 + [7] * 4
    assert facts.first_of_turn.tolist() == [True, False, True, True] * 2
    assert facts.first_of_trajectory.tolist() == [True, False, False, False] * 2


def test_length_deciles() -> None:
    assert length_deciles(list(range(20))) == [d for d in range(10) for _ in range(2)]
    assert length_deciles([5, 9, 5, 1]) == [2, 7, 2, 0]
    assert length_deciles([3, 3, 3]) == [0, 0, 0]
    assert length_deciles([]) == []


def golden_policy(name: str) -> Metrics:
    tokens = next(c for c in GOLDEN["dis"] if c["name"] == name)
    columns = [torch.tensor([t[key] for t in tokens["tokens"]]) for key in ("logp_train", "logp_rollout", "advantage")]
    inputs = PolicyLossInput(*columns, torch.ones(5, dtype=torch.bool))
    output = dis_loss(inputs, eps_low=tokens["eps_low"], eps_high=tokens["eps_high"])
    sums = Sums()
    off_policy.add(sums, inputs, output, plain_facts([2, 3], [0, 1, 1, 1, 0]), torch.ones(5))
    return off_policy.report(reduce(sums))


def test_golden_kl_and_ess() -> None:
    metrics, kl = golden_policy("reasoning"), GOLDEN["kl"]
    expected = {
        "kl/k1": kl["k1"],
        "kl/k2": kl["k2"],
        "kl/k3": kl["k3"],
        "dis/mean_ratio": kl["mean_ratio"],
        "mismatch/abs_logp_diff": kl["abs_diff"],
        "mismatch/abs_logp_diff_fresh": 0.025,
        "dis/mask_frac": GOLDEN["dis"][0]["mask_fraction"],
        "dis/mask_low": 0.2,
        "dis/mask_high": 0.2,
    }
    same({name: metrics[name] for name in expected}, expected)
    assert metrics["dis/ess"] == pytest.approx(0.3847, abs=5e-5)
    assert metrics["dis/ess_kept"] == pytest.approx(0.6411, abs=5e-5)
    assert golden_policy("coding")["dis/mask_frac"] == pytest.approx(GOLDEN["dis"][1]["mask_fraction"])


def value_metrics(values: Tensor, targets: Tensor, counts: list[int]) -> Metrics:
    sums = Sums()
    success = torch.zeros(len(counts), dtype=torch.bool)
    critic.add(sums, values, targets, plain_facts(counts), success, r_min=0.0, r_max=1.0)
    return critic.report(reduce(sums))


def test_golden_explained_variance() -> None:
    plain, variants = GOLDEN["explained_variance"], GOLDEN["extra"]["ev_variants"]
    centred = value_metrics(torch.tensor(plain["V"]), torch.tensor(plain["R"]), [4])
    assert centred["value/ev"] == pytest.approx(plain["ev"], abs=1e-6)
    counts = [len(t["V"]) for t in variants["trajs"]]
    values = torch.tensor([v for t in variants["trajs"] for v in t["V"]])
    targets = torch.tensor([t["R"] for t in variants["trajs"] for _ in t["V"]])
    metrics = value_metrics(values, targets, counts)
    assert metrics["value/ev"] == pytest.approx(variants["ev_token"], abs=1e-6)
    assert metrics["value/ev_first"] == pytest.approx(variants["ev_first_token"], abs=1e-6)
    assert metrics["value/ev_traj"] == pytest.approx(variants["ev_traj_weighted"], abs=1e-6)


def test_golden_staleness() -> None:
    golden = GOLDEN["extra"]["staleness"]
    sums = Sums()
    staleness.add(sums, plain_facts([6], [s for s in golden["token_staleness"] if s is not None]))
    metrics = staleness.report(reduce(sums))
    assert metrics["staleness/max"] == metrics["staleness/traj_max"] == golden["max"]
    assert metrics["staleness/mean"] == golden["mean"]
    assert metrics["staleness/traj_span"] == golden["span"]
    assert metrics["staleness/traj_versions"] == golden["n_versions"]


def test_golden_lambda() -> None:
    for row in GOLDEN["extra"]["lambda_table"]:
        sums = Sums()
        advantages.add(sums, torch.zeros(1), plain_facts([1]))
        advantages.add_lambda(sums, torch.tensor([row["lam"], 0.3], dtype=torch.float64), torch.tensor([row["l"], 0]))
        metrics = advantages.report(reduce(sums))
        assert metrics["lambda/mean"] == pytest.approx(row["lam"])
        assert metrics["lambda/end_weight"] == pytest.approx(row["lam_pow_l_minus_1"], rel=1e-9)


def test_explained_variance_needs_variance_and_auroc_both_classes() -> None:
    for spread, defined in ((1e-5, False), (1e-3, True)):
        metrics = value_metrics(torch.rand(4), torch.tensor([0.5, 0.5, 0.5 + spread, 0.5 + spread]), [2, 2])
        assert [metrics[f"value/{name}"] is not None for name in ("ev", "ev_traj", "ev_first")] == [defined] * 3
        assert metrics["value/auroc_first"] is None


def test_ties_count_half() -> None:
    sums = Sums()
    success = torch.tensor([True, True, False, False])
    values = torch.tensor([0.5, 0.9, 0.5, 0.7])
    critic.add(sums, values, values, plain_facts([1] * 4), success, r_min=0.0, r_max=1.0)
    assert critic.report(sums)["value/auroc_first"] == (0.5 + 0 + 1 + 1) / 4


def test_broken_values_are_none_and_do_no_harm() -> None:
    metrics = value_metrics(torch.tensor([math.nan, math.inf, -math.inf, 0.5]), torch.zeros(4), [2, 2])
    assert metrics["value/mse"] is metrics["value/ece"] is None
    assert sum(metrics[f"value/calib_n_{b}"] or 0 for b in range(10)) == 4
    sums = Sums()
    critic.add(sums, torch.ones(2), torch.ones(2), plain_facts([2]), torch.tensor([True]), r_min=1.0, r_max=1.0)
    assert critic.report(sums)["value/clip_oob"] == 0


def test_wild_deltas_do_not_hide_the_rest() -> None:
    rollout = torch.tensor([-1.0, -1000.0, math.nan, -math.inf])
    inputs = PolicyLossInput(torch.tensor([-1.0, 0.0, -1.0, -1.0]), rollout, torch.ones(4), torch.ones(4, dtype=torch.bool))
    sums = Sums()
    off_policy.add(sums, inputs, dis_loss(inputs, **BAND), plain_facts([1, 3]), torch.ones(4))
    metrics = off_policy.report(sums)
    assert metrics["data/nonfinite_rollout_logp"] == 2
    assert (metrics["dis/mask_frac"], metrics["dis/max_traj_mask_frac"], metrics["dis/traj_all_masked"]) == (0.75, 1.0, 0.5)
    assert metrics["kl/k1"] == -500.0
    assert metrics["dis/mean_ratio"] == pytest.approx((1 + math.exp(20)) / 2)
    assert metrics["entropy/rollout_sampled"] == 500.5
    assert metrics["delta/max_abs"] == 1000.0


def test_absent_until_added() -> None:
    sums, facts = Sums(), plain_facts([1])
    advantages.add(sums, torch.zeros(1), facts)
    assert not [name for name in advantages.report(sums) if name.startswith("lambda/")]
    assert not [name for name in value_metrics(torch.zeros(1), torch.zeros(1), [1]) if "leak" in name]


def test_sums() -> None:
    assert math.isnan(divide(1.0, 0.0))
    assert percentiles(torch.tensor([4.0, 1.0, 3.0, 2.0]), (0, 10, 50, 100)) == pytest.approx([1.0, 1.3, 2.5, 4.0])
    assert all(math.isnan(p) for p in percentiles(torch.zeros(0), (1, 2)))
