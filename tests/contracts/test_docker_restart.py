"""A restart of the engine under `live-restore` loses no idle sandbox. Only where `.ci/docker.sh` started the engine."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import uuid
from pathlib import Path

import pytest

from harness.errors import SandboxError
from tests.contracts.sandbox_support import COMMAND_S, ROOT, TASK, containers_of, needs_docker, ok, started, until

pytestmark = [pytest.mark.timeout(300), needs_docker]

PID_FILE = Path(os.environ.get("SAO_DOCKERD_PID", "/run/sao-dockerd.pid"))


def our_dockerd() -> int | None:
    """The pid of the dockerd that `.ci/docker.sh` has started, if that runs."""
    try:
        pid = int(PID_FILE.read_text())
        return pid if Path(f"/proc/{pid}/comm").read_text() == "dockerd\n" else None
    except (FileNotFoundError, ProcessLookupError):
        return None


def end(pid: int) -> None:
    """Ask it to end and wait until it has."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert ended.poll(60_000), "dockerd does not end"
    finally:
        os.close(handle)


@pytest.mark.skipif(os.geteuid() != 0 or our_dockerd() is None, reason="this dockerd is not .ci/docker.sh's to restart")
def test_idle_sandboxes_survive_a_restart_of_the_engine() -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"

    async def restart() -> None:
        pid = our_dockerd()
        assert pid is not None
        try:
            await asyncio.to_thread(end, pid)
        finally:
            script = await asyncio.create_subprocess_exec("bash", str(ROOT / ".ci/docker.sh"))
            assert await asyncio.wait_for(script.wait(), 120) == 0
        assert our_dockerd() not in (None, pid)

    async def main() -> None:
        async with started("docker", run_id, warm=1) as provider:
            (pool,) = provider._fleet.pools
            idle, busy, other = [await provider.acquire(TASK) for _ in range(3)]
            await until(provider, lambda: len(pool.ready) == 1)
            await ok(idle, "mkdir sub; cd sub; echo kept > file; variable=1; (setsid sleep 96 &)")
            await ok(other, "echo kept > file")
            command = asyncio.ensure_future(busy.exec("sleep 60", timeout_s=90))
            restarting = asyncio.ensure_future(restart())
            with pytest.raises(SandboxError, match="lost its connection while a command ran"):
                await command
            assert await other.read("file") == b"kept\n"  # perhaps while the engine is away
            await restarting
            again = await ok(idle, 'cat file; pwd; echo "[${variable-}]"; pgrep -fx "sleep 96" | wc -l')
            assert again.startswith("kept\n/sandbox/sub\n[]\n1\n")
            assert "the connection was lost and made again" in again
            assert await ok(idle, "echo as before") == "as before\n"
            assert (await idle.exec("sleep 60", timeout_s=0.5)).timed_out
            assert await ok(idle, "cat file") == "kept\n"
            assert await ok(await provider.acquire(TASK), "echo new") == "new\n"
        assert not containers_of(run_id)

    asyncio.run(asyncio.wait_for(main(), 10 * COMMAND_S))
