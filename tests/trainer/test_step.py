"""One SAO step against plain transformers and loops by hand; order of values, targets, freezing, guards, controls."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.trajectory import Trajectory
from tests.trainer import support
from trainer import critic_step, policy_step
from trainer.batch import MicroBatch, pack
from trainer.model import Critic, build_policy
from trainer.report import Report
from trainer.step import shuffled_rewards
from trainer.weights import export

pytestmark = pytest.mark.usefixtures("rank")

BAND = {"eps_low": 0.3, "eps_high": 0.5}


@pytest.fixture(scope="module")
def near(moe: Path) -> list[Trajectory]:
    """A batch of the policy's own tokens: some ratios inside the band, some outside on either side."""
    return support.on_policy(build_policy(moe), support.batch(3, 7), noise=0.4)


# --- by hand ---------------------------------------------------------------------------------------------------------


def values_alone(critic: Critic, trajectory: Trajectory) -> np.ndarray:
    """V before each action token, one sequence at a time."""
    with torch.no_grad():
        after = critic(torch.from_numpy(trajectory.tokens), torch.arange(len(trajectory)), [0, len(trajectory)])
    return after.double().numpy()[np.flatnonzero(trajectory.loss_mask) - 1]


def gae_alone(trajectory: Trajectory, values: np.ndarray, lam: float, gamma: float = 1.0, bootstrap: float = 0.0) -> np.ndarray:
    """The recursion of algorithm.md 2.1 on action tokens only."""
    rewards = trajectory.token_rewards()[trajectory.loss_mask].astype(float)
    out, advantage, following = np.zeros(len(values)), 0.0, bootstrap
    for j in reversed(range(len(values))):
        advantage = rewards[j] + gamma * following - values[j] + gamma * lam * advantage
        out[j], following = advantage, values[j]
    return out


def adaptive(trajectory: Trajectory, alpha: float = 1.5) -> float:
    return max(0.0, 1 - 1 / max(alpha * trajectory.n_actions, 1.0))


