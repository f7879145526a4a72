"""Two environments in one run, as a user mixes them: drawn by weight, told apart in every number, exact in the book."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.e2e.support import assert_closed, book, metrics, sandboxes_left, sao, summary

STEPS, BATCH = 2, 8
MIX = """
steps = 2
[environment]
id = "mixture"
[[environment.parts]]
id = "toy_repair"
name = "repair"
weight = 3.0
[[environment.parts]]
id = "toy_repair"
name = "other"
seed = 9
"""


def test_a_mixed_run(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text(MIX)
    words = [f"run_dir={tmp_path}/runs", "value=false", "eval.tasks=8", f"algorithm.batch={BATCH}", "rollout.concurrency=8"]
    done = sao("train", "configs/quickstart.toml", str(tmp_path / "mix.toml"), *words)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert_closed(run, STEPS, BATCH)
    drawn = book(run, "SELECT task_id FROM episodes WHERE purpose = 'train' AND draw <= 16 AND attempt = 1")
    assert Counter(task.partition("/")[0] for (task,) in drawn) == {"repair": 12, "other": 4}
    for row in metrics(run):
        shares = {name: row.get(f"source/{name}_share", 0.0) for name in ("repair", "other")}
        assert sum(shares.values()) == 1.0
        weighed = sum(share * row.get(f"source/{name}_reward", 0.0) for name, share in shares.items())
        assert abs(weighed - row["reward/mean"]) < 1e-9
    heldout = summary(run)["heldout"]["after"]
    assert {name: part["n"] for name, part in heldout["sources"].items()} == {"repair": 6, "other": 2}
    assert heldout["n"] == 8
    verified = sao("verify", str(run))
    assert verified.returncode == 0, verified.stdout
    assert sandboxes_left(run) == []
