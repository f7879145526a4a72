"""The pool of containers against a real engine: ready ones, budgets, several engines, connections that break, reaping."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, SandboxError
from harness.sandboxes import docker_engine, docker_monitor
from harness.sandboxes.docker_config import WARM, DockerConfig
from harness.task import Task
from tests.contracts.sandbox_support import (
    COMMAND_S,
    IMAGE,
    ROOT,
    SOCKET,
    TASK,
    Proxy,
    an_engine,
    containers_of,
    needs_docker,
    ok,
    started,
    until,
)
from tests.contracts.test_sandbox_isolation import OWNER

pytestmark = [pytest.mark.timeout(180), needs_docker]


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def other_image() -> Iterator[str]:
    """The same image under another name."""
    name, tag = "sao-test", f"other-{uuid.uuid4().hex[:8]}"
    with an_engine() as engine:
        engine.api.tag(IMAGE, name, tag)
        yield f"{name}:{tag}"
        engine.api.remove_image(f"{name}:{tag}")


# --- ready containers and budgets ------------------------------------------------------------------------------------


def test_without_a_default_image_every_task_names_its_own(run_id: str) -> None:
    async def main() -> None:
        async with started("docker", run_id, warm=1, image="") as provider:
            (pool,) = provider._fleet.pools
            assert not pool.filling and not pool.ready, "nothing to make ready"
            with pytest.raises(SandboxError, match="names no image") as caught:
                await provider.acquire(replace(TASK, image=None))
            assert "sandbox.image" in str(caught.value.hint)
            assert await ok(await provider.acquire(replace(TASK, image=IMAGE)), "echo here") == "here\n"

    asyncio.run(main())


def test_a_ready_container_is_taken_and_another_made_ready(run_id: str) -> None:
    async def main() -> None:
        async with started("docker", run_id, warm=2) as provider:
            (pool,) = provider._fleet.pools
            await until(provider, lambda: len(pool.ready) == 2)
            ready = {container.id for container in pool.ready}
            with an_engine() as engine:
                labels = [container["Labels"] for container in engine.find(f"sao.run={run_id}")]
            assert [found["sao.episode"] for found in labels] == [WARM, WARM]
            began = time.monotonic()
            one, two = await provider.acquire(TASK), await provider.acquire(TASK)
            assert time.monotonic() - began < 0.1, "no engine call"
            assert {one._container.id, two._container.id} == ready
            assert await ok(one, "touch mine; ls") == "mine\n"
            assert await ok(two, "ls") == ""
            await until(provider, lambda: len(pool.ready) == 2)
            assert not ready & {container.id for container in pool.ready}
            assert len(containers_of(run_id)) == 4
            await one.close()
        assert not containers_of(run_id)

    asyncio.run(main())


def test_a_ready_container_that_died_is_not_handed_out(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with started("docker", run_id, warm=1) as provider:
            (pool,) = provider._fleet.pools
            await until(provider, lambda: len(pool.ready) == 1)
            dead = pool.ready[0]
            with an_engine() as engine:
                await engine.call(engine.stop, dead.id)
            assert await dead.stream.read() == b""
            await docker_monitor.check(pool, provider._config)
            await until(provider, lambda: len(pool.ready) == 1)
            with an_engine() as engine:
                await engine.call(engine.stop, pool.ready[0].id)
            assert await pool.ready[0].stream.read() == b""
            assert await ok(await provider.acquire(TASK), "echo alive") == "alive\n"

    asyncio.run(main())


def test_no_engine_holds_more_than_its_budget(run_id: str, other_image: str) -> None:
    async def main() -> None:
        budget = {"memory_mb": 256, "memory_budget_mb": 700}  # 2 containers
        async with started("docker", run_id, warm=2, deadline_s=60, **budget) as provider:
            (pool,) = provider._fleet.pools
            await until(provider, lambda: len(pool.ready) == 2)
            one = await provider.acquire(Task("other", (), image=other_image))  # a ready one gives way
            assert len(containers_of(run_id)) == 2
            two = await provider.acquire(TASK)
            waiting = asyncio.ensure_future(provider.acquire(TASK))
            beside = await two.fresh()  # or episodes that judge would wait for each other
            assert len(containers_of(run_id)) == 3
            also = asyncio.ensure_future(one.fresh())
            await beside.close()
            assert await ok(await also, "echo second") == "second\n"
            assert not waiting.done()
            for sandbox in (await also, one, two):
                await sandbox.close()
            assert await ok(await waiting, "echo third") == "third\n"
            await until(provider, lambda: len(pool.ready) == 1)
            assert len(containers_of(run_id)) == 2

    asyncio.run(main())


def test_waiting_for_a_place_ends() -> None:
    async def main() -> None:
        async with started("docker", max_containers=1, deadline_s=3) as provider:
            await provider.acquire(TASK)
            provider._fleet._wait_s = 0.2
            with pytest.raises(SandboxError, match="no container became free within 0.2 s; 1 are in use") as caught:
                await provider.acquire(TASK)
            assert "sandbox.max_containers" in caught.value.hint

    asyncio.run(main())


def test_starts_at_a_time_are_bounded_and_cancelled_ones_leak_nothing(run_id: str) -> None:
    async def main() -> None:
        async with started("docker", run_id, starts=2, max_containers=8) as provider:
            (pool,) = provider._fleet.pools
            boot, running, most = pool.engine.boot, 0, 0

            def counted(container: dict[str, Any]) -> str:
                nonlocal running, most
                running, most = running + 1, max(most, running + 1)
                try:
                    return boot(container)
                finally:
                    running -= 1

            pool.engine.boot = counted
            asked = [asyncio.ensure_future(provider.acquire(TASK)) for _ in range(6)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for request in asked:
                request.cancel()
            await asyncio.wait(asked)
            got = [request.result() for request in asked if not request.cancelled()]
            assert most == 2
            assert pool.busy == len(got) == len(containers_of(run_id)) < 6
            for sandbox in got:
                await sandbox.close()
            assert (pool.busy, containers_of(run_id)) == (0, [])

    asyncio.run(main())


def test_the_budgets_together() -> None:
    assert DockerConfig().capacity is None
    assert DockerConfig(max_containers=5).capacity == 5
    assert DockerConfig(max_containers=5, memory_budget_mb=4096).capacity == 2
    assert DockerConfig(max_containers=5, memory_budget_mb=4096, disk_budget_mb=8192).capacity == 1


# --- several engines, and connections that break ---------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "AGAIN_S", 0.5)


async def ended(sandbox: Any) -> None:
    """Wait until the end of the sandbox's stream has arrived here."""
    try:
        async with asyncio.timeout(COMMAND_S):
            assert await sandbox._container.stream.read() == b""
    except ConnectionError:
        pass