def policy_gradient(
    folder: Path, trajectories: list[Trajectory], critic: Critic, band: dict[str, float], *, detach: bool = True
) -> dict[str, Tensor]:
    """-(1/N) sum_t w_t A_t grad log pi(t), with transformers' own model and attention, one sequence at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    n = sum(t.n_actions for t in trajectories)
    low = math.log(1 - band["eps_low"]) if band["eps_low"] < 1 else -math.inf
    high = math.log(1 + band["eps_high"])
    for t in trajectories:
        ids = torch.from_numpy(t.tokens.astype(np.int64))
        where = torch.from_numpy(np.flatnonzero(t.loss_mask))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logp = torch.log_softmax(logits, -1)[where - 1].gather(1, ids[where, None])[:, 0]
        ratio = (logp - torch.from_numpy(t.rollout_logprobs)[where]).exp()
        keep = (ratio.log() > low) & (ratio.log() < high)
        weight = torch.where(keep, ratio.detach() if detach else ratio, 0.0)
        advantage = torch.from_numpy(gae_alone(t, values_alone(critic, t), adaptive(t))).float()
        (-(weight * advantage * logp).sum() / n).backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("when", ["pre", "post"])
def test_policy_gradient_by_hand(moe: Path, near: list[Trajectory], when: str) -> None:
    """T-CRITIC-ORDER: `pre` reads the critic before, `post` after all K updates; T-NORM: rejected tokens stay in N."""
    made = support.learners(moe)
    result = support.step(made, near, algorithm=support.algorithm(advantage_values=when, **BAND), micro_batch_tokens=40)
    old, new = support.critic_of(moe), support.critic_of(moe)
    new.load_state_dict(support.parameters(made.critic), strict=True)
    assert 0.2 < result["metrics"]["dis/mask_frac"] < 0.8
    right, wrong = (old, new) if when == "pre" else (new, old)
    seen = made.policy_optimizer.seen  # type: ignore[attr-defined]
    assert len(seen) == 1
    assert support.apart(seen[0], policy_gradient(moe, near, right, BAND)) < 2e-5
    assert support.apart(seen[0], policy_gradient(moe, near, wrong, BAND)) > 1e-2
    values = [gae_alone(t, values_alone(right, t), adaptive(t)) for t in near]
    assert result["metrics"]["adv/mean"] == pytest.approx(np.concatenate(values).mean(), abs=1e-5)


def test_the_ratio_is_detached(moe: Path, near: list[Trajectory]) -> None:
    """The mutation `dis_detach=False` would turn the sign of improbable tokens; the real gradient is far from it."""
    made = support.learners(moe)
    support.step(made, near, algorithm=support.algorithm(advantage_values="pre", **BAND))
    mutant = policy_gradient(moe, near, support.critic_of(moe), BAND, detach=False)
    assert support.apart(made.policy_optimizer.seen[0], mutant) > 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize("lam", [1.0, 0.6])
def test_critic_order_and_fixed_targets(moe: Path, near: list[Trajectory], lam: float) -> None:
    """K steps on the same targets G(v_0), although V moves between them; for lambda 1, G is R (T-TARGET)."""
    algorithm = support.algorithm(lam_value=lam)
    v0 = support.critic_of(moe)
    targets = [gae_alone(t, values_alone(v0, t), lam) + values_alone(v0, t) for t in near]
    if lam == 1.0:
        assert all(np.allclose(g, t.reward) for g, t in zip(targets, near, strict=True))
    errors = []
    for updates in range(4):
        made = support.learners(moe)
        support.step(made, near, algorithm=algorithm, critic_updates=max(updates, 1)) if updates else None
        assert made.critic_optimizer.steps == updates and made.policy_optimizer.steps == min(updates, 1)
        critic = support.critic_of(moe)
        critic.load_state_dict(support.parameters(made.critic))
        errors.append(np.concatenate([values_alone(critic, t) - g for t, g in zip(near, targets, strict=True)]))
    report = support.step(support.learners(moe), near, algorithm=algorithm, critic_updates=4)["metrics"]
    for k, error in enumerate(errors):
        assert report[f"value/mse_{k}"] == pytest.approx(np.square(error).mean(), rel=1e-4)
    assert report["value/bias"] == pytest.approx(errors[0].mean(), abs=1e-5)
    assert "value/mse_4" not in report


def test_the_critic_reads_rejected_tokens_too(moe: Path, near: list[Trajectory]) -> None:
    seen = []
    for band in (BAND, {"eps_low": 1.0, "eps_high": 50.0}):
        made = support.learners(moe)
        support.step(made, near, algorithm=support.algorithm(**band))
        seen.append(made.critic_optimizer.seen)  # type: ignore[attr-defined]
    assert all(support.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_truncated_end_is_bootstrapped_only_on_request(moe: Path, near: list[Trajectory]) -> None:
    cut = [t.judged(t.reward or 0.0, termination="max_context" if i % 2 else "finished") for i, t in enumerate(near)]
    critic = support.critic_of(moe)
    for mode in ("zero", "bootstrap"):
        made = support.learners(moe)
        report = support.step(made, cut, algorithm=support.algorithm(truncation=mode, advantage_values="pre", gamma=0.9))
        errors, advantages = [], []
        for i, t in enumerate(cut):
            with torch.no_grad():
                end = critic(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)])[-1].item()
            boot = end if mode == "bootstrap" and i % 2 else 0.0
            v = values_alone(critic, t)
            errors.append(gae_alone(t, v, 1.0, 0.9, boot))
            advantages.append(gae_alone(t, v, adaptive(t), 0.9, boot))
        assert report["metrics"]["value/mse_0"] == pytest.approx(np.square(np.concatenate(errors)).mean(), rel=1e-4)
        assert report["metrics"]["adv/mean"] == pytest.approx(np.concatenate(advantages).mean(), abs=1e-5)


def test_staleness_counts_from_the_consuming_version(moe: Path, near: list[Trajectory]) -> None:
    report = support.step(support.learners(moe), near, version=9)["metrics"]
    stale = np.concatenate([9 - t.policy_versions[t.loss_mask] for t in near])
    assert report["staleness/mean"] == pytest.approx(stale.mean()) and report["staleness/max"] == stale.max()


# --- invariant 5: layout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "global_mean_std"])
def test_layout_changes_nothing(moe: Path, near: list[Trajectory], norm: str) -> None:
    algorithm = support.algorithm(advantage_norm=norm, **BAND)

    def run(trajectories: list[Trajectory], tokens: int) -> tuple[Any, ...]:
        made = support.learners(moe, policy_optimizer=support.optimizer(lr=1e-3), critic_optimizer=support.optimizer(lr=1e-3))
        report = support.step(made, trajectories, algorithm=algorithm, micro_batch_tokens=tokens)["metrics"]
        return support.gradients(made), support.state(made), report

    gradients, state, report = run(near, 10**6)
    shuffled = near[::-1]
    random.Random(0).shuffle(shuffled)
    for trajectories, tokens in ((near, 1), (near, 40), (shuffled, 10**6), (shuffled, 33)):
        other = run(trajectories, tokens)
        assert support.apart(other[0], gradients) < 2e-5
        assert support.spread(other[1], state) < 2e-5
        assert other[2].keys() == report.keys()
        for name, value in report.items():
            assert other[2][name] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), name


def test_a_batch_twice_over_is_the_same_batch(moe: Path, near: list[Trajectory]) -> None:
    once, twice = support.learners(moe), support.learners(moe)
    support.step(once, near)
    support.step(twice, near + near, micro_batch_tokens=50)
    assert support.apart(support.gradients(twice), support.gradients(once)) < 5e-5


# --- invariant 4: observations ---------------------------------------------------------------------------------------


def test_poison_on_observations_is_never_read(moe: Path, near: list[Trajectory]) -> None:
    seen = []
    for poison in (False, True):
        made = support.learners(moe)
        packed = pack(near)
        n, mask = len(packed.tokens), packed.mask
        generator = torch.Generator().manual_seed(1)
        values, targets, advantages = (torch.randn(n, generator=generator) for _ in range(3))
        if poison:
            packed.rollout_logprobs[~mask] = 1e30
            packed.rollout_logprobs[(~mask).nonzero()[::2, 0]] = float("-inf")
            packed.versions[~mask] = 10**6
            packed.turn_ids[~mask] = 77
            values[~mask], targets[~mask], advantages[~mask] = 9.9e9, float("nan"), float("inf")
        b = MicroBatch(
            packed,
            episodes=torch.arange(len(near)),
            truncated=torch.zeros(len(near)),
            success=torch.tensor([t.reward == 1.0 for t in near]),
            length_deciles=[0] * len(near),
            weights=torch.full((len(near),), 1.0 / float(mask.sum())),
            values=values,
            targets=targets,
            advantages=advantages,
        )
        objective = support.algorithm(value_clip=0.2, **BAND)
        report = Report(near, [b], objective, version=6, update_ratio=True)
        report.values([b], after=False)
        report.advantages([b])
        loss = critic_step.backward(made.critic, [b], objective)
        report.move("critic_0", made.critic, made.critic_optimizer)
        kept = policy_step.backward(made.policy, [b], objective, update=True, observe=report.policy)
        report.move("policy", made.policy, made.policy_optimizer)
        seen.append((support.gradients(made), loss, report.finish(kept)))
    assert support.equal(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]


def test_a_trailing_observation_changes_nothing(moe: Path, near: list[Trajectory]) -> None:
    """Whatever the sandbox printed after the last action: no gradient, no advantage, no share of the mean."""
    rng = np.random.default_rng(0)

    def longer(t: Trajectory) -> Trajectory:
        n = int(rng.integers(5, 60))
        return replace(
            t,
            tokens=np.concatenate([t.tokens, rng.integers(0, support.VOCAB, n)]).astype(np.int32),
            turn_ids=np.concatenate([t.turn_ids, np.full(n, -1)]).astype(np.int32),
            rollout_logprobs=np.concatenate([t.rollout_logprobs, np.full(n, np.nan)]).astype(np.float32),
            policy_versions=np.concatenate([t.policy_versions, np.full(n, -1)]).astype(np.int32),
        )

    short, long = support.learners(moe), support.learners(moe)
    a = support.step(short, near, algorithm=support.algorithm(**BAND))
    b = support.step(long, [longer(t) for t in near], algorithm=support.algorithm(**BAND))
    assert support.apart(support.gradients(long), support.gradients(short)) < 5e-5
    assert a["metrics"]["adv/mean"] == pytest.approx(b["metrics"]["adv/mean"], abs=1e-5)


def test_a_trailing_observation_gets_no_gradient(moe: Path) -> None:
    """A token id that occurs only there has a zero row in the embedding's gradient."""
    base = support.batch(11, 1)[0]
    t = replace(
        base,
        tokens=np.concatenate([base.tokens % 60, [62, 63]]).astype(np.int32),
        turn_ids=np.concatenate([base.turn_ids, [-1, -1]]).astype(np.int32),
        rollout_logprobs=np.concatenate([base.rollout_logprobs, [np.nan] * 2]).astype(np.float32),
        policy_versions=np.concatenate([base.policy_versions, [-1, -1]]).astype(np.int32),
    )
    made = support.learners(moe, trainable="all")
    support.step(made, [t.judged(1.0)])
    for who, prefix in ((made.policy_optimizer, "model.model."), (made.critic_optimizer, "model.")):
        rows = who.seen[0][f"{prefix}embed_tokens.weight"]  # type: ignore[attr-defined]
        assert rows.any() and not rows[62:].any()


