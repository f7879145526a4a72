"""`sao regrade RUN`: the stored verdicts of a run folder, had again by the real command in fresh containers."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from environments.swe.environment import Swe
from harness.configfile import load_config
from harness.ledger import Ledger, Slot
from harness.registry import plugin_config
from harness.rollout import collect
from harness.rundir import RunDir
from tests.contracts.sandbox_support import started
from tests.e2e.support import ROOT, sao
from tests.swe.acting import playing, stage
from tests.swe.instance import GOLD, row

pytestmark = pytest.mark.timeout(240)


def played(image: str, folder: Path) -> Path:
    """A run folder with three judged episodes on two tasks."""
    dataset = folder / "tasks.jsonl"
    rows = [row(image=image, instance_id=f"tiny__shop-{n}").model_dump(mode="json") for n in range(2)]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in rows))
    config = load_config(
        [
            f"model.path={ROOT / 'configs/quickstart-warm'}",
            "limits.max_context=1024",
            *("environment.id=swe", f"environment.dataset={dataset}", "environment.heldout=0.0"),
            *("sandbox.id=docker", f"sandbox.image={image}", f"run_dir={folder / 'runs'}"),
        ]
    )
    run = RunDir.create(config, "train")
    environment: Swe = Swe(plugin_config("environment", config.environment.table())[1])  # type: ignore[arg-type]
    tasks = [(i, task) for i, task in enumerate(environment.tasks("train"))]
    acts = [playing(tasks[0][1], tasks[0][1].id, GOLD), playing(tasks[1][1], tasks[1][1].id, "echo '# x' >> shop/cart.py")]

    async def main() -> None:
        ledger = Ledger(run.path)
        async with started("docker", image=image) as sandboxes:
            chosen = [(Slot(0, 0), acts[0]), (Slot(1, 1), acts[1])]
            options: dict[str, Any] = {"version": 0, "concurrency": 2, "attempts": 1}
            await collect(stage(environment, sandboxes, folder / "model"), chosen, ledger, "value", **options)
            gold = [(Slot(0, 0), acts[0])]
            await collect(stage(environment, sandboxes, folder / "model"), gold, ledger, "train", **options)
        ledger.close()

    asyncio.run(main())
    run.close()
    return run.path


def test_a_run_is_judged_again(image: str, tmp_path: Path) -> None:
    run = played(image, tmp_path)
    done = sao("regrade", str(run), "--concurrency", "2")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 verdicts are the same" in done.stdout
    lines = [json.loads(line) for line in (run / "regrade.jsonl").read_text().splitlines()]
    assert [line["after"] for line in lines if line["task"] == "tiny__shop-0"] == [1.0, 1.0]
    assert [line["after"] for line in lines if line["task"] == "tiny__shop-1"] == [0.0]

    with sqlite3.connect(run / "ledger.sqlite") as book:
        book.execute("UPDATE episodes SET reward = 0.0 WHERE purpose = 'train'")
    changed = sao("regrade", str(run))
    assert changed.returncode == 1, "a verdict that does not hold is told by the exit code"
    assert "0.0 -> 1.0" in changed.stdout and "2 of 3 verdicts are the same" in changed.stdout

    (tmp_path / "tasks.jsonl").write_text((tmp_path / "tasks.jsonl").read_text().splitlines(keepends=True)[0])
    shrunk = sao("regrade", str(run))
    assert shrunk.returncode == 2 and "is now missing, not 'tiny__shop-1'" in shrunk.stderr


def test_what_cannot_be_judged_again(tmp_path: Path) -> None:
    config = load_config(["configs/quickstart.toml", f"run_dir={tmp_path}"])
    run = RunDir.create(config, "train")
    Ledger(run.path).close()
    run.close()
    refused = sao("regrade", str(run.path))
    assert refused.returncode == 2
    assert "cannot judge stored artifacts" in refused.stderr and "hint:" in refused.stderr
    assert sao("regrade", str(tmp_path / "nowhere")).returncode == 2
