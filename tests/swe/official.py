"""The official grader as its users run it: `swebench eval` on a task file and a file of predictions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from environments.swe.rows import SweRow


def evaluate(
    rows: Sequence[SweRow], patches: Mapping[str, str], folder: Path, run_id: str, jobs: int = 1
) -> tuple[set[str], set[str], float]:
    """(resolved instances, those it could not judge, for example as a patch does not apply; seconds).

    `patches` by instance; `folder` keeps the logs. Raises `RuntimeError` with the end of its output if there is no report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks, predictions = folder / "tasks.jsonl", folder / "predictions.jsonl"
    tasks.write_text("".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows))
    predictions.write_text(
        "".join(
            json.dumps({"instance_id": name, "model_name_or_path": "model", "model_patch": patch}) + "\n"
            for name, patch in patches.items()
        )
    )
    command = [str(Path(sys.executable).with_name("swebench")), "eval", str(tasks), "-p", str(predictions)]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--run-id", run_id, "-j", str(jobs), "-t", "300"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1_800,
        check=False,
    )
    seconds = time.monotonic() - start
    reports = list(folder.glob(f"*{run_id}*.json"))
    if done.returncode != 0 or len(reports) != 1:
        raise RuntimeError(f"swebench eval: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    report = json.loads(reports[0].read_text())
    return set(report["resolved_ids"]), set(report["error_ids"]), seconds
