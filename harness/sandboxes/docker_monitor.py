"""One task per engine that looks at its containers every few seconds: disk, deadlines, ready ones that died, dead runs.

Flows in: a `Pool` and the limits. Flows out: containers over a limit are killed, and their `stopped` says why, so that the
sandbox can tell the policy (its doing: disk) or the scheduler (not its doing: deadline).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from harness.errors import SandboxError
from harness.sandboxes.docker_config import DockerConfig
from harness.sandboxes.docker_pool import Container, Pool

log = logging.getLogger(__name__)

CHECK_S = 5.0
GRACE_S = 10.0
"""How long a container that was over its disk budget may be so after its next start, to make room."""
REAP_EVERY = 12
"""Checks between two searches for what dead runs have left."""


async def watch(pool: Pool, config: DockerConfig) -> None:
    """Check until cancelled. An engine that does not answer is told once, and looked at again."""
    away = False
    checks = 0
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await check(pool, config)
            checks += 1
            if checks % REAP_EVERY == 0 and (count := await pool.engine.call(pool.engine.reap, None, pool.run_id)):
                log.info("%s: removed %d containers that dead runs had left", pool.engine.name, count)
            away = False
        except SandboxError as error:
            if not away:
                log.warning("%s: its containers cannot be looked at: %s", pool.engine.name, error)
            away = True


async def check(pool: Pool, config: DockerConfig) -> None:
    """Look once."""
    found = await pool.engine.call(pool.engine.find, f"sao.run={pool.run_id}", True)
    listed = {container["Id"]: container for container in found}
    for container in list(pool.taken.values()):
        if container.id in listed and not container.stopped:
            await _hold(container, listed[container.id], config)
    for container in list(pool.ready):
        died = container.stream is None or container.stream.ended
        if died or container.age_s > config.deadline_s:
            await pool.discard(container)
    pool.refill(pool.wanted)


async def _hold(container: Container, listed: dict[str, Any], config: DockerConfig) -> None:
    """Hold one container of an episode to its limits; the reason is known before its stream ends."""
    engine = container.engine
    async with container.stopping:
        if container.age_s > config.deadline_s:
            container.stopped = "deadline"
            await engine.call(engine.remove, container.id)
        elif (
            listed["State"] == "running"
            and listed.get("SizeRw", 0) > config.disk_mb << 20
            and time.monotonic() - container.started_again > GRACE_S
        ):
            container.stopped = "disk"
            await engine.call(engine.stop, container.id)
