"""One gloo rank and two compute the same: losses, gradients, parameters, reports, files (invariant 5), and checkpoints move."""

from __future__ import annotations

import os
import subprocess
import sys
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
        [*command, str(moe), str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
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
    assert support.spread(both["state"], one["state"]) < 2e-5
    if "gradients" in one:
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


def test_ranks_may_wait_longer_than_any_batch(two: Path) -> None:
    """They wait for a command inside a collective, whose default time limit is 30 minutes on gloo and 10 on NCCL."""
    assert results(two)["idle_s"] > 24 * BATCH_WAIT_S
