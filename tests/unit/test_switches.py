"""Numbers of a reward curve through switches, and the report over run folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.online_writing.environment import OnlineWritingConfig
from evals.online_writing import by_style, load, main, report
from evals.statistics import paired
from evals.switches import moving_mean, phase_numbers
from harness.episode import Episode
from harness.registry import find
from harness.task import Termination

ROOT = Path(__file__).parents[2]


def steps(*parts: tuple[float, int]) -> Any:
    return np.concatenate([np.full(n, value) for value, n in parts])


def test_numbers_of_a_curve_by_hand() -> None:
    rewards = steps((0.2, 50), (0.8, 100), (0.0, 20), (0.6, 130), (0.1, 30))
    first, second, third = phase_numbers(rewards, [0, 150, 300])
    assert first.area == pytest.approx(50 * 0.2 + 10 * 0.8)
    assert (first.plateau, first.lag) == (pytest.approx(0.8), None), "nothing was learnt before"
    assert second.area == pytest.approx(40 * 0.6)
    assert second.lowest == 0.0
    assert second.lag == 20 + 7, "seven of ten steps at 0.6 are 0.42, half of the plateau is 0.4"
    assert third.area == pytest.approx(3.0), "a phase that is shorter counts as far as it goes"
    assert (third.lag, third.plateau) == (None, pytest.approx(0.1))


def test_a_run_that_has_not_come_to_a_switch_has_no_numbers_there() -> None:
    assert len(phase_numbers(np.ones(100), [0, 150, 300])) == 1
    assert phase_numbers(np.ones(4), [0])[0].area == 4.0
    assert phase_numbers(np.ones(0), [0, 150]) == []


def test_moving_mean() -> None:
    assert moving_mean(np.arange(12.0)) == pytest.approx([4.5, 5.5, 6.5])
    assert moving_mean(np.array([1.0, 3.0])).tolist() == [2.0]


def test_paired_interval() -> None:
    assert paired([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = paired([1.0, -1.0, 3.0, 0.0, 2.0])
    assert mean == 1.0 and low < 0.0 < high
    assert paired([1.0, -1.0, 3.0]) == paired([1.0, -1.0, 3.0]), "the same numbers, the same interval"


def test_held_out_success_by_preferred_style() -> None:
    def episode(style: str, reward: float | None) -> Episode:
        info = {} if reward is None else {"preferred": style}
        return Episode("e", "t", Termination.FINISHED, reward=reward, info=info)

    assert find("evaluation", "evals.online_writing:by_style") is by_style
    result = by_style([episode("cute", 1.0), episode("cute", 0.0), episode("classical", 1.0), episode("cute", None)])
    assert (result["n"], result["missing"]) == (3, 1)
    assert (result["success_cute"], result["success_classical"]) == (0.5, 1.0)


def run(folder: Path, seed: int, rewards: Any, arm: str) -> Path:
    """A run folder as training leaves it."""
    phases = OnlineWritingConfig().model_dump(mode="json")["phases"]
    lines = [f"seed = {seed}", "[algorithm]", "batch = 16", "group = 1", "[advantage]", f'id = "{arm}"']
    lines += ["window = 128"] if arm == "running_mean_global" else ["alpha = 1.5", "[critic]", "updates = 2"]
    for phase in phases:
        lines += ["[[environment.phases]]", *(f"{key} = {json.dumps(value)}" for key, value in phase.items())]
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("\n".join(lines))
    rows = [{"step": i + 1, "reward/mean": r, "adv/abs": 0.5, "adv/mean": -0.25} for i, r in enumerate(rewards)]
    if arm != "running_mean_global":
        rows = [row | {"value/ev": None if row["step"] == 1 else 0.3} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_report_compares_runs_of_the_same_seed(tmp_path: Path) -> None:
    folders = []
    for seed in range(3):
        good = steps((0.8, 150), (0.5 + 0.1 * seed, 150), (0.5, 120))
        folders.append(run(tmp_path / f"sao-{seed}", seed, good, "skip_observation"))
        folders.append(run(tmp_path / f"mean-{seed}", seed, steps((0.9, 150), (0.4, 270)), "running_mean_global"))
    heldout = {"before": {"success_cute": 0.25}, "after": {"success_cute": 0.75}}
    (folders[0] / "summary.json").write_text(json.dumps({"heldout": heldout}))
    text = report([load(folder) for folder in folders])
    assert "| skip_observation, K = 2 | 3 | 2 chuunibyou | 36.0 (6.0) |" in text
    assert "| running_mean_global 128 | 3 | 1 cute | 54.0 (0.0) | 0.90 (0.00) | - |" in text
    assert "- skip_observation, K = 2: cute 0.25 -> 0.75" in text
    assert "- running_mean_global 128: no run has ended" in text
    assert "| 151-160 (switch) | 0.60 | 0.40 |" in text
    assert "skip_observation, K = 2 minus running_mean_global 128, paired over 3 seeds" in text
    assert "| 1 cute | -6.0 (-6.0 to -6.0) | 0 of 3 |" in text
    assert "| 2 chuunibyou | +12.0 (" in text and "| 3 of 3 |" in text


def test_one_arm_alone_is_reported_and_other_folders_are_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 0, steps((0.5, 40)), "skip_observation")
    command = [sys.executable, "-m", "evals.online_writing"]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "| 31-40 | 0.50 |" in done.stdout
    assert main([str(tmp_path)]) == main([]) == 2
    refused = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "error: " in refused.stderr and "Traceback" not in refused.stderr
