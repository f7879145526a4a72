"""The main job as a user runs it, in small: it learns, its controls do not, and nothing is lost or left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import (
    ANY_CRITIC,
    ROOT,
    SMALL,
    Training,
    all_gone,
    assert_closed,
    book,
    metrics,
    sandboxes_left,
    sao,
    summary,
)

pytestmark = pytest.mark.timeout(1_200)

STEPS = 20
CONFIG = "configs/quickstart.toml"


def finished(folder: Path, *overrides: str) -> Path:
    """Run to the end; the run folder."""
    done = sao("train", CONFIG, f"run_dir={folder}", *overrides)
    assert done.returncode == 0, done.stderr
    (run,) = folder.iterdir()
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("runs"), *SMALL, f"steps={STEPS}")


def test_it_learns(trained: Path) -> None:
    heldout = summary(trained)["heldout"]
    for side in ("before", "after"):
        assert heldout[side]["low"] <= heldout[side]["success"] <= heldout[side]["high"]
        assert heldout[side]["n"] == 96
    assert heldout["after"]["success"] >= heldout["before"]["success"] + 0.2, heldout


def test_the_record_is_whole(trained: Path) -> None:
    assert_closed(trained, STEPS, 32)
    result = summary(trained)
    assert sum(result["episodes"].values()) == book(trained, "SELECT COUNT(*) FROM episodes")[0][0]
    rows = metrics(trained)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    probe = json.loads((trained / "probe.json").read_text())
    assert probe["max_abs"] < 1e-4 and probe["version"] == 0 and probe["tokens"] > 192
    assert rows[-1]["version"] == STEPS
    assert all(row["mismatch/abs_logp_diff"] is not None and row["grad/policy"] > 0 for row in rows)
    assert rows[0]["staleness/max"] == 0
    assert rows[0]["mismatch/abs_logp_diff"] < 1e-4, "engine and trainer agree before the first update"
    assert sandboxes_left(trained) == []
    for name in ("config.toml", "policy/model.safetensors", "critic/model.safetensors", "value.json"):
        assert (trained / name).is_file()


def test_weights_change_while_episodes_run(trained: Path) -> None:
    mixed = book(trained, "SELECT COUNT(*) FROM episodes WHERE purpose = 'train' AND min_version < max_version")[0][0]
    late = book(trained, "SELECT COUNT(*) FROM episodes WHERE complete_version > submit_version")[0][0]
    assert mixed > 0
    assert late > 0


@pytest.mark.parametrize("control", ["flip_sign", "shuffle_rewards"])
def test_controls_do_not_learn(control: str, trained: Path, tmp_path: Path) -> None:
    taught = ["eval.tasks=96", "value=false", f"critic.init={trained}/critic"]
    run = finished(tmp_path, *taught, f"steps={STEPS}", f"algorithm.control={control}")
    before = summary(trained)["heldout"]["before"]["success"]
    after = summary(run)["heldout"]["after"]["success"]
    assert after <= before + 0.2, "a control must not improve: three standard errors of a difference of two times 96 tasks"
    assert after <= summary(trained)["heldout"]["after"]["success"] - 0.15


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    few = ["value.episodes=24", "value.epochs=1", "eval.tasks=8", *ANY_CRITIC]
    job = Training(CONFIG, f"run_dir={tmp_path}", *few, "steps=10", "trainer.checkpoint_every=3")
    yield job
    if job.process.poll() is None:
        job.process.kill()
        job.process.wait(30.0)


def resume(run: Path) -> None:
    done = sao("train", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert_closed(run, 10, 32)
    assert summary(run)["policy_version"] == 10
    assert [row["step"] for row in metrics(run)] == list(range(1, 11))
    assert sandboxes_left(run) == []


def test_kill_9_and_resume(training: Training) -> None:
    training.until("step 5 ")
    children = training.children()
    training.stop(signal.SIGKILL)
    assert all_gone(children) == [], "engine, trainer and sandboxes end with the harness"
    resume(training.run)


def test_ctrl_c_and_resume(training: Training) -> None:
    training.until("step 4 ")
    children = training.children()
    code, seconds = training.stop(signal.SIGINT)
    assert code == 130, training.lines
    assert seconds < 10.0
    assert "Traceback" not in "".join(training.lines)
    assert f"sao train --resume {training.run}" in training.lines[-1]
    assert all_gone(children, 1.0) == []
    assert sandboxes_left(training.run) == []
    assert book(training.run, "SELECT COUNT(*) FROM episodes WHERE status = 'running'") == [(0,)]
    resume(training.run)


def test_each_stage_is_a_verb(tmp_path: Path) -> None:
    scratch = (ROOT / "configs/quickstart-scratch.toml").read_text()
    config = tmp_path / "scratch.toml"
    config.write_text("\n".join(line for line in scratch.splitlines() if not line.startswith("gate = ")))
    short = ["sft.episodes=64", "sft.epochs=1", "sft.corpus_phases=[{levels = [0], loss = 2.4}]"]
    runs = f"run_dir={tmp_path / 'runs'}"
    made = sao("sft", str(config), runs, *short)
    assert made.returncode == 0, made.stderr
    model = Path(made.stdout.strip())
    assert (model / "model.safetensors").is_file()
    gated = sao("sft", str(config), runs, *short, "sft.gate=environments.toy_repair.gate:skill_gate")
    assert gated.returncode == 2
    assert "gate `reads the numbers`" in gated.stderr


def test_value_pretraining_plays_or_takes_a_stored_run(tmp_path: Path) -> None:
    runs, few = f"run_dir={tmp_path}", ["value.episodes=24", "value.epochs=1"]
    played = sao("pretrain-value", CONFIG, runs, *few, *ANY_CRITIC)
    assert played.returncode == 0, played.stderr
    critic = Path(played.stdout.strip())
    taken = sao("pretrain-value", CONFIG, runs, *few, *ANY_CRITIC, f"value.run={critic.parent}")
    assert taken.returncode == 0, taken.stderr
    records = [json.loads((Path(done.stdout.strip()) / "critic.json").read_text()) for done in (played, taken)]
    assert records[0]["data_sha256"] == records[1]["data_sha256"] and records[0]["report"] == records[1]["report"]
    assert not list((Path(taken.stdout.strip()).parent / "trajectories").iterdir()), "nothing was played again"
    refused = sao("pretrain-value", CONFIG, runs, *few, f"value.run={critic.parent}", "value.min_ev=0.99")
    assert refused.returncode == 2
    assert "value.min_ev = 0.99" in refused.stderr and "hint:" in refused.stderr


@pytest.mark.skipif(os.environ.get("SAO_TEST_DOCKER") == "0", reason="SAO_TEST_DOCKER=0")
def test_the_same_job_in_real_containers(tmp_path: Path) -> None:
    small = [
        "steps=2",
        "algorithm.batch=8",
        "rollout.concurrency=8",
        "value.episodes=24",
        "value.epochs=1",
        "eval.tasks=8",
        *ANY_CRITIC,
    ]
    done = sao("train", CONFIG, f"run_dir={tmp_path}", "sandbox.id=docker", "sandbox.image=sao-test:bookworm", *small)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.iterdir()
    assert_closed(run, 2, 8)
    assert summary(run)["heldout"]["after"]["n"] == 8
    label = f"label=sao.run={run.name}"
    listed = subprocess.run(["docker", "ps", "-aq", "--filter", label], capture_output=True, text=True, check=True, timeout=60)
    assert listed.stdout == ""


def test_two_ranks(tmp_path: Path) -> None:
    run = finished(tmp_path, *SMALL, "steps=2", "trainer.ranks=2", "eval.tasks=16", "sandbox.id=memory")
    assert_closed(run, 2, 32)
    assert metrics(run)[-1]["version"] == 2


def test_full_disk_is_one_message(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=True, timeout=30)
    try:
        done = sao("train", CONFIG, f"run_dir={tmp_path}", *SMALL, "sandbox.id=memory", "steps=10")
        assert done.returncode != 0
        assert "error: " in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=30)


def test_unreachable_docker_is_one_message(tmp_path: Path) -> None:
    done = sao("train", CONFIG, f"run_dir={tmp_path}", "sandbox.id=docker", DOCKER_HOST="tcp://127.0.0.1:9")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
