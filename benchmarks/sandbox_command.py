"""A trivial command in a container: milliseconds in the persistent shell, against `docker exec` through the SDK, in turns.

The OpenHands numbers were measured on this project's build machine (2 cores, load 8): `/api/bash` of its agent-server
(`RemoteWorkspace.execute_command`, start and poll; openhands-agent-server 1.58.2), p50 for one caller.

    python -m benchmarks sandbox_command          needs Docker and the image of `.ci/docker.sh` (or SAO_TEST_IMAGE)
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
ROUNDS, COMMANDS = 30, 20
OPENHANDS_P50_MS = 117
OPENHANDS_SOURCE = "agent-server /api/bash, start and poll, load 8, one caller"


def main() -> None:
    """Print one JSON line."""
    ours, exec_ = asyncio.run(_measure())
    percentiles = [round(statistics.quantiles(times, n=20)[i], 3) for times in (ours, exec_) for i in (9, 18)]
    line = {"bench": "sandbox_command", "value": percentiles[0], "unit": "ms p50", "p95_ms": percentiles[1]}
    line |= {"against": "docker exec (SDK exec_run)", "against_p50_ms": percentiles[2], "against_p95_ms": percentiles[3]}
    line |= {"ratio": round(percentiles[2] / percentiles[0], 1), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(line | {"openhands_p50_ms": OPENHANDS_P50_MS, "openhands_source": OPENHANDS_SOURCE}))


async def _measure() -> tuple[list[float], list[float]]:
    import docker

    provider = DockerSandboxes(DockerConfig(image=IMAGE), f"bench-{uuid.uuid4().hex[:8]}")
    await provider.start()
    client = docker.from_env()
    ours: list[float] = []
    exec_: list[float] = []
    try:
        sandbox = await provider.acquire(Task("bench", ()))
        container = client.containers.get(sandbox.container_id)
        await sandbox.exec("true", timeout_s=30)
        for _ in range(ROUNDS):
            for _ in range(COMMANDS):
                start = time.perf_counter()
                await sandbox.exec("true", timeout_s=30)
                ours.append((time.perf_counter() - start) * 1e3)
            start = time.perf_counter()
            assert container.exec_run(["true"]).exit_code == 0
            exec_.append((time.perf_counter() - start) * 1e3)
    finally:
        client.close()
        await provider.close()
    return ours, exec_
