"""T-ALIGN: what the engine recorded against what the trainer computes with the same weights, with tool output between turns."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.trajectory import Trajectory, TrajectoryBuilder
from tests.trainer import support
from trainer.batch import pack
from trainer.engine.core import EngineCore, Sequence
from trainer.model import build_policy

pytestmark = pytest.mark.usefixtures("rank")


@pytest.fixture(scope="module")
def played(moe: Path) -> list[Trajectory]:
    """Eight conversations of one to four turns side by side in the embedded engine; each turn goes on from its cache."""
    rng = random.Random(0)
    engine = EngineCore(build_policy(moe).model, 4, 512, 6)
    builders = [TrajectoryBuilder() for _ in range(8)]
    for builder in builders:
        builder.observe([rng.randrange(support.VOCAB) for _ in range(rng.randint(1, 9))])
    for turn in range(4):
        turns = []
        for i, builder in enumerate(builders[2 * turn :], 2 * turn):
            ended: list[Sequence] = []
            n = rng.randint(1, 12)
            turns.append((builder, Sequence(list(builder.tokens), n, frozenset(), 1.0, random.Random(i), ended.append)))
            engine.submit(turns[-1][1])
        while engine.busy:
            engine.step()
        for builder, said in turns:
            builder.act(said.tokens[said.prompt :], said.logprobs, said.versions)
            builder.observe([rng.randrange(support.VOCAB) for _ in range(rng.randint(1, 20))])
    return [b.build(f"e{i}", f"t{i}", reward=i % 2, info={"termination": "finished"}) for i, b in enumerate(builders)]


def edges(trajectories: list[Trajectory]) -> np.ndarray:
    """True on the first and the last token of every turn, of the action tokens of all trajectories."""
    turns = np.concatenate([t.turn_ids[t.loss_mask] + 100 * i for i, t in enumerate(trajectories)])
    change = np.diff(turns) != 0
    edge: np.ndarray = np.append(True, change) | np.append(change, True)
    return edge


@pytest.mark.parametrize(("dtype", "mean", "largest"), [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 0.02, 0.3)], ids=str)
@pytest.mark.parametrize("budget", [1, 10**6], ids=["alone", "packed"])
def test_engine_and_trainer_agree(
    moe: Path, played: list[Trajectory], dtype: torch.dtype, mean: float, largest: float, budget: int
) -> None:
    """The step says so too. The tiny model's log-probs differ by nats, so that bf16 is further off than in a real one."""
    made = support.learners(moe, dtype=dtype)
    deltas = []
    for chosen in ([t] for t in played) if budget == 1 else [played]:
        packed = pack(chosen)
        with torch.no_grad():
            logp, _ = made.policy(packed.tokens, packed.positions, packed.cu_seqlens, packed.where)
        deltas.append((logp - packed.rollout_logprobs[packed.where]).abs().numpy())
    delta = np.concatenate(deltas)
    assert len(delta) == sum(t.n_actions for t in played) and edges(played).sum() >= 30
    for part in (delta, delta[edges(played)]):
        assert part.mean() < mean and part.max() < largest
    assert delta.mean() > 1e-3 or dtype == torch.float32, "bfloat16 was asked for and not used"
    metrics = support.step(made, played, micro_batch_tokens=budget)["metrics"]
    assert metrics["staleness/max"] == 0.0
    assert metrics["mismatch/abs_logp_diff_fresh"] == pytest.approx(delta.mean(), rel=1e-2, abs=1e-7)


def test_a_shift_by_one_is_seen(moe: Path, played: list[Trajectory]) -> None:
    """What the numbers above would be if log-probs were read one position off."""
    policy, packed = build_policy(moe), pack(played)
    with torch.no_grad():
        logp, _ = policy(packed.tokens, packed.positions, packed.cu_seqlens, packed.where)
    assert (logp.roll(1) - packed.rollout_logprobs[packed.where]).abs().mean() > 1.0
