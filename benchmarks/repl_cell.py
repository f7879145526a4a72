"""A cell of the persistent Python: milliseconds in a warm session, against a fresh `python3 -c` per cell in the same sandbox.

python -m benchmarks repl_cell          Docker with the image of `.ci/docker.sh` (or SAO_TEST_IMAGE), else the process sandbox
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
import uuid
from typing import Any

from environments.python_tir.repl import Repl
from harness.errors import ConfigError
from harness.sandboxes.docker import DockerSandboxes
from harness.sandboxes.docker_config import DockerConfig
from harness.sandboxes.process import ProcessConfig, ProcessSandboxes
from harness.task import Task

IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
ROUNDS, CELLS = 20, 50
LIMIT_MS = 5.0


def main() -> None:
    """Print one JSON line."""
    where, ours, fresh = asyncio.run(_measure())
    percentiles = [round(statistics.quantiles(times, n=20)[i], 3) for times in (ours, fresh) for i in (9, 18)]
    line = {"bench": "repl_cell", "value": percentiles[0], "unit": "ms p50", "p95_ms": percentiles[1], "limit_ms": LIMIT_MS}
    line |= {"against": "python3 -c in the sandbox's shell", "against_p50_ms": percentiles[2], "against_p95_ms": percentiles[3]}
    line |= {"ratio": round(percentiles[2] / percentiles[0], 1), "sandbox": where, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(line))


async def _provider() -> tuple[str, Any]:
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    docker = DockerSandboxes(DockerConfig(image=IMAGE), run_id)
    try:
        await docker.start()
    except ConfigError:
        process = ProcessSandboxes(ProcessConfig(), run_id)
        await process.start()
        return "process", process
    return "docker", docker


async def _measure() -> tuple[str, list[float], list[float]]:
    where, provider = await _provider()
    ours: list[float] = []
    fresh: list[float] = []
    try:
        sandbox = await provider.acquire(Task("bench", ()))
        repl = Repl(sandbox)
        await repl.start()
        await repl.run("x = 0")
        await sandbox.exec("true", timeout_s=30)
        for _ in range(ROUNDS):
            for _ in range(CELLS):
                start = time.perf_counter()
                shown = await repl.run("x = x + 1\nx * x")
                ours.append((time.perf_counter() - start) * 1e3)
            assert shown == str(len(ours) ** 2)
            start = time.perf_counter()
            assert (await sandbox.exec("python3 -c 'print(6 * 7)'", timeout_s=30)).output == "42\n"
            fresh.append((time.perf_counter() - start) * 1e3)
    finally:
        await provider.close()
    return where, ours, fresh
