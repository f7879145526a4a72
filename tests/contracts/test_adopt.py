"""Containers that outlive a killed harness: another process of the run adopts them, and nobody else's reaper is ours."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from docker.errors import APIError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from harness.errors import SandboxError
from harness.sandboxes import docker_engine, docker_monitor
from harness.task import Task
from tests.contracts.sandbox_support import (
    COMMAND_S,
    ROOT,
    SOCKET,
    TASK,
    Proxy,
    an_engine,
    containers_of,
    needs_docker,
    ok,
    started,
)

pytestmark = [pytest.mark.timeout(180), needs_docker]

OWNER = """
import asyncio, json, socket, sys
from tests.contracts.sandbox_support import TASK, started
socket.gethostname = lambda: f"host-of-{sys.argv[1]}"
async def main():
    options = json.loads(sys.argv[3])
    async with started("docker", sys.argv[1], **options) as provider:
        hanging, names = [], []
        for command, hangs in json.loads(sys.argv[2]):
            sandbox = await provider.acquire(TASK)
            names.append(sandbox.name)
            await sandbox.exec(f"mkfifo /tmp/began; {command}", timeout_s=60)
            if hangs:
                hanging.append(asyncio.ensure_future(sandbox.exec(hangs, timeout_s=600)))
                began = await sandbox.spawn(["cat", "/tmp/began"])
                assert await asyncio.wait_for(began.read(), 60) == b"began\\n"
                hanging.append(await sandbox.spawn(["bash", "-c", "echo said; sleep 1003"], tty=True))
                assert await asyncio.wait_for(hanging[-1].read(), 60)
        print(json.dumps(names), flush=True)
        await asyncio.wait_for(asyncio.Event().wait(), 120)
asyncio.run(main())
"""
FORKS = "import os, signal\ntry:\n  while os.fork(): pass\n  signal.pause()\nexcept BlockingIOError: pass"
LIVING = 'for n in 1001 1002 1003; do pgrep -fx "sleep $n" >/dev/null && echo $n; done; true'


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch) -> str:
    """A run on a machine of its own, as its labels say: other runs on this one would reap what it leaves."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-of-{name}")
    return name


@asynccontextmanager
async def left(run_id: str, *commands: tuple[str, str], alive: bool = False, **options: Any) -> AsyncIterator[list[str]]:
    """Names of containers that a killed process has left, one for each command that went well and one that still ran."""
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, run_id, json.dumps(commands), json.dumps(options)), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        names = json.loads(await asyncio.wait_for(owner.stdout.readline(), 4 * COMMAND_S))
        if not alive:
            owner.send_signal(signal.SIGKILL)
            await owner.wait()
        yield names
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()
        with an_engine() as engine:
            engine.reap(run_id)


def test_the_episode_goes_on_in_it(run_id: str) -> None:
    before = "(setsid sleep 1001 &); cd /tmp; echo kept > /sandbox/file"

    async def main() -> None:
        async with left(run_id, (before, "echo began > /tmp/began; sleep 1002; echo done > /sandbox/never")) as (name,):
            async with started("docker", run_id, max_containers=1) as provider:
                (pool,) = provider._fleet.pools
                sandbox = await provider.adopt(TASK, name)
                assert sandbox.name == sandbox.container_id == name
                assert (pool.busy, pool.room()) == (1, 0)
                assert await ok(sandbox, "pwd; cat file; ls") == "/sandbox\nkept\nfile\n"
                assert await ok(sandbox, LIVING) == "1001\n", "a daemon lives, what the dead process held does not"
                await ok(sandbox, "cd /tmp; variable=1")
                assert await ok(sandbox, "echo $variable $PWD") == "1 /tmp\n"
                await sandbox.write("big", b"x" * 100_000)
                assert await sandbox.read("big") == b"x" * 100_000
                assert (await sandbox.exec("sleep 60", timeout_s=0.5)).timed_out
                assert await sandbox.read("file") == b"kept\n"
                beside = await sandbox.fresh()
                assert await ok(beside, "ls") == ""
                await beside.close()
                waiting = asyncio.ensure_future(provider.acquire(TASK))
                await asyncio.wait([waiting], timeout=0.2)
                assert not waiting.done(), "it counts"
                await sandbox.close()
                assert (await asyncio.wait_for(waiting, COMMAND_S)).name != name
                assert name not in containers_of(run_id)
            assert not containers_of(run_id)

    asyncio.run(main())


def test_who_may_not_adopt(run_id: str) -> None:
    async def main() -> None:
        commands = [("true", "")] * 3
        # The other run starts before: it would reap them.
        async with started("docker") as other, left(run_id, *commands) as (one, stopped, gone):
            with an_engine() as engine:
                engine.stop(stopped)
                engine.remove(gone)
            async with started("docker", run_id) as provider:
                (pool,) = provider._fleet.pools
                with pytest.raises(SandboxError, match=f"{one[:12]} cannot be adopted: it is not of the run test-"):
                    await other.adopt(TASK, one)
                with pytest.raises(SandboxError, match=f"{stopped[:12]} cannot be adopted: it is exited"):
                    await provider.adopt(TASK, stopped)
                for name in (gone, one[:12], "", "nothing at all", "../x"):
                    with pytest.raises(SandboxError):
                        await provider.adopt(TASK, name)
                with pytest.raises(SandboxError, match=f"{gone[:12]} cannot be adopted: it is gone"):
                    await provider.adopt(TASK, gone)
                assert pool.busy == 0
                both = await asyncio.gather(*(provider.adopt(TASK, one) for _ in range(2)), return_exceptions=True)
                (refused,) = [one for one in both if isinstance(one, SandboxError)]
                assert "cannot be adopted: an episode has it" in refused.message
                with pytest.raises(SandboxError, match="an episode has it"):
                    await provider.adopt(TASK, (await provider.acquire(TASK)).name)
                assert pool.busy == 2
                assert {stopped, one} < set(containers_of(run_id))
            assert not containers_of(run_id)

    asyncio.run(main())