@pytest.mark.usefixtures("impatient")
def test_two_engines_share_and_one_takes_over(run_id: str) -> None:
    async def main() -> None:
        await (proxy := Proxy(SOCKET)).start()
        try:
            engines = [f"unix://{SOCKET}", f"tcp://127.0.0.1:{proxy.port}"]
            async with started("docker", run_id, engines=engines, max_containers=5) as provider:
                here, there = provider._fleet.pools
                sandboxes = [await provider.acquire(TASK) for _ in range(4)]
                assert (here.busy, there.busy) == (2, 2)
                far = next(sandbox for sandbox in sandboxes if sandbox._engine is there.engine)
                assert await ok(far, "echo far") == "far\n"
                await proxy.stop()
                await ended(far)
                for _ in range(2):  # the second would go there, where there is more room
                    assert (await provider.acquire(TASK))._engine is here.engine
                with pytest.raises(SandboxError, match=r"is lost: its engine tcp://127.0.0.1:\d+ does not answer"):
                    await far.exec("true", timeout_s=COMMAND_S)
                assert there.rank(IMAGE) > here.rank(IMAGE), "an engine that failed comes last, though it has more room"
                await proxy.start()
                assert await ok(far, "echo back") == (
                    "back\n\n[the connection was lost and made again: this command ran in a new shell, without variables]\n"
                )
        finally:
            await proxy.stop()
        assert not containers_of(run_id)

    asyncio.run(main())