# --- freezing and guards ---------------------------------------------------------------------------------------------


def test_policy_freeze_leaves_the_policy_alone(moe: Path, near: list[Trajectory]) -> None:
    made = support.learners(moe)
    before = support.state(made)
    result = support.step(made, near, update_policy=False)
    after = support.state(made)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not result["stepped"] and made.policy_optimizer.steps == 0 and not made.policy_optimizer.adamw.state
    assert moved and all(name.startswith("critic.") for name in moved)
    assert result["metrics"]["dis/mean_ratio"] is not None, "the metrics are there all the same"


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("moe", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("dense", {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}),
    ],
)
def test_frozen_parameters_stay_bit_identical(
    request: pytest.FixtureRequest, model: str, groups: set[str], near: list[Trajectory]
) -> None:
    """T-FREEZE: 20 real steps with weight decay."""
    made = support.learners(
        request.getfixturevalue(model),
        critic_optimizer=support.optimizer(lr=1e-3, weight_decay=0.1),
        policy_optimizer=support.optimizer(lr=1e-4),
    )
    before = support.parameters(made.critic)
    expected = {f"model.layers.{layer}.{g}" for layer in range(2) for g in groups} | {"v_head.weight", "v_head.bias"}
    assert {n for n, p in made.critic.named_parameters() if p.requires_grad} == expected
    held = {id(p) for g in made.critic_optimizer.adamw.param_groups for p in g["params"]}
    assert held == {id(p) for n, p in made.critic.named_parameters() if n in expected}
    policy = support.parameters(made.policy)
    for _ in range(20):
        assert support.step(made, near, critic_updates=1)["stepped"]
    after = support.parameters(made.critic)
    assert {n for n in before if not torch.equal(before[n], after[n])} == expected
    assert len(made.critic_optimizer.adamw.state) == len(expected)
    moved = support.parameters(made.policy)
    assert all(not torch.equal(policy[n], moved[n]) for n in policy), "the policy trains as a whole"


