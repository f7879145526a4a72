"""Golden numbers of the SAO specification (`algorithm_vectors.json`, made by two independent scripts, not by this code)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.advantages.gae import length_adaptive_lambda, skip_observation_gae, value_targets
from trainer.losses.dis import dis_loss, log_band
from trainer.losses.types import PolicyLossInput
from trainer.metrics import Sums, add_policy, add_staleness, add_value, report

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())


def close(actual: Tensor | float | None, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=0
    )


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda case: case["name"])
def test_gae(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["action_mask"]).bool()
    values, rewards = (
        torch.tensor(case["value_of_state_before_token"]),
        torch.tensor(case["reward"], dtype=torch.float32),
    )
    packed = values, rewards, mask, torch.tensor([0, len(mask)])
    keywords = {"gamma": case["gamma"], "lam": case["lam"], "bootstrap": torch.tensor([case["bootstrap"]])}
    close(skip_observation_gae(*packed, **keywords), case["advantage"])
    close(value_targets(*packed, **keywords), case["return_"])


def test_gae_all_cases_in_one_pack() -> None:
    cases = [case for case in GOLDEN["gae"] if case["gamma"] == 1.0]
    lengths = torch.tensor([len(case["action_mask"]) for case in cases])

    def cat(key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([torch.tensor(case[key], dtype=dtype) for case in cases])

    advantages = skip_observation_gae(
        cat("value_of_state_before_token"),
        cat("reward"),
        cat("action_mask", torch.bool),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        gamma=1.0,
        lam=torch.tensor([case["lam"] for case in cases], dtype=torch.float64),
    )
    close(advantages, cat("advantage", torch.float64))


@pytest.mark.parametrize("row", GOLDEN["extra"]["lambda_table"], ids=lambda row: f"alpha{row['alpha']}-l{row['l']}")
def test_length_adaptive_lambda(row: dict[str, Any]) -> None:
    lam = length_adaptive_lambda(torch.tensor([row["l"]]), row["alpha"])
    assert lam.dtype == torch.float64
    close(lam, [row["lam"]], atol=1e-15)
    close(lam ** (row["l"] - 1), [row["lam_pow_l_minus_1"]], atol=1e-11)


@pytest.mark.parametrize("case", GOLDEN["dis"], ids=lambda case: case["name"])
def test_dis(case: dict[str, Any]) -> None:
    def column(key: str) -> Tensor:
        return torch.tensor([token[key] for token in case["tokens"]])

    logprobs = column("logp_train").requires_grad_()
    inputs = PolicyLossInput(logprobs, column("logp_rollout"), column("advantage"), torch.ones(5, dtype=torch.bool))
    output = dis_loss(inputs, eps_low=case["eps_low"], eps_high=case["eps_high"])
    output.token_loss.sum().backward()  # type: ignore[no-untyped-call]
    assert output.keep.tolist() == column("keep").tolist()
    close(output.weight, column("weight"))
    close(output.token_loss.detach(), column("token_loss"))
    close(logprobs.grad, column("dloss_dlogp_unnormalised"))
    close(output.token_loss.detach().mean(), case["loss_token_mean_all"])
    close(output.token_loss.detach().sum() / output.keep.sum(), case["loss_token_mean_kept"])


@pytest.mark.parametrize("case", GOLDEN["dis"], ids=lambda case: case["name"])
def test_dis_golden_differs_from_the_non_detached_gradient(case: dict[str, Any]) -> None:
    wrong = [token["wrong_if_not_detached"] for token in case["tokens"]]
    right = [token["dloss_dlogp_unnormalised"] for token in case["tokens"]]
    assert max(abs(a - b) for a, b in zip(wrong, right, strict=True)) > 0.1


@pytest.mark.parametrize("case", GOLDEN["dis"], ids=lambda case: case["name"])
def test_dis_bounds(case: dict[str, Any]) -> None:
    expected = GOLDEN["extra"]["dis_bounds"][case["name"]]
    low, high = log_band(case["eps_low"], case["eps_high"])
    close(torch.tensor([low, high], dtype=torch.float64), expected["log"], atol=1e-9)
    close(torch.tensor([math.exp(low), math.exp(high)], dtype=torch.float64), expected["ratio"], atol=1e-12)


def test_dis_policy_coefficients() -> None:
    for case in GOLDEN["dis"]:
        inputs = PolicyLossInput(
            torch.tensor([token["logp_train"] for token in case["tokens"]]),
            torch.tensor([token["logp_rollout"] for token in case["tokens"]]),
            torch.ones(5),
            torch.ones(5, dtype=torch.bool),
        )
        output = dis_loss(inputs, eps_low=case["eps_low"], eps_high=case["eps_high"])
        close(output.weight, GOLDEN["extra"]["policy_coefficients"][f"dis_{case['name']}"])


def test_policy_metrics() -> None:
    case, kl = GOLDEN["dis"][0], GOLDEN["kl"]
    columns = [torch.tensor([t[key] for t in case["tokens"]]) for key in ("logp_train", "logp_rollout", "advantage")]
    inputs = PolicyLossInput(*columns, torch.ones(5, dtype=torch.bool))
    band = {"eps_low": case["eps_low"], "eps_high": case["eps_high"]}
    sums = Sums()
    add_policy(sums, inputs, dis_loss(inputs, **band), torch.tensor([0, 1, 1, 1, 0]), torch.ones(5), **band)
    metrics = report(sums)
    close(metrics["kl/k1"], kl["k1"])
    close(metrics["kl/k2"], kl["k2"])
    close(metrics["kl/k3"], kl["k3"], atol=2e-6)
    close(metrics["dis/mean_ratio"], kl["mean_ratio"], atol=2e-6)
    close(metrics["mismatch/abs_logp_diff"], kl["abs_diff"])
    close(metrics["mismatch/abs_logp_diff_fresh"], 0.025)
    close(metrics["dis/mask_frac"], case["mask_fraction"])
    close(metrics["dis/mask_low"], 0.2)
    close(metrics["dis/mask_high"], 0.2)
    close(metrics["dis/ess"], 0.3847, atol=5e-5)


def test_explained_variance_is_centred() -> None:
    case = GOLDEN["explained_variance"]
    sums = Sums()
    add_value(sums, torch.tensor(case["V"]), torch.tensor(case["R"]), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    close(report(sums)["value/ev"], case["ev"])
    assert abs(case["ev"] - case["wrong_one_minus_mse_over_var"]) > 1e-3


def test_explained_variance_weightings() -> None:
    case = GOLDEN["extra"]["ev_variants"]
    values = torch.cat([torch.tensor([*t["V"], math.nan]) for t in case["trajs"]])
    targets = torch.cat([torch.tensor([t["R"]] * len(t["V"]) + [math.nan]) for t in case["trajs"]])
    sums = Sums()
    add_value(sums, values, targets, ~values.isnan(), torch.tensor([0, 4, 6]))
    metrics = report(sums)
    close(metrics["value/ev"], case["ev_token"])
    close(metrics["value/ev_first"], case["ev_first_token"])
    close(metrics["value/ev_traj"], case["ev_traj_weighted"])


def test_staleness() -> None:
    case = GOLDEN["extra"]["staleness"]
    versions = torch.tensor(case["versions"], dtype=torch.int32)
    staleness, mask = case["consume_version"] - versions, versions >= 0
    assert staleness[mask].tolist() == [s for s in case["token_staleness"] if s is not None]
    sums = Sums()
    add_staleness(sums, staleness, mask, torch.tensor([0, len(versions)]))
    assert report(sums) == {
        "staleness/mean": case["mean"],
        "staleness/max": case["max"],
        "async/mixed_version_frac": float(case["n_versions"] > 1),
    }


def test_microbatch_norm() -> None:
    """Token losses are unnormalised, so their global sum over the global token count is the right mean."""
    case = GOLDEN["extra"]["microbatch_norm"]
    total, n = 0.0, 0
    for losses in case["token_losses"]:
        ones = torch.ones(len(losses))
        inputs = PolicyLossInput(-ones, -ones, torch.tensor(losses), ones.bool())
        total += dis_loss(inputs, eps_low=0.3, eps_high=5.0).token_loss.sum().item()
        n += len(losses)
    close(total / n, case["correct_global_mean"])
