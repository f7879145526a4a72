"""The reference against every golden number of the specification that it covers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import critic, gae, losses, outcomes
from tests.reference.cases import GAMMAS, LAMBDAS, make_cases

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "algorithm_vectors.json").read_text())
EXTRA = GOLDEN["extra"]
G1 = GOLDEN["gae"][0]
FIVE = [[token[key] for token in GOLDEN["dis"][0]["tokens"]] for key in ("logp_train", "logp_rollout", "advantage")]


def close(actual: Any, expected: Any, atol: float = 1e-9) -> None:
    """Equal to the digits that the file prints."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=atol)


def arguments(case: dict[str, Any]) -> tuple[Any, ...]:
    """One golden case in the order of the recursions."""
    mask = [bool(m) for m in case["action_mask"]]
    return case["value_of_state_before_token"], case["reward"], mask, case["gamma"], case["lam"], case["bootstrap"]


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda case: case["name"])
def test_gae(case: dict[str, Any]) -> None:
    advantages, returns = gae.skip_observation(*arguments(case))
    close(advantages, case["advantage"])
    close(returns, case["return_"])


def test_gae_through_observations() -> None:
    case = next(case for case in GOLDEN["gae"] if case["name"].startswith("G5"))
    mask = [bool(m) for m in G1["action_mask"]]
    for actions in (mask, [True] * 7):
        values, rewards, _, *rest = arguments(case)
        advantages, returns = gae.through_observations(values, rewards, actions, *rest)
        close(advantages, np.where(actions, case["advantage"], 0.0))
        close(returns, np.where(actions, case["return_"], 0.0))


def test_through_equals_skip_for_lambda_one() -> None:
    case = next(case for case in GOLDEN["gae"] if case["name"].startswith("G4"))
    close(gae.through_observations(*arguments(case)), (case["advantage"], case["return_"]))


@pytest.mark.parametrize("poison", [1e9, math.nan])
def test_gae_reads_no_value_of_an_observation(poison: float) -> None:
    for case in GOLDEN["gae"]:
        values, rewards, mask, *rest = arguments(case)
        close(gae.skip_observation(np.where(mask, values, poison), rewards, mask, *rest)[0], case["advantage"])


@pytest.mark.parametrize(("key", "lam"), [("lam0_9", 0.9), ("lam_2_3", gae.length_adaptive_lambda(2, 1.5))])
def test_step_level(key: str, lam: float) -> None:
    golden, turn_ids = GOLDEN["step_level"], [0, 0, 0, -1, -1, 1, 1]
    values, rewards = G1["value_of_state_before_token"], G1["reward"]
    for kind, short, name in (("average", "avg", "V_avg"), ("last", "last", "V_last")):
        advantages, returns = gae.step_level(values, rewards, turn_ids, 1.0, lam, 0.0, kind)  # type: ignore[arg-type]
        for turn, tokens in enumerate(golden["steps"]):
            close(advantages[tokens], [golden[key][short][turn]] * len(tokens))
            close(returns[tokens] - advantages[tokens], [golden[name][turn]] * len(tokens))
        close(advantages[3:5], [0, 0])


@pytest.mark.parametrize("row", EXTRA["lambda_table"], ids=lambda row: f"alpha{row['alpha']}-l{row['l']}")
def test_length_adaptive_lambda(row: dict[str, Any]) -> None:
    lam = gae.length_adaptive_lambda(row["l"], row["alpha"])
    close(lam, row["lam"], atol=1e-15)
    close(lam ** (row["l"] - 1), row["lam_pow_l_minus_1"], atol=1e-11)


@pytest.mark.parametrize("case", GOLDEN["dis"], ids=lambda case: case["name"])
def test_dis(case: dict[str, Any]) -> None:
    found = losses.dis(*FIVE, case["eps_low"], case["eps_high"])
    assert [token.keep for token in found] == [token["keep"] for token in case["tokens"]]
    close([token.weight for token in found], [token["weight"] for token in case["tokens"]])
    close([token.loss for token in found], [token["token_loss"] for token in case["tokens"]])
    close([token.slope for token in found], [token["dloss_dlogp_unnormalised"] for token in case["tokens"]])
    total, kept = sum(token.loss for token in found), sum(token.keep for token in found)
    close(total / 5, case["loss_token_mean_all"])
    close(total / kept, case["loss_token_mean_kept"])
    close(1 - kept / 5, case["mask_fraction"])


