"""Invariants 4 and 5 on whole steps: layout and order of a batch change no gradient, and nothing on an observation is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.trajectory import Trajectory
from tests.trainer import support
from trainer import critic_step
from trainer import estimate as estimation
from trainer import step as steps
from trainer.batch import MicroBatch, Packed
from trainer.model import build_policy
from trainer.step import Learners

pytestmark = pytest.mark.usefixtures("rank")

DIS = {"id": "dis", "eps_low": 0.3, "eps_high": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "skip": {},
    "grpo": {"advantage": {"id": "grpo"}},
    "seq_mean": {"loss_norm": "seq_mean", "lam_value": 0.9},
    "token_kept": {"loss_norm": "token_kept", "advantage_norm": "global_std_only"},
    "gspo": {"loss": {"id": "gspo", "eps_low": 0.05, "eps_high": 0.05}, "advantage": {"id": "grpo"}},
}
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def near(moe: Path) -> list[Trajectory]:
    return support.on_policy(build_policy(moe), support.grouped(0), noise=0.4)


def learners(moe: Path, arm: dict[str, Any]) -> Learners:
    lr = support.optimizer(lr=1e-3)
    if support.algorithm(**arm).critic is None:
        return support.without_critic(moe, lr)
    return support.learners(moe, policy_optimizer=lr, critic_optimizer=lr)


def gradients(moe: Path, arm: dict[str, Any], batch: list[Trajectory], tokens: int) -> Gradients:
    """All that one step gives to either optimizer."""
    made = learners(moe, arm)
    assert support.step(made, batch, support.algorithm(**({"loss": DIS} | arm)), micro_batch_tokens=tokens)["stepped"]
    return support.gradients(made)


@pytest.fixture(scope="module")
def expected(moe: Path, near: list[Trajectory]) -> dict[str, Gradients]:
    """All in one pack, in order."""
    return {name: gradients(moe, arm, near, 10**6) for name, arm in ARMS.items()}


@pytest.mark.parametrize("name", ARMS)
def test_any_layout_and_order(moe: Path, near: list[Trajectory], expected: dict[str, Gradients], name: str) -> None:
    @settings(max_examples=6, database=None, derandomize=True, phases=[Phase.generate])  # shrinking steps takes minutes
    @given(order=st.permutations(range(len(near))), tokens=st.integers(1, 200))
    def holds(order: list[int], tokens: int) -> None:
        found = gradients(moe, ARMS[name], [near[i] for i in order], tokens)
        assert support.apart(found, expected[name]) < 2e-5

    holds()


POISONED: dict[str, dict[str, Any]] = {
    "skip": {"value_clip": 0.1, "lam_value": 0.9},
    "whitened": {"advantage_norm": "global_mean_std", "truncation": "bootstrap"},
    "step_average": {"advantage": {"id": "step_average"}},
    "step_last": {"advantage": {"id": "step_last"}, "advantage_values": "pre"},
    "grpo": {"advantage": {"id": "grpo"}, "advantage_norm": "global_std_only"},
    "reinforce_pp": {"advantage": {"id": "reinforce_pp"}},
    "gspo": {"loss": {"id": "gspo", "eps_low": 0.05, "eps_high": 0.05}, "loss_norm": "seq_mean"},
}


def put_on_observations(monkeypatch: pytest.MonkeyPatch, poison: float) -> set[str]:
    """Every tensor that a step makes per token carries the poison wherever the policy did not act; what was poisoned."""
    done: set[str] = set()

    def on(mask: Tensor, x: Tensor, name: str) -> Tensor:
        done.add(name)
        return torch.where(mask, x, torch.full_like(x, poison if x.is_floating_point() else 10**6))

    def packed(real: Callable[..., Packed]) -> Callable[..., Packed]:
        def pack(*args: Any) -> Packed:
            p = real(*args)
            names = ("rollout_logprobs", "versions", "turn_ids")
            return replace(p, **{name: on(p.mask, getattr(p, name), name) for name in names})

        return pack

    def values(real: Any) -> Any:
        def state_values(critic: Any, p: Packed) -> tuple[Tensor, Tensor]:
            before, last = real(critic, p)
            return on(p.mask, before, "values"), last

        return state_values

    def targets(real: Any) -> Any:
        def evaluate(critic: Any, batches: list[MicroBatch], objective: Any) -> None:
            real(critic, batches, objective)
            for b in batches:
                b.targets = on(b.packed.mask, b.targets, "targets")

        return evaluate

    def advantages(real: Any) -> Any:
        return lambda batch, *rest: on(batch.packed.mask, real(batch, *rest), "advantages")

    def spread(real: Any) -> Any:
        def estimate(batches: list[MicroBatch], *rest: Any) -> None:
            real(batches, *rest)
            for b in batches:
                b.advantages = on(b.packed.mask, b.advantages, "used")

        return estimate

    for module, name, wrap in (
        (steps, "pack", packed),
        (critic_step, "state_values", values),
        (critic_step, "evaluate", targets),
        (steps, "critic_advantages", advantages),
        (estimation, "critic_advantages", advantages),
        (estimation, "_spread", advantages),
        (steps, "estimate", spread),
    ):
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    return done


@pytest.mark.parametrize("poison", [1e9, math.nan], ids=["1e9", "nan"])
@pytest.mark.parametrize("name", POISONED)
def test_poison_on_observations_changes_nothing(
    moe: Path, near: list[Trajectory], monkeypatch: pytest.MonkeyPatch, name: str, poison: float
) -> None:
    """Two whole steps, bit for bit, the metrics too."""
    arm = {"loss": DIS} | POISONED[name]
    cut = [
        t.judged(t.reward or 0.0, t.turn_rewards, termination="max_turns" if i % 3 else "finished") for i, t in enumerate(near)
    ]

    def run() -> tuple[Any, ...]:
        made = learners(moe, arm)
        options = {"micro_batch_tokens": 50, "number": 10}
        reports = [support.step(made, cut, support.algorithm(**arm), **options) for _ in range(2)]
        return reports, support.gradients(made), support.state(made)

    clean = run()
    done = put_on_observations(monkeypatch, poison)
    dirty = run()
    assert done >= {"rollout_logprobs", "versions", "turn_ids", "advantages", "used"}
    assert clean[0][0]["stepped"] and dirty[0] == clean[0]
    assert support.equal(dirty[1], clean[1]) and support.equal(dirty[2], clean[2])
    assert ("values" in done) == ("targets" in done) == ("critic.v_head.bias" in clean[2])
