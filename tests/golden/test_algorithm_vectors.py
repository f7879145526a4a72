"""Golden numbers of the SAO specification (`algorithm_vectors.json`, made by two independent scripts, not by this code)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.advantages.gae import length_adaptive_lambda, skip_observation_gae, value_targets
from trainer.advantages.group import group_centred, group_normalised, leave_one_out
from trainer.advantages.running_mean import running_mean
from trainer.advantages.spo import spo
from trainer.advantages.step import STEP_AVERAGE, STEP_LAST
from trainer.advantages.through import THROUGH_OBSERVATIONS
from trainer.advantages.types import AdvantageInput, CriticEstimator, Outcomes, State
from trainer.batch import Packed
from trainer.losses.cispo import cispo_loss
from trainer.losses.dis import dis_loss, log_band
from trainer.losses.mis import mis_loss
from trainer.losses.ppo_clip import clipped_surrogate
from trainer.losses.tis import tis_loss
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.measure import critic, off_policy, staleness
from trainer.measure.sums import Sums
from trainer.measure.tokens import TokenFacts, token_facts

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


@pytest.mark.parametrize(
    ("key", "loss", "options"),
    [
        ("ppo_clip_0.2_0.28", clipped_surrogate, {"eps_low": 0.2, "eps_high": 0.28, "old": "rollout"}),
        ("cispo_hi_1.28", cispo_loss, {"eps_high": 0.28}),
        ("icepop_0.5_5", mis_loss, {"low": 0.5, "high": 5.0}),
        ("tis_C2", tis_loss, {"cap": 2.0}),
    ],
)
def test_policy_coefficients(key: str, loss: Callable[..., PolicyLossOutput], options: dict[str, Any]) -> None:
    five = GOLDEN["dis"][0]["tokens"]
    columns = [torch.tensor([token[name] for token in five]) for name in ("logp_train", "logp_rollout", "advantage")]
    inputs = PolicyLossInput(*columns, torch.ones(5, dtype=torch.bool))
    inputs.logprobs.requires_grad_()
    output = loss(inputs, **options)
    coefficients = torch.tensor(GOLDEN["extra"]["policy_coefficients"][key])
    output.token_loss.sum().backward()  # type: ignore[no-untyped-call]
    close(output.weight, coefficients)
    close(inputs.logprobs.grad, -coefficients * inputs.advantages)


def facts_of(mask: Tensor, versions: Tensor, cu_seqlens: list[int], consume_version: int) -> TokenFacts:
    """Facts of a pack of which only the mask and the versions matter; every action is a turn."""
    n = len(mask)
    packed = Packed(
        tokens=torch.zeros(n, dtype=torch.int32),
        positions=torch.zeros(n, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        mask=mask,
        rewards=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        versions=versions,
        turn_ids=torch.where(mask, mask.cumsum(0), -1).int(),
    )
    return token_facts(packed, consume_version, [0] * (len(cu_seqlens) - 1))


def test_policy_metrics() -> None:
    case, kl = GOLDEN["dis"][0], GOLDEN["kl"]
    columns = [torch.tensor([t[key] for t in case["tokens"]]) for key in ("logp_train", "logp_rollout", "advantage")]
    mask = torch.ones(5, dtype=torch.bool)
    inputs = PolicyLossInput(*columns, mask)
    output = dis_loss(inputs, eps_low=case["eps_low"], eps_high=case["eps_high"])
    sums = Sums()
    off_policy.add(sums, inputs, output, facts_of(mask, torch.tensor([6, 5, 5, 5, 6]), [0, 5], 6), torch.ones(5))
    metrics = off_policy.report(sums)
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
    close(metrics["dis/ess_kept"], 0.6411, atol=5e-5)


def value_metrics(values: list[list[float]], rewards: list[list[float]]) -> dict[str, float | None]:
    lengths = [len(v) for v in values]
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mask = torch.ones(cu[-1], dtype=torch.bool)
    facts = facts_of(mask, torch.zeros(cu[-1], dtype=torch.int32), cu, 0)
    success = torch.tensor([r[0] > 0.5 for r in rewards])
    sums = Sums()
    flat = (torch.tensor([x for row in rows for x in row]) for rows in (values, rewards))
    critic.add(sums, *flat, facts, success, r_min=0.0, r_max=1.0)
    return critic.report(sums)


def test_explained_variance_is_centred() -> None:
    case = GOLDEN["explained_variance"]
    close(value_metrics([case["V"]], [case["R"]])["value/ev"], case["ev"])
    assert abs(case["ev"] - case["wrong_one_minus_mse_over_var"]) > 1e-3


def test_explained_variance_weightings() -> None:
    case = GOLDEN["extra"]["ev_variants"]
    metrics = value_metrics([t["V"] for t in case["trajs"]], [[t["R"]] * len(t["V"]) for t in case["trajs"]])
    close(metrics["value/ev"], case["ev_token"])
    close(metrics["value/ev_first"], case["ev_first_token"])
    close(metrics["value/ev_traj"], case["ev_traj_weighted"])


def test_staleness() -> None:
    case = GOLDEN["extra"]["staleness"]
    versions = torch.tensor(case["versions"], dtype=torch.int32)
    facts = facts_of(versions >= 0, versions, [0, len(versions)], case["consume_version"])
    assert facts.staleness.tolist() == [s for s in case["token_staleness"] if s is not None]
    sums = Sums()
    staleness.add(sums, facts)
    metrics = staleness.report(sums)
    for name, key in (("mean", "mean"), ("max", "max"), ("traj_span", "span"), ("traj_versions", "n_versions")):
        assert metrics[f"staleness/{name}"] == case[key]
    assert metrics["async/mixed_version_frac"] == float(case["n_versions"] > 1)


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


# The other estimators: through observations, step level, groups, running mean, SPO.


def _worked_example(case: dict[str, Any]) -> AdvantageInput:
    """The seven tokens of the GAE cases: two turns around an observation of two."""
    turns = torch.tensor([0, 0, 0, -1, -1, 1, 1])
    values = torch.tensor(case["value_of_state_before_token"])
    rewards = torch.tensor(case["reward"], dtype=torch.float32)
    return AdvantageInput(values, rewards, turns >= 0, turns, torch.tensor([0, 7]), torch.zeros(1), case["gamma"])


def test_through_observations() -> None:
    case = next(case for case in GOLDEN["gae"] if case["name"].startswith("G5_through"))
    inputs = _worked_example(case)
    estimate = THROUGH_OBSERVATIONS.estimate(inputs, case["lam"])
    for actual, key in ((estimate.advantages, "advantage"), (estimate.returns, "return_")):
        close(actual, torch.where(inputs.mask, torch.tensor(case[key], dtype=torch.float64), 0.0))
    assert THROUGH_OBSERVATIONS.length(inputs).tolist() == [7]


@pytest.mark.parametrize(("lam", "key"), [(0.9, "lam0_9"), (None, "lam_2_3")])
@pytest.mark.parametrize(("estimator", "form"), [(STEP_AVERAGE, "avg"), (STEP_LAST, "last")], ids=["average", "last"])
def test_step_level(estimator: CriticEstimator, form: str, lam: float | None, key: str) -> None:
    case, inputs = GOLDEN["step_level"], _worked_example(GOLDEN["gae"][0])
    policy_lambda = length_adaptive_lambda(estimator.length(inputs), 1.5) if lam is None else lam
    estimate = estimator.estimate(inputs, policy_lambda)
    for i, step in enumerate(case["steps"]):
        advantage = torch.full((len(step),), case[key][form][i], dtype=torch.float64)
        close(estimate.advantages[step], advantage)
        close(estimate.returns[step], advantage + case[f"V_{form}"][i])
    assert estimate.advantages[3:5].tolist() == [0.0, 0.0]


def _one_prompt(rewards: list[float], drift: float = 0.0) -> Outcomes:
    return Outcomes(torch.tensor(rewards, dtype=torch.float64), ("prompt",) * len(rewards), drift)


def test_groups() -> None:
    """The golden quotients have no epsilon: 1e-6 / std is 2e-6 of them."""
    case = GOLDEN["extra"]["grpo"]
    outcomes = _one_prompt(case["R"])
    close(group_normalised(outcomes, {})[0], case["A_pop"], atol=3e-6)
    close(group_normalised(outcomes, {}, std="sample")[0], case["A_sample"], atol=3e-6)
    close(group_centred(outcomes, {})[0], case["A_drgrpo"])
    close(leave_one_out(outcomes, {})[0], case["A_rloo"])


@pytest.mark.parametrize(("inclusive", "key"), [(False, "prev_only"), (True, "inclusive")])
def test_running_mean(inclusive: bool, key: str) -> None:
    case = GOLDEN["extra"]["running_mean_window3"]
    advantages, _ = running_mean(
        _one_prompt(case["rewards"]), {}, window=3, per_prompt=True, inclusive=inclusive, initial=case["prev_only"]["init"]
    )
    close(advantages, case[key]["advantage"], atol=1e-12)


def test_spo_tracker() -> None:
    case = GOLDEN["extra"]["spo_tracker"]
    options = {"d_half": case["D_half"], "rho_min": case["rho_min"], "rho_max": case["rho_max"], "v0": case["v0"]}
    state: State = {}
    drift = 0.0
    for step in case["steps"]:
        drift += step["D"]
        advantages, state = spo(_one_prompt([step["r"]], drift), state, **options)
        close(advantages, [step["A"]], atol=1e-12)
        close(torch.tensor(state["prompt"], dtype=torch.float64), [step["alpha"], step["beta"], drift], atol=1e-12)