def test_a_living_owner_keeps_its_own(run_id: str) -> None:
    async def main() -> None:
        async with left(run_id, ("echo kept > file", ""), alive=True) as (name,), started("docker", run_id) as provider:
            with pytest.raises(SandboxError, match="an episode has it"):
                await provider.adopt(TASK, name)

    asyncio.run(main())


def test_the_runs_own_reapers_spare_what_may_be_adopted(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.05)
    monkeypatch.setattr(docker_monitor, "REAP_EVERY", 1)

    async def main() -> None:
        async with left(run_id, ("echo kept > file; (setsid sleep 1001 &)", ""), ("true", "")) as (name, nobodys):
            async with started("docker", run_id) as provider:
                (pool,) = provider._fleet.pools
                reap, reaped = pool.engine.reap, asyncio.Event()
                loop = asyncio.get_running_loop()

                def told(*arguments: Any) -> int:
                    count: int = reap(*arguments)
                    loop.call_soon_threadsafe(reaped.set)
                    return count

                pool.engine.reap = told
                await asyncio.wait_for(reaped.wait(), COMMAND_S)
                assert {name, nobodys} == set(containers_of(run_id))
                sandbox = await provider.adopt(TASK, name)
                reaped.clear()
                await asyncio.wait_for(reaped.wait(), COMMAND_S)
                assert await ok(sandbox, f"cat file; {LIVING}") == "kept\n1001\n", "also where no command ran"
            assert not containers_of(run_id), "also what nobody has adopted"

    asyncio.run(main())


def test_an_old_one_is_reaped_all_the_same(run_id: str) -> None:
    async def main() -> None:
        async with left(run_id, ("true", ""), deadline_s=1.0) as (name,):
            with an_engine() as engine:
                deadline = int(engine.inspect(name)["Config"]["Labels"]["sao.deadline"])  # type: ignore[index]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(docker_engine.time, "time", lambda: deadline + 1.0)
                    assert engine.reap(None, run_id) == 1

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["disk", "deadline"])
def test_it_is_watched_as_any_other(run_id: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)
    options: dict[str, Any] = {"disk": {"disk_mb": 40}, "deadline": {"deadline_s": 3}}[limit]

    async def main() -> None:
        async with left(run_id, ("true", "")) as (name,), started("docker", run_id, **options) as provider:
            sandbox = await provider.adopt(TASK, name)
            filling = sandbox.exec("head -c 60000000 /dev/zero > big; sleep 60", timeout_s=COMMAND_S)
            if limit == "disk":
                assert (await filling).killed_by == "disk"
                assert await ok(sandbox, "rm big; echo usable") == "usable\n"
            else:
                with pytest.raises(SandboxError, match="lost: it was removed at its deadline"):
                    await filling

    asyncio.run(main())


def test_what_happened_before_is_not_blamed_on_the_next_command(run_id: str) -> None:
    hungry = "python3 -c 'bytearray(300 << 20)'; true"

    async def main() -> None:
        async with left(run_id, (hungry, ""), memory_mb=128) as (name,), started("docker", run_id) as provider:
            sandbox = await provider.adopt(TASK, name)
            assert (await sandbox.exec("false", timeout_s=COMMAND_S)).killed_by == ""
            assert (await sandbox.exec(f"{hungry}; false", timeout_s=COMMAND_S)).killed_by == "memory"

    asyncio.run(main())


def test_one_without_room_for_a_process(run_id: str) -> None:
    async def main() -> None:
        async with left(run_id, ("echo kept > file", ""), pids=24) as (name,), started("docker", run_id) as provider:
            with an_engine() as engine:
                engine.run(name, ["python3", "-c", FORKS])
                for attempt in Retrying(retry=retry_if_exception_type(APIError), stop=stop_after_attempt(20), reraise=True):
                    with attempt:  # the engine's own helper wants a place for a moment, and may find none
                        engine.api.exec_start(engine.api.exec_create(name, ["sleep", "1001"])["Id"], detach=True)
                assert len(engine.api.top(name)["Processes"]) == 24
            sandbox = await provider.adopt(TASK, name)
            assert await ok(sandbox, "cat file; pgrep -c python3 || true") == "kept\n0\n"
            assert await ok(await sandbox.fresh(), "echo fresh") == "fresh\n"

    asyncio.run(main())


def test_it_is_found_on_the_engine_that_has_it(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "AGAIN_S", 0.5)

    async def main() -> None:
        await (proxy := Proxy(SOCKET)).start()
        try:
            async with left(run_id, ("echo kept > file", "")) as (name,):
                engines = [f"tcp://127.0.0.1:{proxy.port}", f"unix://{SOCKET}"]
                async with started("docker", run_id, engines=engines) as provider:
                    silent, other = provider._fleet.pools
                    await proxy.stop()
                    with pytest.raises(SandboxError, match="docker: "):
                        await provider.adopt(Task("t", ()), "0" * 64)
                    sandbox = await provider.adopt(TASK, name)
                    assert (silent.busy, other.busy) == (0, 1)
                    assert await ok(sandbox, "cat file") == "kept\n"
                    await proxy.start()
        finally:
            await proxy.stop()
        assert not containers_of(run_id)

    asyncio.run(main())
