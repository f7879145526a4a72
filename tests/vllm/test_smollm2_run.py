"""configs/smollm2.toml in small: a real language model, served by real vLLM, takes two SAO steps whose record is exact."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from harness.trajectory import Trajectory
from tests.e2e.support import assert_closed, book, metrics, sao, summary
from tests.vllm.support import PYTHON
from trainer.smollm2 import PACKAGES

MISSING = [name for name in PACKAGES if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2_400),
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make setup-vllm"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (make setup-models)"),
]

STEPS, BATCH, TASKS = 2, 8, 8
WAIT_S = 2_000.0
NATS = 1e-3
"""Engine and trainer, both in fp32."""
SMALL = [
    f"steps={STEPS}",
    f"algorithm.batch={BATCH}",
    f"rollout.concurrency={BATCH}",
    "rollout.eta=0",  # synchronous: batch n is sampled by version n - 1
    f"eval.tasks={TASKS}",
    "value=false",  # so few episodes teach a critic nothing
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run; model and run take 5 GB together, which are not kept."""
    folder = tmp_path_factory.mktemp("smollm2")
    model, runs = folder / "model", folder / "runs"
    try:
        made = sao("model", "smollm2", str(model), "--dtype", "float32", timeout_s=WAIT_S)
        assert made.returncode == 0, made.stderr
        words = [f"model.path={model}", f"run_dir={runs}", "engine.start_s=1500", *SMALL]
        done = sao("train", "configs/smollm2.toml", *words, timeout_s=WAIT_S)
        assert done.returncode == 0, done.stderr
        yield next(runs.iterdir())
    finally:
        shutil.rmtree(folder)


def test_versions_move_and_the_book_closes(run: Path) -> None:
    assert_closed(run, STEPS, BATCH)
    rows = metrics(run)
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["grad/policy"] > 0 and row["grad/critic_0"] > 0 for row in rows)
    result = summary(run)
    assert result["policy_version"] == STEPS
    assert result["heldout"]["before"]["n"] == result["heldout"]["after"]["n"] == TASKS


def test_every_trained_token_has_a_log_prob_and_the_version_that_sampled_it(run: Path) -> None:
    trained = book(run, "SELECT id, batch FROM episodes WHERE purpose = 'train' AND status = 'trained'")
    assert len(trained) == STEPS * BATCH
    for name, batch in trained:
        trajectory = Trajectory.load(run / "trajectories" / f"{name}.0.parquet")
        sampled = trajectory.loss_mask
        assert trajectory.n_turns == 1 and sampled.any()
        assert np.isfinite(trajectory.rollout_logprobs[sampled]).all()
        assert set(trajectory.policy_versions[sampled]) == {batch - 1}
        assert trajectory.reward in (0.0, 1.0)


def test_vllm_and_the_trainer_agree_before_and_after_an_update(run: Path) -> None:
    for row in metrics(run):
        assert row["staleness/max"] == 0
        assert row["mismatch/abs_logp_diff"] < NATS
        assert row["delta/max_abs"] < NATS


def test_the_record_is_exact(run: Path) -> None:
    verified = sao("verify", str(run))
    assert verified.returncode == 0, verified.stdout
    assert verified.stdout.splitlines()[-1] == "ok"
