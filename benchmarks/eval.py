"""Evaluation of 200 toy tasks, 16 at a time against one by one: the quickstart's warm policy on the embedded engine.

Both sides in one run: one engine process with one thread, the same tasks and seeds, through the same `collect` as `sao eval
toy_repair`. The engine is up and warm before the clock starts. `ratio` is with sandboxes in memory, where model and harness are
what is measured; `ratio_in_processes` with the suite's own sandboxes, where 16 at a time are bound by the CPU that some 600
fresh Python interpreters take (`processes_cpu_s`), which is the same on both sides.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
import time
from typing import Any

from evals.evaluate import prepare
from evals.models import find_model
from evals.suites import load_suite
from harness.ledger import Slot
from harness.rollout import collect
from harness.run import Run
from harness.rundir import RunDir

PROBLEMS, CONCURRENCY = 200, 16
MODEL = "configs/quickstart-warm"


def main() -> None:
    """Print the JSON line."""
    many, one = _measured("memory")
    real_many, real_one = _measured("process")
    line: dict[str, Any] = {"bench": "eval", "value": many["seconds"]}
    line |= {"unit": f"seconds for {PROBLEMS} toy tasks, {CONCURRENCY} at a time", "against": "one by one"}
    line |= {"against_s": one["seconds"], "ratio": round(one["seconds"] / many["seconds"], 2), "harness_cpu_s": many["cpu_s"]}
    line |= {"tokens_per_s": many["tokens_per_s"], "against_tokens_per_s": one["tokens_per_s"], "success": many["success"]}
    line |= {"ratio_in_processes": round(real_one["seconds"] / real_many["seconds"], 2)}
    line |= {"processes_s": real_many["seconds"], "processes_cpu_s": real_many["cpu_s"], "cores": os.cpu_count()}
    print(json.dumps(line | {"load": round(os.getloadavg()[0], 1)}))


def _measured(sandbox: str) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"sandbox.id={sandbox}", f"engine.max_batch={CONCURRENCY}", f"run_dir={folder}"]
        config, plan = prepare(load_suite("toy_repair"), find_model(MODEL), words, None, PROBLEMS)
        return asyncio.run(_both(Run(RunDir.create(config, f"eval-{plan.suite}"), config)))


async def _both(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    async with run:
        await run.launch_engine()
        await _play(run, "warm", CONCURRENCY, CONCURRENCY)
        return await _play(run, "many", PROBLEMS, CONCURRENCY), await _play(run, "one", PROBLEMS, 1)


async def _play(run: Run, purpose: str, problems: int, concurrency: int) -> dict[str, float]:
    """Seconds, sampled tokens per second, CPU seconds of this process and its sandboxes, share of successes."""
    tasks = run.tasks("heldout")
    start, cpu = time.monotonic(), _cpu_s()
    episodes = await collect(
        run.stage(),
        [(Slot(i, i), tasks[i]) for i in range(problems)],
        run.ledger,
        purpose,
        version=0,
        concurrency=concurrency,
        attempts=1,
        seed=run.config.seed,
        keep=False,
    )
    seconds = time.monotonic() - start
    assert all(e.reward is not None for e in episodes)
    return {
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(e.used.action_tokens for e in episodes) / seconds),
        "cpu_s": round(_cpu_s() - cpu, 2),
        "success": sum(e.reward == 1.0 for e in episodes) / problems,
    }


def _cpu_s() -> float:
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
