"""What the tests of `sao experiment` share: a matrix, and cells as `sao train` and `sao eval` leave them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.experiment.matrix import Cell, Matrix
from evals.experiment.runner import folder_of
from evals.result import Result, Sample
from harness.configfile import dump_config, load_config

BASE = ["configs/corridor.toml"]


def matrix(**fields: Any) -> Matrix:
    study = {"name": "s", "arms": ["sao", "grpo_dis"], "steps": 3}
    return Matrix(**{"base": BASE, "seeds": [0, 1], "study": [study]} | fields)


def rows(rewards: Sequence[float], **more: Sequence[float | None]) -> list[dict[str, Any]]:
    """Metrics of a run by step."""
    return [
        {"step": n, "reward/mean": reward, **{name.replace("__", "/"): values[n - 1] for name, values in more.items()}}
        for n, reward in enumerate(rewards, 1)
    ]


def write_run(root: Path, cell: Cell, metrics: Sequence[dict[str, Any]], success: float | None = 0.5, name: str = "1") -> Path:
    """A run folder; without `success` it has not ended."""
    run = folder_of(root, cell) / f"train-{name}"
    run.mkdir(parents=True)
    (run / "ledger.sqlite").touch()
    (run / "config.toml").write_text(dump_config(load_config([*cell.words, f"run_dir={run.parent}"])))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if success is not None:
        heldout = {"before": {"success": 0.2}, "after": {"success": success}}
        (run / "summary.json").write_text(json.dumps({"heldout": heldout, "wall_s": 60.0}))
    return run


def write_evaluation(root: Path, cell: Cell, suite: str, rewards: Sequence[float | None] | None) -> Path:
    """A folder of `sao eval`, one run per problem; None: it was stopped before it had a result."""
    folder = folder_of(root, cell) / "evals" / f"eval-{suite}-20260101-000000-7"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ledger.sqlite").touch()
    if rewards is not None:
        problems = tuple(f"p{i}" for i in range(len(rewards)))
        samples = tuple(Sample(p, 0, reward, "finished", 1, 1, 1, 1.0, "") for p, reward in zip(problems, rewards, strict=True))
        Result(suite, "m", 1, problems, {}, samples).save(folder)
    return folder