def test_dis_band_is_open() -> None:
    half, two = math.log(0.5), math.log(2.0)
    assert [token.keep for token in losses.dis([half, 0.0], [0.0, -two], [1.0, 1.0], 0.5, 1.0)] == [False, False]
    for name, eps_low, eps_high in (("reasoning", 0.3, 5.0), ("coding", 0.8, 3.0)):
        bounds = EXTRA["dis_bounds"][name]
        close([1 - eps_low, 1 + eps_high], bounds["ratio"])
        for log_bound, inwards in zip(bounds["log"], (1, -1), strict=True):
            for step, keep in ((-1e-8, False), (1e-8, True)):
                assert losses.dis([log_bound + inwards * step], [0.0], [1.0], eps_low, eps_high)[0].keep == keep


def test_policy_coefficients() -> None:
    golden = EXTRA["policy_coefficients"]
    found = {
        "dis_reasoning": losses.dis(*FIVE, 0.3, 5.0),
        "dis_coding": losses.dis(*FIVE, 0.8, 3.0),
        "ppo_clip_0.2_0.28": losses.ppo_clip(*FIVE, 0.2, 0.28),
        "cispo_hi_1.28": losses.cispo(*FIVE, 0.28),
        "icepop_0.5_5": losses.mis(*FIVE, 0.5, 5.0),
        "tis_C2": losses.tis(*FIVE, 2.0),
        "reinforce_no_is": losses.tis(FIVE[0], FIVE[0], FIVE[2], 2.0),
    }
    assert found.keys() == golden.keys()
    for name, tokens in found.items():
        close([token.weight for token in tokens], golden[name], atol=5e-7)
        close([token.slope for token in tokens], -np.array(golden[name]) * FIVE[2], atol=5e-7)


def test_sequence_losses_by_hand() -> None:
    """Delta 0.002 and 0: s = exp(0.001)."""
    logp, behaviour = [-1.0, -2.0], [-1.002, -2.0]
    s = math.exp(0.001)
    clipped, kept = losses.gspo(logp, behaviour, [1.0, -1.0], 3e-4, 4e-4)
    assert clipped == losses.REJECTED
    close(kept, (True, s, s, s), atol=1e-12)
    assert losses.sequence_rejection(logp, behaviour, [1.0, -1.0], 0.999, 1.002) == [(1, 1, 1, -1), (1, 1, -2, 1)]
    assert losses.sequence_rejection(logp, behaviour, [1.0, -1.0], 0.999, 1.0005) == [losses.REJECTED] * 2


def test_group_advantages() -> None:
    golden = EXTRA["grpo"]
    rewards, prompts = golden["R"], ["p"] * 8
    close(outcomes.grpo(rewards, prompts, "population"), golden["A_pop"], atol=3e-6)
    close(outcomes.grpo(rewards, prompts, "sample"), golden["A_sample"], atol=3e-6)
    exact = (np.array(rewards) - golden["mean"]) / (golden["std_pop"] + 1e-6)
    close(outcomes.grpo(rewards, prompts, "population"), exact, atol=1e-12)
    close(outcomes.dr_grpo(rewards, prompts), golden["A_drgrpo"])
    close(outcomes.rloo(rewards, prompts), golden["A_rloo"])
    close(outcomes.batch_norm(rewards), (np.array(rewards) - golden["mean"]) / (golden["std_pop"] + 1e-8), atol=1e-12)


