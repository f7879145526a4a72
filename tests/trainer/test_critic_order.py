"""T-CRITIC-ORDER with an instrumented critic: one V for all states, and each optimizer step adds C to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.trajectory import Trajectory
from tests.reference import gae
from tests.trainer import support
from trainer.model import build_policy
from trainer.step import Learners

pytestmark = pytest.mark.usefixtures("rank")
V0, C = 0.25, 0.125


class Level(nn.Module):
    """V is the bias of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.v_head = nn.Linear(1, 1)
        nn.init.constant_(self.v_head.bias, V0)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: list[int]) -> Tensor:
        return self.v_head.bias.expand(len(tokens))


class Climb:
    """An optimizer that counts, and lifts V by C."""

    clip, lr = 1.0, 0.0

    def __init__(self, model: Level) -> None:
        self.model, self.steps, self.gradients = model, 0, list[float]()

    @torch.no_grad()
    def step(self) -> float:
        bias = self.model.v_head.bias
        assert bias.grad is not None
        self.gradients.append(float(bias.grad))
        bias.add_(C)
        self.steps += 1
        self.clear()
        return 1.0

    def clear(self) -> None:
        self.model.zero_grad()


@pytest.fixture(scope="module")
def near(moe: Path) -> list[Trajectory]:
    return support.on_policy(build_policy(moe), support.batch(5, 6), noise=0.1)


def step(
    folder: Path, batch: list[Trajectory], updates: int, number: int = 1, **changes: Any
) -> tuple[Climb, Learners, dict[str, Any]]:
    made = support.without_critic(folder)
    critic: Any = Level()
    climb: Any = Climb(critic)
    made.critic, made.critic_optimizer = critic, climb
    algorithm = support.algorithm(**changes)
    options = {"number": number, "critic_updates": updates, "micro_batch_tokens": 40}
    return climb, made, support.step(made, batch, algorithm, **options)


@pytest.mark.parametrize(("updates", "number"), [(1, 1), (2, 1), (3, 1), (2, 10)])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_values_of_the_advantages(moe: Path, near: list[Trajectory], when: str, updates: int, number: int) -> None:
    """With lambda = 1, A = R - V: of V_0 or of V_K. K steps of the critic, one of the policy. Step 10 looks at both."""
    algorithm = {"advantage": {"id": "skip_observation", "lam": 1.0}, "advantage_values": when}
    climb, made, result = step(moe, near, updates, number, **algorithm)
    v = V0 + C * updates * (when == "post")
    rewards = np.concatenate([np.full(t.n_actions, t.reward) for t in near])
    assert result["metrics"]["adv/mean"] == pytest.approx(rewards.mean() - v, abs=1e-6)
    assert (climb.steps, made.policy_optimizer.steps, result["stepped"]) == (updates, 1, True)


def test_targets_stay(moe: Path, near: list[Trajectory]) -> None:
    """G is made of V_0 (lambda_V = 0.9, so that it depends on V), and each pass is compared with it by the V of its moment."""
    climb, _, result = step(moe, near, 3, lam_value=0.9)
    targets = []
    for t in near:
        targets.append(gae.skip_observation([V0] * len(t), t.token_rewards(), t.loss_mask, 1.0, 0.9, 0.0)[1][t.loss_mask])
    g = np.concatenate(targets)
    for k, gradient in enumerate(climb.gradients):
        error = V0 + C * k - g
        assert result["metrics"][f"value/mse_{k}"] == pytest.approx(np.square(error).mean(), rel=1e-5)
        assert gradient == pytest.approx(2 * error.mean(), abs=1e-6)