def test_all_tokens_rejected_is_no_step(moe: Path, near: list[Trajectory]) -> None:
    made = support.learners(moe)
    support.step(made, near)
    before = support.parameters(made.policy)
    result = support.step(made, near, algorithm=support.algorithm(eps_low=1e-7, eps_high=1e-7))
    assert not result["stepped"] and result["metrics"]["dis/all_masked"] == 1.0
    assert result["metrics"]["dis/mask_frac"] == 1.0 and made.policy_optimizer.steps == 1
    assert support.equal(before, support.parameters(made.policy)), "neither momentum nor decay moves it"
    assert made.critic_optimizer.steps == 4, "the batch still teaches the critic"
    assert all(p.grad is None for p in made.policy.parameters()), "nothing is carried into the next step"
    assert support.step(made, near)["stepped"]


def test_nothing_non_finite_is_ever_applied(moe: Path, near: list[Trajectory]) -> None:
    made = support.learners(moe)
    before = support.state(made)
    result = support.step(made, [near[0].judged(1e30), *near[1:]])
    assert not result["stepped"]
    assert support.equal(before, support.state(made))
    assert made.policy_optimizer.skipped == 1 and made.critic_optimizer.skipped == 2
    assert made.policy_optimizer.steps == made.critic_optimizer.steps == 0
    json.dumps(result, allow_nan=False)  # the guard is of no use if the log then refuses the row
    assert support.step(made, near)["stepped"]