def test_a_lost_connection_loses_nothing_that_was_idle(run_id: str) -> None:
    async def main() -> None:
        await (proxy := Proxy(SOCKET)).start()
        try:
            async with started("docker", run_id, engines=[f"tcp://127.0.0.1:{proxy.port}"], warm=1) as provider:
                (pool,) = provider._fleet.pools
                sandbox = await provider.acquire(TASK)
                await ok(sandbox, "mkdir sub; cd sub; echo kept > file; variable=1; (setsid sleep 97 &)")
                proxy.cut()
                await ended(sandbox)
                again = await ok(sandbox, 'cat file; pwd; echo "[${variable-}]"; pgrep -fx "sleep 97" | wc -l')
                assert again.startswith("kept\n/sandbox/sub\n[]\n1\n")
                assert "the connection was lost" in again
                assert await ok(sandbox, "echo as before") == "as before\n"
                proxy.cut()
                await ended(sandbox)
                assert await sandbox.read("sub/file") == b"kept\n"
                # A command that kills the second supervisor loses the shell, not the episode.
                killed = await sandbox.exec("kill -9 $PPID; sleep 60", timeout_s=COMMAND_S)
                assert (killed.exit_code, killed.killed_by) == (137, "")
                assert await ok(sandbox, "cat file") == "kept\n"
                command = asyncio.ensure_future(sandbox.exec("sleep 60", timeout_s=COMMAND_S))
                await asyncio.wait([command], timeout=0.2)
                proxy.cut()
                with pytest.raises(SandboxError, match="lost its connection while a command ran"):
                    await command
                await until(provider, lambda: len(pool.ready) == 1)
        finally:
            await proxy.stop()

    asyncio.run(main())


SSH = """#!{python}
import asyncio, os, sys
words = sys.argv[1:]
assert "BatchMode=yes" in words and words[-2:] == ["user@host", "echo ready; exec cat"], words
here, _, there = words[words.index("-L") + 1].partition(":")
if os.environ.get("SSH_REFUSES"):
    sys.exit("Permission denied (publickey).")
if os.path.exists(here):
    os.unlink(here)
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
async def serve(reader, writer):
    back, forth = await asyncio.open_unix_connection(there)
    await asyncio.gather(copy(reader, forth), copy(back, writer))
async def main():
    await asyncio.start_unix_server(serve, here)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)
asyncio.run(main())
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of this machine's engine through a stand-in for `ssh` that forwards like it."""
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return f"ssh://user@host{SOCKET}"


def test_an_engine_through_ssh(ssh: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with started("docker", run_id, engines=[ssh]) as provider:
            sandbox = await provider.acquire(TASK)
            await sandbox.write("file", b"x" * 100_000)
            tunnel = provider._fleet.pools[0].engine._tunnel
            tunnel._ssh.kill()
            tunnel._ssh.wait()
            await ended(sandbox)
            assert (await ok(sandbox, "wc -c < file")).startswith("100000\n")
            folder = tunnel.socket.parent
        assert not folder.exists()
        assert not containers_of(run_id)
        monkeypatch.setenv("SSH_REFUSES", "1")
        with pytest.raises(ConfigError, match=r"Permission denied \(publickey\)") as caught:
            async with started("docker", run_id, engines=[ssh]):
                pass
        assert caught.value.hint == "`ssh -o BatchMode=yes user@host true` must work"

    asyncio.run(main())


# --- reaping ---------------------------------------------------------------------------------------------------------


def test_a_running_harness_reaps_what_dead_ones_left(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)
    monkeypatch.setattr(docker_monitor, "REAP_EVERY", 1)

    async def main() -> None:
        async with started("docker") as provider:
            living = await provider.acquire(TASK)
            owner = await asyncio.create_subprocess_exec(
                sys.executable, "-c", OWNER, "docker", run_id, cwd=ROOT, stdout=subprocess.PIPE
            )
            assert owner.stdout is not None
            assert await owner.stdout.readline() == b"ready\n"
            (left,) = containers_of(run_id)
            with an_engine() as engine:
                removed = asyncio.ensure_future(engine.call(engine.api.wait, left, COMMAND_S, "removed"))
                await asyncio.wait([removed], timeout=0.5)
                assert not removed.done(), "its owner lives"
                owner.send_signal(signal.SIGKILL)
                await owner.wait()
                await removed
            assert not containers_of(run_id)
            assert await ok(living, "echo alive") == "alive\n"

    asyncio.run(main())


def test_a_container_past_its_deadline_is_reaped_whoever_owns_it(run_id: str) -> None:
    with an_engine() as engine:
        for run, deadline in ((run_id, time.time() - 10), (f"{run_id}-later", time.time() + 600)):
            arguments = DockerConfig(image=IMAGE).container(IMAGE, "/", run, "t")
            arguments["labels"] |= {"sao.host": "elsewhere", "sao.deadline": f"{deadline:.0f}"}
            engine.boot(arguments)
        engine.reap(None)
        assert not engine.find(f"sao.run={run_id}")
        assert engine.reap(f"{run_id}-later") == 1
