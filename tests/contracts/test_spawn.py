"""Programs beside the shell, with pipes and with a terminal: real processes and real containers."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
import uuid
from typing import Any

import pytest

from harness.errors import SandboxError
from harness.protocols import ByteStream, Sandbox
from harness.sandboxes import docker_monitor
from harness.sandboxes.docker_program import Program
from harness.sandboxes.shell import KILLED
from tests.contracts.sandbox_support import (
    COMMAND_S,
    SOCKET,
    TASK,
    Proxy,
    an_engine,
    containers_of,
    folders_of,
    needs_docker,
    ok,
    play,
    processes_of,
    real,
    started,
)

pytestmark = pytest.mark.timeout(180)

SH = ("bash", "-c")


async def everything(stream: ByteStream) -> bytes:
    """What a program says until its end."""
    said = b""
    async with asyncio.timeout(COMMAND_S):
        while data := await stream.read():
            said += data
    return said


async def until_said(stream: ByteStream, text: bytes) -> bytes:
    """What a program says until it has said the text."""
    said = b""
    async with asyncio.timeout(COMMAND_S):
        while text not in said:
            data = await stream.read()
            assert data, f"ended after {said!r}"
            said += data
    return said


async def fails_to_write(stream: ByteStream) -> None:
    """Writing after the end is a `ConnectionError`, sooner or later."""

    async def write() -> None:
        while True:
            await stream.write(b"x" * 1000)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(write(), COMMAND_S)


# --- pipes -----------------------------------------------------------------------------------------------------------


@real
def test_bytes_go_both_ways(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 10 + random.Random(1).randbytes(1_000_000)
        cat = await sandbox.spawn(("cat",))
        sending = asyncio.ensure_future(cat.write(data))
        said = b""
        async with asyncio.timeout(COMMAND_S):
            while len(said) < len(data):
                said += await cat.read()
            await sending
        assert hashlib.sha256(said).digest() == hashlib.sha256(data).digest()
        await cat.close()
        await cat.close()
        assert await everything(cat) == b""
        await fails_to_write(cat)

    play(kind, story)


@real
def test_where_and_how_a_program_runs(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        folder = (await ok(sandbox, "pwd; cd /")).strip()
        words = ("printf", "<%s>", "a b", "", "$HOME\n", "'\"\\")
        assert await everything(await sandbox.spawn(words)) == b"<a b><><$HOME\n><'\"\\>"
        script = "pwd; echo $HOME $TMPDIR; ulimit -f; echo err >&2; test -t 0 || echo no terminal; echo ${TERM-none}"
        said = (await everything(await sandbox.spawn((*SH, script)))).decode().splitlines()
        shell = (await ok(sandbox, "echo $HOME $TMPDIR; ulimit -f")).splitlines()
        assert said[:-1] == [folder, *shell, "err", "no terminal"]
        assert said[-1] in ("none", "dumb")
        missing = await sandbox.spawn(("no_such_program",))
        assert b"no_such_program: not found" in await everything(missing)
        await ok(sandbox, f"rm -rf {folder}")
        assert await everything(await sandbox.spawn(("pwd",))) == folder.encode() + b"\n"

    play(kind, story)


@real
def test_the_end_of_a_program(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        short = await sandbox.spawn((*SH, "printf done; exit 3"))
        assert await everything(short) == b"done"
        assert await short.read() == b""
        await fails_to_write(short)
        await short.close()
        killed = await sandbox.spawn((*SH, "printf done; kill -9 $$"))
        assert await everything(killed) == b"done"

    play(kind, story)


@real
def test_closing_kills_what_is_in_the_session(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        for tty in (False, True):
            script = "trap '' TERM HUP INT; echo ready; sleep 64.5 & (sleep 64.5) & (setsid sleep 64.6 &); wait; sleep 64.5"
            program = await sandbox.spawn((*SH, script), tty=tty)
            reading = asyncio.ensure_future(until_said(program, b"never"))
            beside = await sandbox.spawn(("cat",))
            await ok(sandbox, "until [ $(pgrep -fx 'sleep 64.5' | wc -l) = 2 ]; do :; done")
            await program.close()
            with pytest.raises(AssertionError, match="ready"):
                await reading
            assert await ok(sandbox, "pgrep -fx 'sleep 64.5' || echo none") == "none\n"
            await beside.write(b"alive")
            assert await until_said(beside, b"alive")

    play(kind, story)


@real
def test_many_at_the_same_time_as_commands(kind: str) -> None:
    async def echo(sandbox: Sandbox, index: int) -> None:
        program = await sandbox.spawn(("cat", "-u", "--", "-"), tty=index % 2 == 0)
        for n in range(20):
            await program.write(b"%d:%d\n" % (index, n))
            await until_said(program, b"%d:%d" % (index, n))
        await program.close()

    async def story(sandbox: Sandbox) -> None:
        long = asyncio.ensure_future(ok(sandbox, "read x < <(sleep 1); echo done"))
        await asyncio.gather(*(echo(sandbox, index) for index in range(6)))
        assert await long == "done\n"
        assert await ok(sandbox, "pgrep -fx 'cat -u -- -' || echo none") == "none\n"

    play(kind, story)


# --- terminals -------------------------------------------------------------------------------------------------------


@real
def test_a_terminal_is_one(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        script = (
            'test -t 0 && test -t 1 && test -t 2 && stty rows 33 cols 44 && stty size && echo "$TERM" && echo own > /dev/tty; '
            "set -- $(cut -d')' -f2 /proc/$$/stat); [ $4 = $$ ] && [ $6 = $$ ] && echo leads its session in the foreground"
        )
        terminal = await sandbox.spawn((*SH, script), tty=True)
        assert (await everything(terminal)).replace(b"\r", b"") == (
            b"33 44\nxterm-256color\nown\nleads its session in the foreground\n"
        )
        await fails_to_write(terminal)
        reader = await sandbox.spawn((*SH, "trap 'echo interrupted' INT; echo ready; read x; read x; echo got $x"), tty=True)
        await until_said(reader, b"ready")
        await reader.write(b"\x03one\n")
        await until_said(reader, b"interrupted")
        await reader.write(b"two\n")
        await until_said(reader, b"got")
        await everything(reader)
        cat = await sandbox.spawn(("cat",), tty=True)
        await cat.write(b"text\n\x04")
        assert (await everything(cat)).replace(b"\r", b"").startswith(b"text\n")

    play(kind, story)


@real
def test_the_last_words_in_a_terminal_are_heard(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        for _ in range(10):
            program = await sandbox.spawn((*SH, "seq 1 3000; printf last"), tty=True)
            said = (await everything(program)).replace(b"\r", b"")
            assert said == b"".join(b"%d\n" % n for n in range(1, 3001)) + b"last"

    play(kind, story)


# --- when more than the program ends ---------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("tty", [False, True])
def test_a_timeout_of_a_command_ends_programs(kind: str, tty: bool) -> None:
    async def story(sandbox: Sandbox) -> None:
        program = await sandbox.spawn(("sleep", "65.5"), tty=tty)
        reading = asyncio.ensure_future(everything(program))
        assert (await sandbox.exec("sleep 65.5", timeout_s=0.5)).timed_out
        assert await reading == b""
        await fails_to_write(program)
        await program.close()
        assert await everything(await sandbox.spawn(("echo", "again"))) == b"again\n"

    play(kind, story)


@real
def test_programs_die_with_the_sandbox_and_nothing_is_left(kind: str) -> None:
    async def main() -> None:
        run_id = f"test-{uuid.uuid4().hex[:8]}"
        async with started(kind, run_id) as provider:
            sandbox = await provider.acquire(TASK)
            for tty in (False, True):
                program = await sandbox.spawn((*SH, "(setsid sleep 66.5 &); trap '' HUP; sleep 66.5"), tty=tty)
                reading = asyncio.ensure_future(everything(program))
            await asyncio.wait([reading], timeout=0.1)
            await sandbox.close()
            assert await reading == b""
            await program.close()
            with pytest.raises(SandboxError):
                await sandbox.spawn(("true",))
        assert not processes_of(f"sao-{run_id}")
        assert not folders_of(run_id)
        if kind == "docker":
            assert not containers_of(run_id)

    asyncio.run(main())


@real
def test_closed_programs_leave_no_descriptors(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        async def some(count: int) -> int:
            for index in range(count):
                program = await sandbox.spawn(("cat",), tty=index % 2 == 0)
                await program.close()
                assert await everything(program) == b""
            await ok(sandbox, "true")  # the event loop closes transports a little later
            gc.collect()  # so does the engine's SDK
            return len(os.listdir("/dev/fd"))

        first = await some(2)
        assert await some(10) <= first + 3

    play(kind, story)


def test_memory_runs_no_programs() -> None:
    async def story(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match="run no programs") as caught:
            await sandbox.spawn(("cat",))
        assert "sandbox.id" in caught.value.hint

    play("memory", story)


@needs_docker
@pytest.mark.parametrize("how", ["remove", "stop"])
def test_a_lost_container_is_a_sandbox_error(how: str) -> None:
    async def main() -> None:
        async with started("docker") as provider:
            sandbox = await provider.acquire(TASK)
            program = await sandbox.spawn(("cat",), tty=True)
            reading = asyncio.ensure_future(program.read())
            with an_engine() as engine:
                await engine.call(getattr(engine, how), sandbox.container_id)
            for attempt in (reading, sandbox.spawn(("true",)), sandbox.exec("true", timeout_s=COMMAND_S)):
                with pytest.raises(SandboxError, match="is lost: it was (removed|ended) from outside"):
                    await asyncio.wait_for(attempt, COMMAND_S)
            await program.close()

    asyncio.run(main())


@needs_docker
@pytest.mark.parametrize("first", ["spawn", "exec"])
def test_a_container_that_died_of_memory_is_no_loss(first: str) -> None:
    """The kernel has killed in it for its memory limit, and at last its first process: that was the policy's doing."""

    async def main() -> None:
        async with started("docker", memory_mb=64) as provider:
            sandbox = await provider.acquire(TASK)
            await sandbox.write("file", b"kept")
            assert await everything(await sandbox.spawn(("python3", "-c", "bytearray(300 << 20)"))) == b""
            with an_engine() as engine:
                await engine.call(engine.stop, sandbox.container_id)
            if first == "spawn":
                assert await everything(await sandbox.spawn(("cat", "file"))) == b"kept"
            result = await sandbox.exec("cat file", timeout_s=COMMAND_S)
            assert result.output.startswith("kept")
            assert "new shell" in result.output

    asyncio.run(main())


