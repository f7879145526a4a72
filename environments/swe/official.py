"""The official grader as its users run it: `swebench eval` on a task file and a file of predictions.

Flows in: rows and patches. Flows out: which instances are resolved, which it could not judge. It talks to Docker by itself: the
engine of the environment, and images that the rows name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from environments.swe.rows import SweRow
from harness.errors import ConfigError, VerifierFault

TEST_S = 1_800
"""For the tests of one instance; swebench's own default."""
PER_INSTANCE_S = 3_600.0


def program() -> Path:
    """The command. Raises `ConfigError` if it is not installed."""
    path = Path(sys.executable).with_name("swebench")
    if not path.is_file():
        raise ConfigError("the official judge needs swebench 5", hint="make setup-swe, or: pip install swebench==5.0.2")
    return path


def evaluate(
    rows: Sequence[SweRow],
    patches: Mapping[str, str],
    folder: Path,
    run_id: str,
    *,
    jobs: int = 1,
    model: str = "model",
    test_s: int = TEST_S,
) -> tuple[set[str], set[str], float]:
    """(resolved instances, those it could not judge, for example as a patch does not apply; seconds).

    `patches` by instance; `folder` keeps the logs. Raises `ConfigError` if swebench is not installed, `VerifierFault` with the
    end of its output if there is no report.
    """
    command = [str(program()), "eval"]
    folder.mkdir(parents=True, exist_ok=True)
    tasks, predictions = folder / "tasks.jsonl", folder / "predictions.jsonl"
    tasks.write_text("".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows))
    predictions.write_text(
        "".join(
            json.dumps({"instance_id": name, "model_name_or_path": model, "model_patch": patch}) + "\n"
            for name, patch in patches.items()
        )
    )
    command += [str(tasks), "-p", str(predictions), "--run-id", run_id, "-j", str(jobs), "-t", str(test_s)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PER_INSTANCE_S * max(1, len(rows)), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise VerifierFault(f"swebench eval did not end within {error.timeout:.0f} s") from error
    seconds = time.monotonic() - start
    reports = list(folder.glob(f"*{run_id}*.json"))
    if done.returncode != 0 or len(reports) != 1:
        raise VerifierFault(f"swebench eval: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    report = json.loads(reports[0].read_text())
    return set(report["resolved_ids"]), set(report["error_ids"]), seconds