def test_a_broken_policy_rejects_everything(moe: Path, near: list[Trajectory]) -> None:
    made = support.learners(moe)
    with torch.no_grad():
        made.policy.model.model.norm.weight.mul_(float("nan"))
    result = support.step(made, near)
    assert not result["stepped"] and result["metrics"]["dis/all_masked"] == 1.0
    json.dumps(result, allow_nan=False)


def test_clipping_and_warm_up(moe: Path, near: list[Trajectory]) -> None:
    """The reported norm is the one before clipping; the first warm-up step moves by lr / warmup at most."""
    free = support.learners(moe, policy_optimizer=support.optimizer(lr=1e-3))
    norm = support.step(free, near)["metrics"]["grad/policy"]
    total = math.sqrt(sum(float(g.double().square().sum()) for g in free.policy_optimizer.seen[0].values()))  # type: ignore[attr-defined]
    assert norm == pytest.approx(total, rel=1e-5)
    settings = support.optimizer(lr=1e-3, clip=norm / 10, warmup_steps=4, weight_decay=0.0)
    clipped = support.learners(moe, policy_optimizer=settings)
    before = support.parameters(clipped.policy)
    assert support.step(clipped, near)["metrics"]["grad/policy"] == pytest.approx(norm, rel=1e-5)
    moments = [s["exp_avg"] for s in clipped.policy_optimizer.adamw.state.values()]
    applied = math.sqrt(sum(float(support.whole(m).double().square().sum()) for m in moments)) / 0.1
    assert applied == pytest.approx(norm / 10, rel=1e-4)
    assert support.spread(before, support.parameters(clipped.policy)) <= 1e-3 / 4 * 1.001


def test_bfloat16_keeps_master_weights_and_head_in_fp32(moe: Path, near: list[Trajectory]) -> None:
    made = support.learners(moe, dtype=torch.bfloat16)
    result = support.step(made, near)
    assert result["stepped"]
    packed = pack(near)
    with torch.no_grad():
        values = made.critic(packed.tokens, packed.positions, packed.cu_seqlens)
        made.policy(packed.tokens, packed.positions, packed.cu_seqlens, packed.where)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    for model in (made.policy, made.critic):
        assert {t.dtype for t in support.parameters(model).values()} == {torch.float32}
        rounded = [n for n, t in export(model) if torch.equal(t, t.bfloat16().float())]
        assert not rounded, "a forward without backward must not leave compute copies where the master weights are exported"


# --- controls --------------------------------------------------------------------------------------------------------


def test_flip_sign_negates_the_policy_gradient(moe: Path, near: list[Trajectory]) -> None:
    plain, flipped = support.learners(moe), support.learners(moe)
    support.step(plain, near, algorithm=support.algorithm(**BAND))
    support.step(flipped, near, algorithm=support.algorithm(control="flip_sign", **BAND))
    ours, theirs = (m.policy_optimizer.seen[0] for m in (plain, flipped))  # type: ignore[attr-defined]
    assert support.equal(ours, {n: -g for n, g in theirs.items()})
    assert all(support.equal(a, b) for a, b in zip(plain.critic_optimizer.seen, flipped.critic_optimizer.seen, strict=True))  # type: ignore[attr-defined]


def test_shuffled_rewards_are_a_deterministic_deal(moe: Path, near: list[Trajectory]) -> None:
    distinct = [t.judged(float(i)) for i, t in enumerate(near)]

    def deal(seed: int) -> list[float]:
        rewards = [t.token_rewards() for t in shuffled_rewards(distinct, seed)]
        for t, r in zip(distinct, rewards, strict=True):
            assert np.flatnonzero(r).tolist() in ([], [int(np.flatnonzero(t.loss_mask)[-1])])
        return [float(r.sum()) for r in rewards]

    assert deal(1) == deal(1)
    assert sorted(deal(1)) == [float(i) for i in range(len(near))]
    assert len({tuple(deal(seed)) for seed in range(8)}) > 1
    shuffled, by_hand = support.learners(moe), support.learners(moe)
    support.step(shuffled, distinct, seed=5, algorithm=support.algorithm(control="shuffle_rewards"))
    support.step(by_hand, [t.judged(r) for t, r in zip(distinct, deal(5), strict=True)])
    assert support.equal(support.gradients(shuffled), support.gradients(by_hand))
