"""Denominators by hand, before clipping; what truncation, value clipping and the critic's mask take from them; no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.trajectory import Trajectory, TrajectoryBuilder
from tests.trainer import by_hand, support
from trainer import policy_step
from trainer.batch import MicroBatch, pack
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.model import Critic, build_policy
from trainer.normalise import Totals, kept_correction, trajectory_weights
from trainer.step import Learners

pytestmark = pytest.mark.usefixtures("rank")

DIS = {"id": "dis", "eps_low": 0.3, "eps_high": 0.5}
NORMS = ["token_global", "token_kept", "seq_mean", "seq_sum_const"]
GOLDEN = Path(__file__).parents[1] / "golden" / "algorithm_vectors.json"
LIMITS = ["max_context", "max_tokens_per_turn", "max_turns", "wall_clock"]


@pytest.fixture(scope="module")
def near(moe: Path) -> list[Trajectory]:
    """Groups of very different lengths; DIS rejects some tokens."""
    return support.on_policy(build_policy(moe), support.grouped(0), noise=0.4)


@pytest.fixture(scope="module")
def cut(near: list[Trajectory]) -> list[Trajectory]:
    """A limit ended two episodes, each by another one; one of them has two segments."""
    ends = {"g0-0-0": "max_context", "g0-1-1": "max_turns"}
    return [t.judged(t.reward or 0.0, t.turn_rewards, termination=ends.get(t.episode_id, "finished")) for t in near]


def finished(t: Trajectory) -> bool:
    return bool(t.info["termination"] == "finished")


def whole(trajectories: list[Trajectory]) -> list[Trajectory]:
    return list(filter(finished, trajectories))


def seen(made: Learners, who: str = "policy") -> list[dict[str, Tensor]]:
    """What its optimizer was given, before it clips."""
    optimizer = getattr(made, f"{who}_optimizer")
    assert isinstance(optimizer, support.Recorded)
    return optimizer.seen


# --- denominators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_denominators_by_hand(moe: Path, near: list[Trajectory], norm: str) -> None:
    """A clip of 1e-3 cuts every one of them, after they were made; any other norm gives another gradient."""
    made = support.without_critic(moe, support.optimizer(clip=1e-3))
    algorithm = support.algorithm(loss=DIS, advantage={"id": "grpo"}, loss_norm=norm)
    metrics = support.step(made, near, algorithm, micro_batch_tokens=40, max_length=37)["metrics"]
    advantages = by_hand.outcome_advantages("grpo", near)
    for other in NORMS:
        expected, kept = by_hand.policy_gradient(moe, near, advantages, DIS, other, max_length=37)
        assert 0 < kept < sum(t.n_actions for t in near)
        assert (support.apart(seen(made)[0], expected) < 2e-5) == (other == norm), other
    norm_before = np.sqrt(sum(float(g.double().square().sum()) for g in seen(made)[0].values()))
    assert metrics["grad/policy"] == pytest.approx(norm_before, rel=1e-5) and norm_before > 1e-3
    assert metrics["clip/policy"] == pytest.approx(1e-3 / norm_before, rel=1e-4)


def test_weights_in_numbers() -> None:
    counts, totals = torch.tensor([3, 0, 5]), Totals(actions=8.0, trajectories=2.0, max_length=10.0)
    expected = {
        "token_global": [1 / 8] * 3,
        "token_kept": [1 / 8] * 3,
        "seq_mean": [1 / 6, 1 / 2, 1 / 10],
        "seq_sum_const": [1 / 20] * 3,
    }
    for norm, weights in expected.items():
        torch.testing.assert_close(trajectory_weights(norm, counts, totals), torch.tensor(weights))
        assert kept_correction(norm, 8.0, 2.0) == (4.0 if norm == "token_kept" else 1.0)
        assert kept_correction(norm, 8.0, 0.0) == 1.0
    with pytest.raises(ValueError, match="mean_of_means"):
        trajectory_weights("mean_of_means", counts, totals)


def of_actions(n: int, token: int) -> Trajectory:
    """A prompt of one token and `n` actions, numbered from `token` on."""
    builder = TrajectoryBuilder()
    builder.observe([0])
    builder.act(list(range(token, token + n)), [-1.0] * n, [0] * n)
    return builder.build(f"n{n}", f"n{n}", reward=1.0)


def test_golden_microbatch_norm() -> None:
    """Through the real accumulation over two micro-batches; the policy is a table of token losses."""
    golden = json.loads(GOLDEN.read_text())["extra"]["microbatch_norm"]
    rows: list[list[float]] = golden["token_losses"]
    table = torch.tensor([0.0, *(x for row in rows for x in row)], requires_grad=True)

    def policy(tokens: Tensor, positions: Tensor, cu_seqlens: list[int], where: Tensor) -> tuple[Tensor, Tensor]:
        return table[tokens[where].long()], torch.zeros(len(where))

    def loss(inputs: PolicyLossInput) -> PolicyLossOutput:
        return PolicyLossOutput(inputs.logprobs, inputs.mask, torch.ones_like(inputs.logprobs))

    algorithm: Any = type("Algorithm", (), {"loss": staticmethod(loss)})
    totals, batches, token = Totals(float(sum(map(len, rows))), float(len(rows)), 1.0), [], 1
    for row in rows:
        packed = pack([of_actions(len(row), token)])
        token += len(row)
        empty = torch.zeros(len(packed.tokens))
        one = torch.zeros(1)
        weights = trajectory_weights("token_global", torch.tensor([len(row)]), totals)
        batches.append(MicroBatch(packed, one.long(), one, one.bool(), [0], weights, empty, empty, empty))
    made: Any = policy
    kept = policy_step.backward(made, batches, algorithm, update=True, observe=lambda *_: None)
    assert kept == 4 and table.grad is not None
    value = float((table.grad * table.detach()).sum())  # the loss is linear in the table
    assert value == pytest.approx(golden["correct_global_mean"])
    assert value != pytest.approx(golden["wrong_mean_of_means"])
    assert np.mean([np.mean(row) for row in rows]) == pytest.approx(golden["wrong_mean_of_means"])


# --- truncation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_masked_truncated_episodes_count_only_in_their_group(moe: Path, cut: list[Trajectory], norm: str) -> None:
    made = support.without_critic(moe)
    algorithm = support.algorithm(loss=DIS, advantage={"id": "grpo"}, loss_norm=norm, truncation="mask")
    metrics = support.step(made, cut, algorithm, micro_batch_tokens=40)["metrics"]
    kept = whole(cut)
    assert len(kept) == len(cut) - 3
    advantages = [a for a, t in zip(by_hand.outcome_advantages("grpo", cut), cut, strict=True) if finished(t)]
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, kept, advantages, DIS, norm)[0]) < 2e-5
    alone, _ = by_hand.policy_gradient(moe, kept, by_hand.outcome_advantages("grpo", kept), DIS, norm)
    assert support.apart(seen(made)[0], alone) > 1e-2, "the group's mean is that of the whole group"
    assert metrics["batch/action_tokens"] == sum(t.n_actions for t in kept)
    assert metrics["batch/episodes"] == 8.0 and metrics["rollout/truncated"] == 0.25


def test_masked_truncated_episodes_do_not_teach_the_critic(moe: Path, cut: list[Trajectory]) -> None:
    masked, without = support.learners(moe), support.learners(moe)
    algorithm = support.algorithm(loss=DIS, truncation="mask", lam_value=0.9)
    a = support.step(masked, cut, algorithm)["metrics"]
    b = support.step(without, whole(cut), algorithm)["metrics"]
    assert support.equal(support.gradients(masked), support.gradients(without))
    for name in ("value/ev", "value/mse_0", "value/mse_1", "adv/mean", "dis/mask_frac", "staleness/mean"):
        assert a[name] == b[name], name


@pytest.mark.parametrize("mode", ["zero", "bootstrap"])
def test_truncated_episodes_end_or_go_on(moe: Path, cut: list[Trajectory], mode: str) -> None:
    """The state after the last token stands for the rest, in the policy's advantages and in the critic's targets."""
    made, critic = support.learners(moe), support.critic_of(moe)
    algorithm = support.algorithm(loss=DIS, truncation=mode, advantage_values="pre", gamma=0.9, lam_value=0.8)
    support.step(made, cut, algorithm, micro_batch_tokens=40)
    ends = [by_hand.value_after(critic, t) * (mode == "bootstrap" and not finished(t)) for t in cut]
    arguments = [("skip_observation", critic, t) for t in cut]
    advantages = [by_hand.estimate(*x, gamma=0.9, bootstrap=end)[0] for x, end in zip(arguments, ends, strict=True)]
    targets = [by_hand.estimate(*x, lam=0.8, gamma=0.9, bootstrap=end)[1] for x, end in zip(arguments, ends, strict=True)]
    assert support.apart(seen(made)[0], by_hand.policy_gradient(moe, cut, advantages, DIS)[0]) < 2e-5
    ours = seen(made, "critic")[0]
    theirs = by_hand.critic_gradient(critic, cut, targets)
    assert support.apart(ours, {n: theirs[n] for n in ours}) < 2e-5


@pytest.mark.parametrize("end", [*LIMITS, "finished"])
def test_which_ends_are_truncations(moe: Path, near: list[Trajectory], end: str) -> None:
    made = support.without_critic(moe)
    batch = [t.judged(t.reward or 0.0, termination=end) for t in near]
    algorithm = support.algorithm(loss=DIS, advantage={"id": "grpo"}, truncation="mask")
    result = support.step(made, batch, algorithm)
    assert result["stepped"] == (end == "finished")


@pytest.mark.parametrize("name", ["skip_observation", "step_last", "grpo", "reinforce_pp", "spo"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_without_action_tokens_moves_nothing(moe: Path, cut: list[Trajectory], name: str, norm: str) -> None:
    """Neither momentum nor weight decay, of neither model; the batch still tells the estimator what happened."""
    critic = name in ("skip_observation", "step_last")
    made = support.learners(moe) if critic else support.without_critic(moe)
    algorithm = support.algorithm(advantage={"id": name}, loss_norm=norm, truncation="mask")
    support.step(made, cut, algorithm)
    before, memory = support.state(made), made.memory
    steps = made.policy_optimizer.steps, made.critic_optimizer.steps if made.critic_optimizer else 0
    nothing = [t.judged(t.reward or 0.0, termination="wall_clock") for t in cut]
    state = json.dumps(memory.state)
    result = support.step(made, nothing, algorithm, number=10)
    assert not result["stepped"] and result["metrics"]["batch/action_tokens"] == 0.0
    json.dumps(result, allow_nan=False)
    assert support.equal(before, support.state(made))
    assert steps == (made.policy_optimizer.steps, made.critic_optimizer.steps if made.critic_optimizer else 0)
    assert (json.dumps(made.memory.state) != state) == (name == "spo")
    assert support.step(made, cut, algorithm)["stepped"], "nothing is carried into the next step"


# --- the critic's loss -----------------------------------------------------------------------------------------------


def after_one_update(moe: Path, near: list[Trajectory], algorithm: Any, lr: float) -> Critic:
    """The critic between the two updates of a step, unsharded, with the same frozen set."""
    made = support.learners(moe, critic_optimizer=support.optimizer(lr=lr))
    support.step(made, near, algorithm, critic_updates=1)
    assert made.critic is not None
    critic = support.critic_of(moe)
    critic.load_state_dict(support.parameters(made.critic))
    return critic


@pytest.mark.parametrize("clip", [None, 0.05, 0.3])
def test_value_clip_is_ppos(moe: Path, near: list[Trajectory], clip: float | None) -> None:
    """It cannot bite before the first update, where V is V_old; in the second it holds back what has moved too far."""
    algorithm, lr = support.algorithm(loss=DIS, value_clip=clip, lam_value=0.9), 3e-2
    made = support.learners(moe, critic_optimizer=support.optimizer(lr=lr))
    support.step(made, near, algorithm, micro_batch_tokens=40)
    first, second = support.critic_of(moe), after_one_update(moe, near, algorithm, lr)
    old = [by_hand.values_before(first, t)[t.loss_mask] for t in near]
    targets = [by_hand.estimate("skip_observation", first, t, lam=0.9)[1] for t in near]
    ours = seen(made, "critic")
    for critic, gradient in ((first, ours[0]), (second, ours[1])):
        theirs = by_hand.critic_gradient(critic, near, targets, old=old, clip=clip)
        assert support.apart(gradient, {n: theirs[n] for n in gradient}) < 5e-5
    free = by_hand.critic_gradient(second, near, targets)
    distance = support.apart(ours[1], {n: free[n] for n in ours[1]})
    assert distance > 1e-2 if clip is not None else distance < 5e-5, "some tokens are beyond the clip"


@pytest.mark.parametrize("name", ["step_average", "step_last"])
def test_what_the_critic_is_taught_on(moe: Path, near: list[Trajectory], name: str) -> None:
    """The last token of each turn, in number too, or every action token; the target is the return from the turn on."""
    made, critic = support.learners(moe), support.critic_of(moe)
    support.step(made, near, support.algorithm(loss=DIS, advantage={"id": name}), micro_batch_tokens=40)
    last, every = [by_hand.last_of_turns(t) for t in near], [t.loss_mask for t in near]
    assert [int(x.sum()) for x in last] == [t.n_turns for t in near]
    targets = []
    for t in near:
        rewards, turns = t.token_rewards(), t.turn_ids[t.loss_mask]
        targets.append(np.array([rewards[t.turn_ids >= turn].sum() for turn in turns]))
    right, wrong = (last, every) if name == "step_last" else (every, last)
    ours = seen(made, "critic")[0]
    for masks, fits in ((right, True), (wrong, False)):
        theirs = by_hand.critic_gradient(critic, near, targets, masks)
        distance = support.apart(ours, {n: theirs[n] for n in ours})
        assert distance < 2e-5 if fits else distance > 1e-2
