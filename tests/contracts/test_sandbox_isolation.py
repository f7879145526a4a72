"""What a sandbox keeps in and out, and that nothing of it is left: real processes and real containers."""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from harness.errors import ConfigError, SandboxError
from harness.protocols import Sandbox
from harness.registry import plugin_config
from harness.sandboxes.docker import DockerSandboxes
from tests.contracts.sandbox_support import (
    COMMAND_S,
    PROVIDERS,
    ROOT,
    TASK,
    containers_of,
    every,
    folders_of,
    needs_docker,
    needs_proc,
    ok,
    play,
    processes_of,
    real,
    started,
)

pytestmark = pytest.mark.timeout(180)

# --- isolation -------------------------------------------------------------------------------------------------------


@real
def test_the_network_is_off(kind: str) -> None:
    async def main() -> None:
        async with started(kind) as provider:
            if kind == "process" and not provider._unshare:
                pytest.skip("this kernel refuses a network namespace; the provider says so in its log line")
            sandbox = await provider.acquire(TASK)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                address = listener.getsockname()
                socket.create_connection(address, timeout=5).close()  # it can be reached from here
                connect = f"import socket; socket.create_connection({address!r}, timeout=5)"
                result = await sandbox.exec(f"python3 -c {shlex.quote(connect)}", timeout_s=COMMAND_S)
            assert result.exit_code == 1
            assert "Error" in result.output
            devices = (await ok(sandbox, "tail -n +3 /proc/net/dev")).split()
            assert [word for word in devices if word.endswith(":")] == ["lo:"]

    asyncio.run(main())


def test_the_process_sandbox_hides_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-value")

    async def story(sandbox: Sandbox) -> None:
        names = {line.partition("=")[0] for line in (await ok(sandbox, "env")).splitlines()}
        assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "SAO_SANDBOX", "PWD", "OLDPWD", "SHLVL", "_"}
        assert await ok(sandbox, '[ "$HOME" = "$PWD" ] && echo home') == "home\n"

    play("process", story)


def test_the_process_sandbox_limits_file_size() -> None:
    async def story(sandbox: Sandbox) -> None:
        result = await sandbox.exec("head -c 3000000 /dev/zero > big", timeout_s=COMMAND_S)
        assert result.exit_code != 0
        assert len(await sandbox.read("big")) == 1 << 20

    play("process", story, file_mb=1)


@needs_docker
def test_docker_problems_are_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(**options: Any) -> None:
        async with started("docker", **options):
            pass

    with pytest.raises(ConfigError, match="image localhost:1/sao-missing:none is missing") as caught:
        asyncio.run(start(image="localhost:1/sao-missing:none"))
    assert "docker image inspect" in caught.value.hint
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ConfigError, match="Docker cannot be reached at unix:///nowhere/docker.sock") as caught:
        asyncio.run(start())
    assert caught.value.hint == "install and start it, or set sandbox.id=process"
    assert DockerSandboxes.reap(None) == 0, "no engine: nothing to remove"
    with pytest.raises(ConfigError, match="Docker cannot be reached at tcp://127.0.0.1:9") as caught:
        asyncio.run(start(engines=["tcp://127.0.0.1:9"]))
    assert "docker -H tcp://127.0.0.1:9 info" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"engines": ["http://x"]}, "none of unix:///path, tcp://host:port, ssh://user@host"),
        ({"engines": ["tcp://"]}, "none of unix:///path"),
        ({"engines": ["unix:///a", "unix:///a"]}, "named twice"),
        ({"memory_budget_mb": 1000, "memory_mb": 2048}, "less than one container's memory_mb"),
        ({"disk_budget_mb": 1000}, "less than one container's disk_mb"),
        ({"warm": 3, "max_containers": 2}, "more than the 2 containers"),
        ({"warm": 3, "memory_budget_mb": 4096}, "more than the 2 containers"),
    ],
)
def test_a_wrong_docker_option_is_one_message(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plugin_config("sandbox", {"id": "docker", **options})


# --- nothing is left -------------------------------------------------------------------------------------------------


@every
def test_close_twice_and_use_after_close(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await sandbox.write("file", b"x")
        await sandbox.close()
        await sandbox.close()
        for use in (sandbox.exec("true", timeout_s=1), sandbox.read("file"), sandbox.write("file", b"")):
            with pytest.raises(SandboxError):
                await use

    play(kind, story)


@needs_proc
def test_a_closed_process_sandbox_leaves_nothing() -> None:
    async def main() -> None:
        async with started("process", run_id := f"test-{uuid.uuid4().hex[:8]}") as provider:
            one, two = await provider.acquire(TASK), await provider.acquire(TASK)
            for sandbox in (one, two):
                await ok(sandbox, "(setsid sleep 99 &); nohup sleep 99 & mkdir locked; touch locked/x; chmod 0 locked")
            assert len(processes_of(f"SAO_SANDBOX=sao-{run_id}-")) >= 8
            await one.close()
            assert not processes_of(f"SAO_SANDBOX={one._label}\0")
            assert processes_of(f"SAO_SANDBOX={two._label}\0")
            assert not one._folder.exists()
            assert two._folder.exists()
        assert not processes_of(f"SAO_SANDBOX=sao-{run_id}-")
        assert not folders_of(run_id)

    asyncio.run(main())


@needs_docker
def test_a_closed_container_leaves_nothing() -> None:
    async def main() -> None:
        async with started("docker", run_id := f"test-{uuid.uuid4().hex[:8]}") as provider:
            one, _ = await provider.acquire(TASK), await provider.acquire(TASK)
            await ok(one, "sleep 99 & true")
            await one.close()
            assert len(containers_of(run_id)) == 1
            starting = asyncio.ensure_future(provider.acquire(TASK))
            await asyncio.wait([starting], timeout=0.05)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert len(containers_of(run_id)) == 1
        assert not containers_of(run_id)

    asyncio.run(main())


OWNER = """
import asyncio, sys
from harness.task import Task
from tests.contracts.test_sandboxes import started
async def main():
    async with started(sys.argv[1], sys.argv[2]) as provider:
        sandbox = await provider.acquire(Task(id="t", messages=()))
        await sandbox.exec("(setsid sleep 99 &); true", timeout_s=30)
        print("ready", flush=True)
        await asyncio.wait_for(asyncio.Event().wait(), 60)
asyncio.run(main())
"""


@real
@needs_proc
@pytest.mark.parametrize("by_name", [False, True])
def test_reap_finds_what_a_killed_owner_left(kind: str, by_name: bool) -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    left: Callable[[], bool] = {
        "process": lambda: bool(folders_of(run_id) or processes_of(f"SAO_SANDBOX=sao-{run_id}-")),
        "docker": lambda: bool(containers_of(run_id)),
    }[kind]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, run_id], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        PROVIDERS[kind].reap(None)
        assert left(), "a living owner's sandboxes are not reaped"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert left()
    assert PROVIDERS[kind].reap(run_id if by_name else None) >= 1
    assert not left()


@real
def test_eight_at_once(kind: str) -> None:
    async def main() -> None:
        async with started(kind) as provider:

            async def episode(number: int) -> str:
                sandbox = await provider.acquire(TASK)
                await sandbox.write("number", str(number).encode())
                outputs = [await ok(sandbox, f"cat number; echo ' {turn}'") for turn in range(5)]
                await sandbox.close()
                return "".join(outputs)

            results = await asyncio.gather(*(episode(number) for number in range(8)))
            assert results == ["".join(f"{number} {turn}\n" for turn in range(5)) for number in range(8)]

    asyncio.run(main())
