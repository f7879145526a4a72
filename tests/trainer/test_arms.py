"""Every arm: one real step under FSDP2 moves the policy along the gradient that `by_hand` finds without the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.registry import BUILTIN, find
from harness.trajectory import Trajectory
from tests.trainer import by_hand, support
from trainer.model import Critic, build_policy
from trainer.step import Learners

pytestmark = pytest.mark.usefixtures("rank")

DIS = {"id": "dis", "eps_low": 0.3, "eps_high": 0.5}
LOSSES: dict[str, list[dict[str, Any]]] = {
    "dis": [{"eps_low": 0.3, "eps_high": 0.5}, {"eps_low": 1.0, "eps_high": 0.1}],
    "ppo_clip": [{}, {"old": "rollout"}],
    "grpo": [{}, {"old": "rollout"}],
    "dr_grpo": [{}, {"old": "rollout", "eps_low": 0.1}],
    "dapo": [{}, {"old": "rollout"}],
    "gspo": [{}, {"eps_low": 0.05, "eps_high": 0.05}],
    "cispo": [{}],
    "tis": [{"cap": 1.1}],
    "mis": [{"low": 0.8, "high": 1.3}],
    "sequence_rejection": [{"low": 0.95, "high": 1.05}],
}
"""Options that reject or cut some tokens of `near`, where the loss can."""
CRITICS = [name for name in BUILTIN["advantage"] if find("advantage", name).kind == "critic"]
CRITIC_FREE = [name for name in BUILTIN["advantage"] if name not in CRITICS]
WITH_MEMORY = ["running_mean_prompt", "running_mean_global", "spo"]
ON_A_SPOT = support.optimizer(lr=1e-12)
"""The policy stays where it is, so that the gradients of several steps are taken at the weights of the folder."""


@pytest.fixture(scope="module")
def near(moe: Path) -> list[Trajectory]:
    """Groups, segments and a turn reward; ratios around 1."""
    return support.on_policy(build_policy(moe), support.grouped(0), noise=0.3)


def seen(made: Learners) -> list[dict[str, torch.Tensor]]:
    """Gradients of the policy."""
    assert isinstance(made.policy_optimizer, support.Recorded)
    return made.policy_optimizer.seen


def alone(folder: Path, made: Learners) -> Critic:
    """The critic as it is now, unsharded."""
    assert made.critic is not None
    critic = support.critic_of(folder)
    critic.load_state_dict(support.parameters(made.critic))
    return critic


def test_every_plug_in_is_here() -> None:
    assert set(LOSSES) == set(BUILTIN["loss"])
    assert len(CRITICS) == 4 and len(CRITIC_FREE) == 9


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("name", CRITICS)
def test_critic_estimators(moe: Path, near: list[Trajectory], name: str, when: str) -> None:
    """Their lambda, their steps, their values; the gradient of any other of them is far from it."""
    made = support.learners(moe)
    algorithm = support.algorithm(loss=DIS, advantage={"id": name}, gamma=0.95, advantage_values=when)
    metrics = support.step(made, near, algorithm, micro_batch_tokens=50)["metrics"]
    critic = support.critic_of(moe) if when == "pre" else alone(moe, made)
    for other in CRITICS:
        advantages = [by_hand.estimate(other, critic, t, gamma=0.95)[0] for t in near]
        distance = support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, advantages, DIS)[0])
        assert distance < 2e-5 if other == name else distance > 1e-3, other
    advantages = [by_hand.estimate(name, critic, t, gamma=0.95)[0] for t in near]
    assert metrics["adv/mean"] == pytest.approx(np.concatenate(advantages).mean(), abs=1e-5)


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_critic_free_estimators(moe: Path, near: list[Trajectory], name: str) -> None:
    """Groups are of episodes: a gradient that counts segments, or forgets turn rewards, is another one."""
    made = support.without_critic(moe)
    algorithm = support.algorithm(loss=DIS, advantage={"id": name})
    assert support.step(made, near, algorithm, critic_updates=0, micro_batch_tokens=50)["stepped"]
    expected, _ = by_hand.policy_gradient(moe, near, by_hand.outcome_advantages(name, near), DIS)
    assert support.apart(seen(made)[0], expected) < 2e-5
    split = [t if t.segment == 0 else replace(t, episode_id=f"{t.episode_id}-fork") for t in near]
    bare = [t.judged(t.reward or 0.0) for t in near]
    for wrong in [bare] if name == "reinforce_pp" else [split, bare]:  # no statistics per episode
        other, _ = by_hand.policy_gradient(moe, near, by_hand.outcome_advantages(name, wrong), DIS)
        assert support.apart(seen(made)[0], other) > 1e-3


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_discounted_returns(moe: Path, near: list[Trajectory], name: str) -> None:
    made = support.without_critic(moe)
    support.step(made, near, support.algorithm(loss=DIS, advantage={"id": name}, gamma=0.9), critic_updates=0)
    right, wrong = (by_hand.outcome_advantages(name, near, gamma=gamma) for gamma in (0.9, 1.0))
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, right, DIS)[0]) < 2e-5
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, wrong, DIS)[0]) > 1e-2


@pytest.mark.parametrize("norm", ["global_mean_std", "global_std_only"])
@pytest.mark.parametrize("name", ["skip_observation", "spo"])
def test_whitening(moe: Path, near: list[Trajectory], name: str, norm: str) -> None:
    """Over the tokens of the batch, before DIS rejects any."""
    made = support.learners(moe) if name in CRITICS else support.without_critic(moe)
    algorithm = support.algorithm(loss=DIS, advantage={"id": name}, advantage_norm=norm, advantage_values="pre")
    metrics = support.step(made, near, algorithm, micro_batch_tokens=50)["metrics"]
    if name in CRITICS:
        raw = [by_hand.estimate(name, support.critic_of(moe), t)[0] for t in near]
    else:
        raw = by_hand.outcome_advantages(name, near)
    white = by_hand.whitened(raw, centre=norm == "global_mean_std")
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, white, DIS)[0]) < 2e-5
    assert metrics["adv/std"] == pytest.approx(1.0, rel=0.02)
    assert (abs(metrics["adv/mean"]) < 1e-6) == (norm == "global_mean_std")


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_memory_over_several_steps(moe: Path, name: str) -> None:
    """Three batches on the same prompts: baselines come from the batches before, and for SPO from how far the policy moved."""
    made = support.without_critic(moe, ON_A_SPOT)
    algorithm = support.algorithm(loss=DIS, advantage={"id": name})
    memory: dict[str, Any] = {}
    drift, k3s = 0.0, []
    for i in range(3):
        near = support.on_policy(build_policy(moe), support.grouped(i), noise=0.15, seed=i)
        advantages = by_hand.outcome_advantages(name, near, memory, drift)
        metrics = support.step(made, near, algorithm, critic_updates=0)["metrics"]
        expected, _ = by_hand.policy_gradient(moe, near, advantages, DIS)
        assert support.apart(seen(made)[i], expected) < 2e-5
        if i:
            forgotten, _ = by_hand.policy_gradient(moe, near, by_hand.outcome_advantages(name, near), DIS)
            assert support.apart(seen(made)[i], forgotten) > 1e-2
        age = np.concatenate([6 - t.policy_versions[t.loss_mask] for t in near]).mean()
        drift += metrics["kl/k3"] / max(age, 1.0)
        k3s.append(metrics["kl/k3"] / age)
        assert made.memory.drift == pytest.approx(drift)
    assert 0.0035 < k3s[0] < 0.0116, "the tracker's memory is between its bounds, so that the drift is read"


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, several in LOSSES.items() for o in several], ids=str)
def test_losses_with_their_own_norms(moe: Path, near: list[Trajectory], name: str, options: dict[str, Any]) -> None:
    """On a critic's advantages, which differ from token to token."""
    loss, norm = {"id": name} | options, find("loss", name).norm
    made = support.learners(moe)
    algorithm = support.algorithm(loss=loss, loss_norm=norm, advantage_values="pre")
    metrics = support.step(made, near, algorithm, micro_batch_tokens=50)["metrics"]
    advantages = [by_hand.estimate("skip_observation", support.critic_of(moe), t)[0] for t in near]
    expected, kept = by_hand.policy_gradient(moe, near, advantages, loss, norm)
    assert support.apart(seen(made)[0], expected) < 2e-5
    assert metrics["dis/kept_tokens"] == kept
    n = sum(t.n_actions for t in near)
    drops = (
        name not in ("cispo", "tis") and options.get("old", find("loss", name).Config().model_dump().get("old")) != "trainer"
    )
    assert 0 < kept < n if drops else kept == n


