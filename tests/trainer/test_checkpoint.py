"""T-RESUME: a run through a checkpoint is bit for bit the run without; a checkpoint is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from tests.trainer import support
from trainer import checkpoint
from trainer.estimate import Memory
from trainer.step import Learners

pytestmark = pytest.mark.usefixtures("rank")
OPTIMIZERS = {
    "policy_optimizer": support.optimizer(lr=1e-2, warmup_steps=30),
    "critic_optimizer": support.optimizer(lr=1e-2, warmup_steps=50),
}
"""Warm-ups longer than the tests, so that a learning rate that does not go on where it was is seen."""


def learners(folder: Path, seed: int = 0) -> Learners:
    return support.learners(folder, seed=seed, **OPTIMIZERS)


def run(made: Learners, numbers: range, freeze: int) -> list[dict[str, Any]]:
    return [support.step(made, support.batch(i), update_policy=i >= freeze, seed=i) for i in numbers]


@pytest.mark.parametrize("freeze", [0, 3], ids=["both", "critic-only-before"])
def test_resume_is_bit_exact(moe: Path, tmp_path: Path, freeze: int) -> None:
    """Also when the policy's optimizer has made no step yet at the checkpoint."""
    straight = learners(moe)
    expected = run(straight, range(6), freeze)

    first = learners(moe)
    assert run(first, range(3), freeze) == expected[:3]
    checkpoint.save(first, tmp_path / "c")
    second = learners(moe, seed=4)
    second.policy.load_state_dict({n: torch.zeros_like(p) for n, p in second.policy.state_dict().items()})
    checkpoint.load(second, tmp_path / "c")
    assert support.equal(support.state(first), support.state(second))
    for made in (first, second):  # saving is no step either
        assert made.policy_optimizer.steps == 3 - freeze and made.critic_optimizer.steps == 6
        assert bool(made.policy_optimizer.adamw.state) == (freeze == 0)
        assert run(made, range(3, 6), freeze) == expected[3:]
        assert support.equal(support.state(made), support.state(straight))


def test_loading_into_a_moved_trainer_goes_back(moe: Path, tmp_path: Path) -> None:
    """Nothing of the abandoned steps remains: moments, counters, gradients."""
    made = learners(moe)
    run(made, range(2), 0)
    checkpoint.save(made, tmp_path / "c")
    expected = run(made, range(2, 4), 0)
    state = support.state(made)
    run(made, range(9, 11), 0)
    checkpoint.load(made, tmp_path / "c")
    assert run(made, range(2, 4), 0) == expected
    assert support.equal(support.state(made), state)


def test_a_checkpoint_before_the_first_step_goes_back_to_nothing(moe: Path, tmp_path: Path) -> None:
    made = learners(moe)
    checkpoint.save(made, tmp_path / "c")
    expected = run(made, range(2), 0)
    checkpoint.load(made, tmp_path / "c")
    assert not made.policy_optimizer.adamw.state and not made.critic_optimizer.adamw.state
    assert run(made, range(2), 0) == expected


def test_a_checkpoint_appears_whole(moe: Path, tmp_path: Path) -> None:
    made = learners(moe)
    (tmp_path / "c.part").mkdir()
    (tmp_path / "c.part" / "__0_0.distcp").write_bytes(b"half of an older attempt")
    with pytest.raises(CheckpointException, match="metadata"):
        checkpoint.load(made, tmp_path / "c.part")
    before = support.state(made)
    checkpoint.save(made, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    checkpoint.load(made, tmp_path / "c")
    assert support.equal(before, support.state(made))


def test_frozen_parameters_survive(moe: Path, tmp_path: Path) -> None:
    made, other = learners(moe), support.learners(moe, trainable="no_attn", **OPTIMIZERS)
    run(made, range(2), 0)
    checkpoint.save(made, tmp_path / "c")
    checkpoint.load(learners(moe, seed=1), tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key"):
        checkpoint.load(other, tmp_path / "c")


# --- arms that remember, without a critic ----------------------------------------------------------------------------


def remember(made: Learners, numbers: range, name: str) -> list[dict[str, Any]]:
    """Steps on the same few prompts."""
    algorithm = support.algorithm(advantage={"id": name})
    return [support.step(made, support.grouped(i), algorithm, number=i + 1) for i in numbers]


@pytest.mark.parametrize("name", ["running_mean_prompt", "running_mean_global", "spo"])
def test_memory_survives_exactly(moe: Path, tmp_path: Path, name: str) -> None:
    straight, first = (support.without_critic(moe, OPTIMIZERS["policy_optimizer"]) for _ in range(2))
    expected = remember(straight, range(6), name)
    assert remember(first, range(3), name) == expected[:3]
    checkpoint.save(first, tmp_path / "c")
    second = support.without_critic(moe, OPTIMIZERS["policy_optimizer"])
    remember(second, range(7, 8), name)  # what it remembers of another life
    checkpoint.load(second, tmp_path / "c")
    assert second.memory == first.memory
    assert second.memory.state and second.memory.drift > 0.0
    assert remember(second, range(3, 6), name) == expected[3:]
    assert second.memory == straight.memory
    assert support.equal(support.state(second), support.state(straight))

    forgetful = support.without_critic(moe, OPTIMIZERS["policy_optimizer"])
    checkpoint.load(forgetful, tmp_path / "c")
    forgetful.memory = Memory()
    assert remember(forgetful, range(3, 6), name) != expected[3:], "the memory matters"


def test_a_checkpoint_without_a_critic_holds_none(moe: Path, tmp_path: Path) -> None:
    made = support.without_critic(moe)
    remember(made, range(2), "batch_norm")
    checkpoint.save(made, tmp_path / "c")
    names = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert names and all(name.startswith("policy.") for name in names)
    other = support.without_critic(moe)
    checkpoint.load(other, tmp_path / "c")
    assert support.equal(support.state(other), support.state(made))
    assert other.memory == made.memory and other.policy_optimizer.steps == 2
    with pytest.raises(CheckpointException, match="Missing key"):
        checkpoint.load(learners(moe), tmp_path / "c")
