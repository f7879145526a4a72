"""Each limit of a container, proved in a real one: what it stops, by which name a command learns of it, what comes after."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import socket
import time
import uuid

import pytest

from harness.errors import SandboxError
from harness.protocols import Sandbox
from harness.sandboxes import docker_monitor, shell
from harness.sandboxes.docker_sandbox import DISK_KILLS
from harness.sandboxes.process import start_time
from tests.contracts.sandbox_support import COMMAND_S, TASK, an_engine, containers_of, needs_docker, ok, play, started

pytestmark = [pytest.mark.timeout(180), needs_docker]


def python(script: str) -> str:
    """A command that runs the script."""
    return f"python3 -c {shlex.quote(script)}"


def test_the_container_is_locked_down() -> None:
    async def story(sandbox: Sandbox) -> None:
        status = dict(line.split(":\t", 1) for line in (await ok(sandbox, "cat /proc/self/status")).splitlines())
        for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[capabilities], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        for forbidden in ("mount -t tmpfs x /mnt", "chown 1 /etc/passwd", "mknod x b 8 0"):
            assert (await sandbox.exec(forbidden, timeout_s=COMMAND_S)).exit_code != 0
        assert "bash" in await ok(sandbox, "kill -9 1; kill -9 -1; cat /proc/1/cmdline | tr '\\0' ' '")

    play("docker", story)


def test_the_network_is_off_also_towards_the_bridge() -> None:
    with an_engine() as engine:
        bridge = engine.api.inspect_network("bridge")["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")

    async def story(sandbox: Sandbox) -> None:
        try:
            listener = socket.create_server((bridge, 0))
        except OSError:
            pytest.skip(f"this machine has no {bridge}: the engine is elsewhere")
        with listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()  # it can be reached from here
            connect = f"import socket; socket.create_connection({listener.getsockname()!r}, timeout=5)"
            result = await sandbox.exec(python(connect), timeout_s=COMMAND_S)
        assert result.exit_code == 1
        assert "unreachable" in result.output
        assert await ok(sandbox, "ls /sys/class/net") == "lo\n"

    play("docker", story)


def test_labels_and_limits_as_the_engine_sees_them() -> None:
    async def main() -> None:
        run_id = f"test-{uuid.uuid4().hex[:8]}"
        async with started("docker", run_id, memory_mb=256, pids=77, cpus=0.5, file_mb=3, deadline_s=1000) as provider:
            await provider.acquire(TASK)
            with an_engine() as engine:
                (container,) = containers_of(run_id)
                found = engine.api.inspect_container(container)
        labels, host = found["Config"]["Labels"], found["HostConfig"]
        assert labels["sao.run"] == run_id
        assert labels["sao.host"] == socket.gethostname()
        assert labels["sao.owner"] == f"{os.getpid()}:{start_time(os.getpid())}"
        assert labels["sao.episode"].startswith(f"{TASK.id}#")
        assert 0 <= time.time() + 2000 - int(labels["sao.deadline"]) < 60
        assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (256 << 20, 256 << 20, 77)
        assert (host["NanoCpus"], host["Ulimits"]) == (500_000_000, [{"Name": "fsize", "Hard": 3 << 20, "Soft": 3 << 20}])

    asyncio.run(main())


def test_memory_by_name_and_the_episode_goes_on() -> None:
    hungry = python("bytearray(300 << 20)")

    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "kept=1")
        result = await sandbox.exec(hungry, timeout_s=COMMAND_S)
        assert (result.exit_code, result.killed_by) == (137, "memory")
        behind = await sandbox.exec(f"set -eux; {hungry} || exit 3", timeout_s=COMMAND_S)  # not the last process
        assert (behind.exit_code, behind.killed_by) == (3, "memory")
        await ok(sandbox, "kept=1")
        for other in ("kill -9 $BASHPID", "(kill -9 $BASHPID)", "false", "(exit 137)"):
            assert (await sandbox.exec(other, timeout_s=COMMAND_S)).killed_by == "", other
        assert (await sandbox.exec("x=$(head -c 300000000 /dev/zero | tr '\\0' x)", timeout_s=COMMAND_S)).killed_by == "memory"
        assert await ok(sandbox, "echo usable") == "usable\n"

    play("docker", story, memory_mb=128)


def test_file_size_by_name() -> None:
    async def story(sandbox: Sandbox) -> None:
        big = await sandbox.exec("head -c 3000000 /dev/zero > big", timeout_s=COMMAND_S)
        assert (big.exit_code, big.killed_by) == (153, "file_size")
        assert await ok(sandbox, "stat -c %s big") == f"{1 << 20}\n"

    play("docker", story, file_mb=1)


def test_processes_by_name_and_a_fork_bomb() -> None:
    forks = "import subprocess\nfor n in range(99):\n  subprocess.Popen(['sleep', '5'])\n"

    async def story(sandbox: Sandbox) -> None:
        refused = await sandbox.exec(f"{python(forks)}; code=$?; pkill sleep; (exit $code)", timeout_s=COMMAND_S)
        assert (refused.exit_code, refused.killed_by) == (1, "pids")
        assert (await sandbox.exec("false", timeout_s=COMMAND_S)).killed_by == ""
        bomb = await sandbox.exec("bomb() { bomb | bomb & }; bomb; while cat /etc/hostname >/dev/null; do :; done", timeout_s=3)
        assert bomb.timed_out or bomb.killed_by == "pids", bomb
        stuck = await sandbox.exec("while :; do :; done", timeout_s=1)  # a timeout ends the bomb with everything else
        assert stuck.timed_out
        assert await ok(sandbox, "ps -e --no-headers | wc -l; echo usable") < "9\nusable\n"

    play("docker", story, pids=32)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)
    monkeypatch.setattr(docker_monitor, "GRACE_S", 2.0)


@pytest.mark.usefixtures("watchful")
def test_a_container_over_its_disk_budget() -> None:

    async def story(sandbox: Sandbox) -> None:
        await sandbox.write("kept", b"x")
        for _ in range(DISK_KILLS):
            full = await sandbox.exec("head -c 60000000 /dev/zero > big; sleep 60", timeout_s=COMMAND_S)
            assert (full.exit_code, full.killed_by, full.timed_out) == (137, "disk", False)
            assert "disk budget" in full.output
            assert await ok(sandbox, "rm big; cat kept") == "x"
        full = await sandbox.exec("head -c 60000000 /dev/zero > big; sleep 60", timeout_s=COMMAND_S)
        assert full.killed_by == "disk"
        assert await sandbox.read("kept") == b"x"
        for _ in range(2):  # it stays dead, but the verdict can still be given
            assert (await sandbox.exec("echo never", timeout_s=COMMAND_S)).killed_by == "disk"
        assert await sandbox.read("kept") == b"x"
        await sandbox.write("new/folder/file", b"y")
        assert await sandbox.read("new/folder/file") == b"y"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")

    play("docker", story, disk_mb=40)


@pytest.mark.usefixtures("watchful")
def test_a_disk_filled_in_the_background() -> None:
    async def main() -> None:
        async with started("docker", disk_mb=40) as provider:
            sandbox = await provider.acquire(TASK)
            await ok(sandbox, "(head -c 60000000 /dev/zero > big; sleep 60) & true")
            with an_engine() as engine:
                await engine.call(engine.api.wait, sandbox._container.id, COMMAND_S)
            idle = await sandbox.exec("rm big", timeout_s=COMMAND_S)
            assert (idle.exit_code, idle.killed_by) == (137, "disk")
            assert "did not run" in idle.output
            assert await ok(sandbox, "rm big; echo usable") == "usable\n"

    asyncio.run(main())


@pytest.mark.usefixtures("watchful")
def test_a_container_past_its_deadline_is_removed() -> None:
    async def main() -> None:
        async with started("docker", run_id := f"test-{uuid.uuid4().hex[:8]}", deadline_s=2) as provider:
            sandbox = await provider.acquire(TASK)
            with pytest.raises(SandboxError, match="lost: it was removed at its deadline"):
                await sandbox.exec("sleep 60", timeout_s=COMMAND_S)
            async with sandbox._container.stopping:
                assert not containers_of(run_id)
            with pytest.raises(SandboxError, match="lost: it was removed at its deadline"):
                await sandbox.exec("true", timeout_s=COMMAND_S)

    asyncio.run(main())


def test_orphans_are_reaped() -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(
            sandbox, "for n in 1 2 3 4 5 6 7 8; do (setsid sleep 0.1 &); done; while pgrep -x sleep; do :; done >/dev/null"
        )
        assert await ok(sandbox, "ps -eo stat= | grep -c Z || true") == "0\n"

    play("docker", story)


def test_endless_output_is_drained_in_bounded_memory() -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "true")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood = await sandbox.exec("yes | head -c 100000000; yes", timeout_s=4)
        assert flood.timed_out
        assert flood.output.startswith("y\ny\n")
        assert int(flood.output.partition("[... ")[2].split()[0]) > 50_000_000, "it is drained, not blocked"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
        assert await ok(sandbox, "echo usable") == "usable\n"

    play("docker", story)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("how", ["remove", "stop"])
def test_a_lost_container_is_a_sandbox_error(how: str, idle: bool) -> None:
    async def main() -> None:
        async with started("docker") as provider:
            sandbox = await provider.acquire(TASK)
            await ok(sandbox, "true")
            command = asyncio.ensure_future(sandbox.exec("sleep 60", timeout_s=COMMAND_S)) if not idle else None
            await asyncio.wait([command or asyncio.ensure_future(asyncio.sleep(0))], timeout=0.2)
            with an_engine() as engine:
                await engine.call(getattr(engine, how), sandbox._container.id)
            for _ in range(2):
                with pytest.raises(SandboxError, match="is lost: it was (removed|ended) from outside"):
                    await (command or sandbox.exec("true", timeout_s=COMMAND_S))
                command = None

    asyncio.run(main())


def test_a_timeout_inside_and_one_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(shell, "ALARM_S", 60.0)  # a busy machine must not be taken for a missing alarm
        async with started("docker") as provider:
            sandbox = await provider.acquire(TASK)

            def started_at() -> str:
                with an_engine() as engine:
                    return str(engine.api.inspect_container(sandbox.container_id)["State"]["StartedAt"])

            first = started_at()
            for _ in range(2):
                result = await sandbox.exec("(setsid sleep 63.5 &); trap '' TERM; sleep 63.5", timeout_s=0.5)
                assert (result.exit_code, result.timed_out) == (124, True)
                assert await ok(sandbox, "pgrep -fx 'sleep 63.5' || echo none") == "none\n"
                assert (await sandbox.exec("kill -9 -1; kill -9 $$", timeout_s=COMMAND_S)).exit_code == 137  # also the alarm
            assert started_at() == first, "the alarm in the container has ended them"
            await ok(sandbox, "(exit 3); true")
            monkeypatch.setattr(shell, "ALARM_S", 1.0)
            unarmed = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = 1 ] || [ $p = $$ ] || kill -9 $p; done; sleep 63.5"
            result = await sandbox.exec(unarmed, timeout_s=0.5)
            assert (result.exit_code, result.timed_out) == (124, True)
            assert started_at() != first, "without the alarm it is ended from outside"
            assert await ok(sandbox, "echo usable") == "usable\n"

    asyncio.run(main())