@pytest.mark.parametrize(
    ("loss", "estimator"),
    [
        ({"id": "grpo", "eps_high": 0.28}, "grpo"),
        ({"id": "dr_grpo"}, "dr_grpo"),
        ({"id": "gspo", "eps_low": 0.05, "eps_high": 0.05}, "grpo"),
        ({"id": "dapo", "old": "rollout"}, "rloo"),
        ({"id": "cispo"}, "reinforce_pp_baseline"),
    ],
    ids=str,
)
def test_published_pairs(moe: Path, near: list[Trajectory], loss: dict[str, Any], estimator: str) -> None:
    made = support.without_critic(moe)
    norm = find("loss", loss["id"]).norm
    support.step(made, near, support.algorithm(loss=loss, advantage={"id": estimator}, loss_norm=norm), critic_updates=0)
    advantages = by_hand.outcome_advantages(estimator, near)
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, advantages, loss, norm)[0]) < 2e-5


def test_on_policy_dis_is_reinforce(moe: Path) -> None:
    """Where the engine's log-probs are the trainer's, all weights are 1."""
    fresh = support.on_policy(build_policy(moe), support.grouped(1), noise=0.0)
    made = support.without_critic(moe)
    metrics = support.step(made, fresh, support.algorithm(loss=DIS, advantage={"id": "grpo"}))["metrics"]
    assert metrics["dis/mask_frac"] == 0.0 and metrics["dis/mean_ratio"] == pytest.approx(1.0, abs=1e-5)
    advantages = by_hand.outcome_advantages("grpo", fresh)
    everything = {"id": "sequence_rejection", "low": 1e-9, "high": 1e9}  # weight 1 on every token: plain REINFORCE
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, fresh, advantages, everything)[0]) < 2e-5


@pytest.mark.parametrize("name", CRITICS)
def test_lambda_one_is_return_minus_value(moe: Path, near: list[Trajectory], name: str) -> None:
    """So skip and through coincide, and steps differ only in what a value is."""
    made = support.learners(moe)
    algorithm = support.algorithm(loss=DIS, advantage={"id": name, "lam": 1.0}, advantage_values="pre")
    metrics = support.step(made, near, algorithm)["metrics"]
    critic, advantages = support.critic_of(moe), []
    for t in near:
        v, turns = by_hand.values_before(critic, t)[t.loss_mask], t.turn_ids[t.loss_mask]
        togo = np.cumsum(t.token_rewards()[t.loss_mask][::-1])[::-1]
        if name.startswith("step"):
            pick = np.mean if name == "step_average" else lambda x: x[-1]
            v = np.array([pick(v[turns == turn]) for turn in turns])
            togo = np.array([togo[turns == turn][0] for turn in turns])
        advantages.append(togo - v)
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, near, advantages, DIS)[0]) < 2e-5
    assert metrics["lambda/mean"] == metrics["lambda/end_weight"] == 1.0
