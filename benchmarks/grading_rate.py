"""Gold patches graded per minute, each in a fresh container, several at a time: against sequential `swebench eval`.

python -m benchmarks grading_rate       needs Docker, the image of `.ci/docker.sh` (or SAO_TEST_IMAGE) and `make setup-swe`

The same rows and verdicts on both sides. Both times are those of a user who waits: ours from the start of the provider until
its last container is removed, theirs from the start of the command until its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from environments.swe.environment import Swe, SweConfig
from environments.swe.patch import Extracted
from environments.swe.rows import SweRow
from harness.errors import ConfigError
from harness.sandboxes.docker import DockerSandboxes
from harness.sandboxes.docker_config import DockerConfig
from harness.sandboxes.docker_engine import Engine
from harness.task import Task

ROWS = 8
PARALLEL = (1, 2, 4, 8)


def main() -> None:
    """Print one JSON line."""
    engine = _requirements()
    from tests.swe import instance, official

    image = instance.build()
    try:
        rows = [instance.row(image=image, instance_id=f"tiny__shop-{n}") for n in range(ROWS)]
        asyncio.run(_ours(rows[:1], 1))  # the image's files are in memory then, for both sides
        patches = {row.instance_id: row.patch for row in rows}
        with tempfile.TemporaryDirectory() as folder:
            theirs, unjudged, seconds = official.evaluate(rows, patches, Path(folder), f"bench-{uuid.uuid4().hex[:8]}", jobs=1)
        rates = {}
        for parallel in PARALLEL:
            start = time.monotonic()
            resolved = asyncio.run(_ours(rows, parallel))
            rates[parallel] = round(60 * ROWS / (time.monotonic() - start), 1)
            assert (resolved, set()) == (theirs, unjudged) == (set(patches), set()), (parallel, resolved, theirs, unjudged)
    finally:
        engine.api.remove_image(image, force=True)
        engine.close()
    best, against = max(rates, key=lambda parallel: rates[parallel]), 60 * ROWS / seconds
    line: dict[str, Any] = {"bench": "grading_rate", "value": rates[best], "unit": "gold patches graded per minute"}
    line |= {"parallel": best, "per_parallel": rates, "rows": ROWS, "against": "swebench eval -j 1"}
    line |= {"against_per_minute": round(against, 1), "ratio": round(rates[best] / against, 1)}
    print(json.dumps(line | {"ratio_at_1": round(rates[1] / against, 1), "load": round(os.getloadavg()[0], 1)}))


def _requirements() -> Engine:
    """The engine; ends with what is missing and how to get it."""
    if not Path(sys.executable).with_name("swebench").exists():
        sys.exit("error: grading_rate: no `swebench` beside this Python\nhint: make setup-swe")
    try:
        engine = Engine()
    except ConfigError as error:
        sys.exit(f"error: grading_rate: {error.message}\nhint: .ci/docker.sh starts an engine")
    image = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
    if not engine.api.images(image):
        sys.exit(f"error: grading_rate: Docker has no image {image}\nhint: .ci/docker.sh builds it")
    return engine


async def _ours(rows: list[SweRow], parallel: int) -> set[str]:
    """Grade the rows' gold patches; the instances that are resolved."""
    swe = Swe(SweConfig.model_validate({"dataset": "none", "grading": {"concurrency": parallel}}))
    provider = DockerSandboxes(DockerConfig(image=rows[0].image), f"bench-{uuid.uuid4().hex[:8]}")

    async def reward(row: SweRow) -> float:
        task: Task = swe.task(row)
        return (await swe.judge(row, Extracted(row.patch.encode()), lambda: provider.acquire(task))).reward

    await provider.start()
    try:
        rewards = await asyncio.gather(*map(reward, rows))
    finally:
        await provider.close()
    return {row.instance_id for row, reward in zip(rows, rewards, strict=True) if reward == 1.0}