@pytest.mark.parametrize("name", ["prev_only", "inclusive"])
@pytest.mark.parametrize("per_prompt", [True, False])
def test_running_mean(name: str, per_prompt: bool) -> None:
    golden = EXTRA["running_mean_window3"]
    tracker = outcomes.RunningMean(3, per_prompt, name == "inclusive", golden["prev_only"]["init"])
    close([tracker.step(reward, "p") for reward in golden["rewards"]], golden[name]["advantage"])


def test_spo() -> None:
    golden = EXTRA["spo_tracker"]
    tracker = outcomes.SpoTracker(golden["D_half"], golden["rho_min"], golden["rho_max"], golden["v0"])
    for step in golden["steps"]:
        close(tracker.alpha / (tracker.alpha + tracker.beta), step["v_before"])
        close(tracker.step(step["r"], step["D"]), step["A"])
        close([tracker.alpha, tracker.beta], [step["alpha"], step["beta"]])
        close(tracker.alpha / (tracker.alpha + tracker.beta), step["v_after"])


def test_return_to_go_is_gae_without_a_critic() -> None:
    for case in GOLDEN["gae"]:
        _, rewards, mask, gamma, _, _ = arguments(case)
        close(
            outcomes.return_to_go(rewards, mask, gamma), gae.skip_observation([0.0] * len(mask), rewards, mask, gamma, 1, 0)[0]
        )


def test_whiten() -> None:
    close(outcomes.whiten([1.0, 2.0, 3.0]), np.array([-1.0, 0.0, 1.0]) / math.sqrt(1 + 1e-8))
    assert outcomes.whiten([3.0]) == [3.0]
    assert outcomes.whiten([]) == []


def test_explained_variance() -> None:
    golden = GOLDEN["explained_variance"]
    close(critic.explained_variance([golden["V"]], [golden["R"]], "token"), golden["ev"])
    values = [row["V"] for row in EXTRA["ev_variants"]["trajs"]]
    targets = [[row["R"]] * len(row["V"]) for row in EXTRA["ev_variants"]["trajs"]]
    for weighting, key in (("token", "ev_token"), ("first", "ev_first_token"), ("trajectory", "ev_traj_weighted")):
        close(critic.explained_variance(values, targets, weighting), EXTRA["ev_variants"][key])  # type: ignore[arg-type]
    assert math.isnan(critic.explained_variance([[0.1, 0.9]], [[1.0, 1.0]], "token"))


def test_squared_error() -> None:
    close(critic.squared_error([0.8, 0.1], [1.0, 0.0]), [0.04, 0.01])
    close(critic.squared_error([0.8, 0.1], [1.0, 0.0], [0.2, 0.15], clip=0.2), [0.36, 0.01])


def test_the_generator_covers_what_it_promises() -> None:
    """Ragged, single action tokens, trailing observations, turns without an observation between; the same for a seed."""
    cases = make_cases(1000, 1)
    again = make_cases(1000, 1)
    assert all(
        np.array_equal(a.values, b.values) and np.array_equal(a.turn_ids, b.turn_ids) for a, b in zip(cases, again, strict=True)
    )
    layouts = [case.turn_ids[s] for case in cases for _, s in case.bounds()]
    assert {len(layout) for layout in layouts} == set(range(1, 41))
    assert {len(case.bootstrap) for case in cases} == set(range(1, 7))
    assert {case.gamma for case in cases} == set(GAMMAS) and {case.lam for case in cases} == set(LAMBDAS)
    assert all((layout >= 0).any() for layout in layouts)
    for kind, found in {
        "single action token": sum((layout >= 0).sum() == 1 for layout in layouts),
        "trailing observation": sum(layout[-1] < 0 for layout in layouts),
        "no prompt": sum(layout[0] == 0 for layout in layouts),
        "adjacent turns": sum(bool(((np.diff(layout) == 1) & (layout[:-1] >= 0)).any()) for layout in layouts),
        "several turns": sum(layout.max() > 1 for layout in layouts),
        "bootstrap": sum(int((case.bootstrap != 0).sum()) for case in cases),
    }.items():
        assert found > 50, kind
    assert any((case.turn_ids[s] < 0).all() for case in make_cases(50, 1, zero_actions=True) for _, s in case.bounds())
