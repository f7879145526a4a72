"""One gloo rank and two compute the same: losses, gradients, parameters, reports, files (invariant 5), and checkpoints move."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.loop import BATCH_WAIT_S
from tests.trainer import cases, support
from trainer import checkpoint

pytestmark = pytest.mark.usefixtures("rank")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two real ranks left their results."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.trainer.cases"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(moe), str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def results(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"results-{rank}.pt", weights_only=False)
    return found


def same(a: Any, b: Any) -> None:
    """Reports of any nesting, equal to rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == (b if b is None or isinstance(b, bool) else pytest.approx(b, rel=2e-4, abs=2e-6))


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_two_ranks_are_one(moe: Path, two: Path, case: Any) -> None:
    one, both = case(moe), results(two)[case.__name__]
    # AdamW divides each gradient by its own size, so that rounding shows in the smallest; a wrong one moves by lr = 1e-3.
    assert support.spread(both["state"], one["state"]) < 2e-4
    if one.get("gradients"):
        assert support.apart(both["gradients"], one["gradients"]) < 2e-5
    same(both.get("reports"), one.get("reports"))


def test_muon_sees_whole_matrices(moe: Path, two: Path) -> None:
    """Not each rank its own rows. Its iteration is in bfloat16 and lifts the noise of small directions, hence the width."""
    one, both = cases.taught(moe)["muon"], results(two)["taught"]["muon"]
    assert one.keys() == both.keys() and len(one) == 8
    for name, update in one.items():
        assert (both[name] - update).norm() < 0.2 * update.norm(), name


def test_every_rank_answers_the_same(two: Path) -> None:
    """Only rank 0 speaks to the harness; if another disagreed, nobody would see it."""
    first, second = results(two, 0), results(two, 1)
    for case in cases.CASES:
        assert support.equal(first[case.__name__]["state"], second[case.__name__]["state"]), case.__name__
        assert first[case.__name__].get("reports") == second[case.__name__].get("reports")


def test_rejected_batches_are_no_step_on_two_ranks(two: Path) -> None:
    report = results(two)["rejected"]["reports"][0]
    assert not report["stepped"] and report["metrics"]["dis/all_masked"] == 1.0


def test_two_ranks_resume_bit_exactly(two: Path) -> None:
    found = results(two)
    assert support.equal(found["resumed"]["state"], found["again"]["state"])
    assert found["resumed"]["reports"] == found["again"]["reports"]


def test_a_checkpoint_of_two_ranks_loads_on_one(moe: Path, two: Path) -> None:
    made = support.learners(moe, seed=9, **cases.LR)
    checkpoint.load(made, two / "checkpoint")
    assert made.policy_optimizer.steps == 1 and made.critic_optimizer.steps == 4
    one = cases.continued(made)
    assert support.spread(one["state"], results(two)["resumed"]["state"]) < 1e-6
    same(one["reports"], results(two)["resumed"]["reports"])


def test_the_arms_do_what_they_are_here_for(two: Path) -> None:
    """Not that both rank counts skip the same step."""
    found = {name: results(two)[name]["reports"][-1] for name in cases.ARMS}
    rejected = {name: report["metrics"]["dis/mask_frac"] for name, report in found.items()}
    assert [name for name, report in found.items() if not report["stepped"]] == ["all_masked"]
    assert 0.1 < rejected["token_kept"] < 0.9 and 0.1 < rejected["gspo"] < 0.9
    assert found["mask"]["metrics"]["batch/action_tokens"] < found["seq_mean"]["metrics"]["batch/action_tokens"]
    assert not results(two)["all_masked"]["gradients"]
    clipped, free = (results(two)[name]["reports"][-1]["metrics"]["value/mse_1"] for name in ("value_clip", "global_std_only"))
    assert clipped != pytest.approx(free, rel=1e-3)


def test_memory_moves_from_two_ranks_to_one(moe: Path, two: Path) -> None:
    made = support.without_critic(moe, cases.LR["policy_optimizer"])
    checkpoint.load(made, two / "remembered")
    expected = results(two)["remembered"]
    assert asdict(made.memory) == expected["memory"]
    one = cases.seen_again(made)
    assert support.spread(one["state"], expected["state"]) < 2e-5
    same(one["reports"], expected["reports"])
    same(one["memory_after"], expected["memory_after"])
    assert results(two, 1)["remembered"]["memory_after"] == expected["memory_after"]


def test_ranks_may_wait_longer_than_any_batch(two: Path) -> None:
    """They wait for a command inside a collective, whose default time limit is 30 minutes on gloo and 10 on NCCL."""
    assert results(two)["idle_s"] > 24 * BATCH_WAIT_S