@needs_docker
@pytest.mark.parametrize("times", [1, 2])
def test_where_nothing_can_be_started_room_is_made(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    start = Program.start
    left = times

    async def failing(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        return SandboxError("no program could be started") if left >= 0 else await start(*arguments)

    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "echo kept > file; (setsid sleep 67.5 &)")
        beside = await sandbox.spawn(("cat",))
        monkeypatch.setattr(Program, "start", failing)
        if times == 1:
            assert await everything(await sandbox.spawn(("cat", "file"))) == b"kept\n"
        else:
            with pytest.raises(SandboxError, match="no program could be started"):
                await sandbox.spawn(("cat", "file"))
        assert await everything(beside) == b""
        left = (await sandbox.exec("cat file; pgrep -fx 'sleep 67.5' || echo none", timeout_s=COMMAND_S)).output
        assert left.startswith("kept\nnone\n") and "new shell" in left

    play("docker", story)


@needs_docker
def test_a_lost_connection_is_a_sandbox_error() -> None:
    async def main() -> None:
        await (proxy := Proxy(SOCKET)).start()
        try:
            async with started("docker", engines=[f"tcp://127.0.0.1:{proxy.port}"]) as provider:
                sandbox = await provider.acquire(TASK)
                program = await sandbox.spawn(("sleep", "69.5"), tty=True)
                reading = asyncio.ensure_future(program.read())
                await asyncio.wait([reading], timeout=0.1)
                proxy.cut()
                with pytest.raises(SandboxError, match="lost its connection"):
                    await asyncio.wait_for(reading, COMMAND_S)
                await fails_to_write(program)
                await program.close()
                assert (await ok(sandbox, "pgrep -fx 'sleep 69.5' || echo none")).startswith("none\n")
                assert await everything(await sandbox.spawn(("echo", "again"))) == b"again\n"
        finally:
            await proxy.stop()

    asyncio.run(main())


@needs_docker
def test_a_container_over_its_disk_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)

    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "echo kept > file")
        filling = await sandbox.spawn((*SH, "head -c 30000000 /dev/zero > big; sleep 68.5"), tty=True)
        assert await everything(filling) == b""
        refused = await sandbox.spawn(("true",))
        assert await everything(refused) == f"[{KILLED['disk']}; this program did not run]\n".encode()
        await fails_to_write(refused)
        await refused.close()
        assert await everything(await sandbox.spawn((*SH, "rm big; cat file"))) == b"kept\n"
        assert await ok(sandbox, "echo usable") == "usable\n"

    play("docker", story, disk_mb=8)
