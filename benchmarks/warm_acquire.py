"""From `acquire` to the first command's answer, milliseconds: a ready container against a cold start, in turns.

python -m benchmarks warm_acquire             needs Docker and the image of `.ci/docker.sh` (or SAO_TEST_IMAGE)
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
import uuid

from harness.sandboxes.docker import DockerSandboxes
from harness.sandboxes.docker_config import DockerConfig
from harness.task import Task

IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
ROUNDS = 12


def main() -> None:
    """Print one JSON line."""
    warm, cold = asyncio.run(_measure())
    value, against = statistics.median(warm), statistics.median(cold)
    line = {"bench": "warm_acquire", "value": round(value, 2), "unit": "ms p50, acquire and first command"}
    line |= {"max_ms": round(max(warm), 2), "against": "cold start", "against_p50_ms": round(against, 1)}
    print(json.dumps(line | {"ratio": round(against / value, 1), "load": round(os.getloadavg()[0], 1)}))


async def _measure() -> tuple[list[float], list[float]]:
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    ready = DockerSandboxes(DockerConfig(image=IMAGE, warm=1), f"{run_id}-warm")
    empty = DockerSandboxes(DockerConfig(image=IMAGE), f"{run_id}-cold")
    await ready.start()
    await empty.start()
    warm: list[float] = []
    cold: list[float] = []
    try:
        for _ in range(ROUNDS):
            await ready.until_ready(60)
            warm.append(await _first_command(ready))
            await ready.until_ready(60)  # or its refill would slow the cold start
            cold.append(await _first_command(empty))
    finally:
        await ready.close()
        await empty.close()
    return warm, cold


async def _first_command(provider: DockerSandboxes) -> float:
    start = time.perf_counter()
    sandbox = await provider.acquire(Task("bench", ()))
    assert (await sandbox.exec("true", timeout_s=30)).exit_code == 0
    took = (time.perf_counter() - start) * 1e3
    await sandbox.close()
    return took
