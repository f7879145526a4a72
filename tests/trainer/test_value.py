"""Value pre-training: the split by prompt, a signal that can be learnt, the stop, the gate."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import ConfigError
from harness.trajectory import Trajectory, TrajectoryBuilder
from tests.trainer import support
from trainer import parallel
from trainer.freeze import freeze
from trainer.model import Critic, build_critic
from trainer.value import data_hash, evaluate, gate, held_out, mean_reward, pretrain, settled

pytestmark = pytest.mark.usefixtures("rank")


def settings(**changes: Any) -> dict[str, Any]:
    optimizer = support.optimizer(lr=3e-3, weight_decay=0.0, clip=1.0)
    return {"heldout": 0.25, "batch": 16, "epochs": 4, "optimizer": optimizer, "head_lr_mult": 10.0} | changes


def lucky(n: int, seed: int = 0) -> list[Trajectory]:
    """The reward is told by the second prompt token."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        builder, win = TrajectoryBuilder(), rng.random() < 0.5
        builder.observe([rng.randrange(10, support.VOCAB), 1 if win else 2, rng.randrange(10, support.VOCAB)])
        for _ in range(2):
            k = rng.randint(1, 4)
            builder.act([rng.randrange(10, support.VOCAB) for _ in range(k)], [-1.0] * k, [0] * k)
            builder.observe([rng.randrange(10, support.VOCAB)])
        out.append(builder.build(f"e{i}", f"task-{i // 2}", reward=float(win)))
    return out


def critic(folder: Path, bias: float = 0.5) -> Critic:
    made = build_critic(folder, bias)
    freeze(made, "all")
    parallel.shard(made, torch.float32)
    return made


def test_a_prompt_is_on_one_side() -> None:
    sides = {f"task-{i}": held_out(f"task-{i}", 0.25) for i in range(4000)}
    assert 0.22 < sum(sides.values()) / 4000 < 0.28
    assert sides == {name: held_out(name, 0.25) for name in sides}
    assert all(not held_out(name, 0.25) or held_out(name, 0.5) for name in sides), "a larger share only adds prompts"


def test_explained_variance_rises_on_prompts_never_seen(dense: Path) -> None:
    made = critic(dense)
    report = pretrain(made, lucky(240), settings(epochs=10), budget=400, seed=0)
    curve = [row["value/ev"] for row in report["curve"]]
    assert curve[0] == pytest.approx(0.0, abs=1e-6), "a zero head explains nothing"
    assert curve[-1] > 0.8 and report["value/ev"] == curve[-1]
    assert abs(report["value/bias"]) < 0.1
    assert report["train"] + report["heldout"] == 240
    assert report["steps"] == len(curve) - 1 < 10 * -(-report["train"] // 16), "it stops when it has settled"
    assert settled(curve) and not settled(curve[:-1])


@pytest.mark.parametrize(
    ("curve", "stops"),
    [
        ([0.0] * 10, False),
        ([0.0] * 11, True),
        ([0.0] * 10 + [0.0099], True),
        ([0.0] * 10 + [0.0101], False),
        ([0.5] + [0.1] * 9 + [0.505], True),
        ([-math.inf] * 11, True),
        ([-math.inf] * 10 + [-3.0], False),
    ],
)
def test_it_settles_when_ten_evaluations_gain_nothing(curve: list[float], stops: bool) -> None:
    assert settled(curve) == stops


def test_what_cannot_be_learnt_stops_early(dense: Path) -> None:
    trajectories = [t.judged(1.0) for t in lucky(60)]
    report = pretrain(critic(dense, 1.0), trajectories, settings(epochs=9), budget=400, seed=0)
    assert report["value/ev"] is None, "the targets do not vary"
    assert len(report["curve"]) == 11
    assert not gate(report, GATE)["passed"] and "undefined" in gate(report, GATE)["reason"]


GATE = {"min_ev": 0.1, "max_bias": 0.05}


@pytest.mark.parametrize(
    ("ev", "bias", "why"),
    [
        (0.11, 0.05, ""),
        (0.11, -0.05, ""),
        (0.1, 0.0, "value.min_ev"),
        (-0.2, 0.0, "value.min_ev"),
        (0.5, 0.051, "value.max_bias"),
        (0.5, -0.051, "value.max_bias"),
        (None, 0.0, "undefined"),
        (0.5, None, "undefined"),
    ],
)
def test_the_gate_says_why(ev: float | None, bias: float | None, why: str) -> None:
    verdict = gate({"value/ev": ev, "value/bias": bias}, GATE)
    assert verdict["passed"] == (not why)
    assert why in verdict["reason"]


def test_the_data_hash_is_of_the_data() -> None:
    some = lucky(6)
    assert data_hash(some) == data_hash(some[::-1]) == data_hash([t.judged(t.reward or 0.0, wall_s=3) for t in some])
    for other in (some[:-1], [*some[:-1], some[-1].judged(0.25)], [*some[:-1], replace(some[-1], tokens=some[-1].tokens + 1)]):
        assert data_hash(other) != data_hash(some)


def test_unjudged_trajectories_are_a_config_error() -> None:
    assert mean_reward([t.judged(0.25) for t in lucky(4)]) == 0.25
    for bad in ([], [*lucky(3), replace(lucky(1)[0], reward=None)]):
        with pytest.raises(ConfigError, match="have no reward") as caught:
            mean_reward(bad)
        assert caught.value.hint


def test_the_held_out_side_is_not_trained_on(dense: Path) -> None:
    """Its rewards may be anything; the critic comes out the same."""
    states = []
    for lie in (0.0, 1.0):
        trajectories = [t.judged(lie) if held_out(t.task_id, 0.25) else t for t in lucky(60)]
        made = critic(dense)
        pretrain(made, trajectories, settings(epochs=1), budget=400, seed=0)
        states.append(support.parameters(made))
    assert support.equal(*states)


def test_pretraining_trains_everything(dense: Path) -> None:
    made = critic(dense)
    before = support.parameters(made)
    pretrain(made, lucky(60), settings(epochs=1), budget=400, seed=0)
    after = support.parameters(made)
    assert all(not torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_an_empty_side_is_a_config_error(dense: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="held-out") as caught:
        pretrain(critic(dense), lucky(8), settings(heldout=share), budget=400, seed=0)
    assert caught.value.hint


def test_evaluation_is_blind_to_packing(dense: Path) -> None:
    made = support.critic_of(dense)
    parallel.shard(made, torch.float32)
    a, b = (evaluate(made, lucky(20), budget) for budget in (1, 10**6))
    assert a == {name: pytest.approx(value, abs=1e-5) for name, value in b.items()}
