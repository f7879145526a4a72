"""One suite for all sandboxes: real processes and real containers (and memory, where it can take part)."""

from __future__ import annotations

import asyncio
import errno
import statistics
import sys
import time
from pathlib import Path

import pytest

from environments.toy_repair.tasks import HIDDEN_CASES, make_task
from harness.errors import SandboxError
from harness.protocols import ExecResult, Sandbox
from harness.sandboxes import docker_sandbox, process
from tests.contracts.sandbox_support import (
    COMMAND_S,
    TASK,
    every,
    needs_docker,
    needs_proc,
    ok,
    play,
    real,
    started,
)

pytestmark = pytest.mark.timeout(180)

# --- commands --------------------------------------------------------------------------------------------------------


@real
def test_state_persists_and_exit_codes_are_exact(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        assert await ok(sandbox, "cd / && export A='x y' && f() { echo f; }") == ""
        assert await ok(sandbox, 'pwd; echo "$A"; f') == "/\nx y\nf\n"
        assert (await sandbox.exec("false", timeout_s=COMMAND_S)).exit_code == 1
        assert (await sandbox.exec("(exit 42)", timeout_s=COMMAND_S)).exit_code == 42
        assert (await sandbox.exec("no_such_command", timeout_s=COMMAND_S)).exit_code == 127
        assert await ok(sandbox, "printf 'no newline'; printf ' err' >&2") == "no newline err"
        assert await ok(sandbox, "") == ""

    play(kind, story)


@real
def test_any_text_is_safe(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        result = await sandbox.exec("echo 'unbalanced", timeout_s=COMMAND_S)
        assert result.exit_code != 0
        assert "unexpected EOF" in result.output
        assert await ok(sandbox, "cat <<'X'\n$HOME `id` \"quoted\"\nX\necho after") == '$HOME `id` "quoted"\nafter\n'
        assert "it" in await ok(sandbox, "cat <<X\nit\n")  # never ended
        assert await ok(sandbox, "cat; read line; echo eof") == "eof\n"
        assert await ok(sandbox, "echo back # comment") == "back\n"
        assert await ok(sandbox, "exec >/dev/null 2>&1; echo hidden") == ""
        assert await ok(sandbox, "printf '\\xff\\n'") == "\ufffd\n"
        assert (await sandbox.exec("echo \0", timeout_s=COMMAND_S)).exit_code == 126
        assert await ok(sandbox, "echo '\ud800'") == "?\n"
        assert await ok(sandbox, "set -eux") == ""
        assert await ok(sandbox, "echo still here") == "++ echo still here\nstill here\n"

    play(kind, story)


@real
@pytest.mark.parametrize("how", ["exit 3", "trap 'true' EXIT; exit 3", "sleep 60 & exit 3", "exec bash -c 'exit 3'"])
def test_a_command_that_ends_the_shell(kind: str, how: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "cd /; gone=1")
        began = time.monotonic()
        result = await sandbox.exec(f"echo before; {how}", timeout_s=COMMAND_S)
        assert time.monotonic() - began < COMMAND_S / 2
        assert result.exit_code == 3
        assert not result.timed_out
        assert result.output.startswith("before\n")
        assert "the shell exited" in result.output
        assert await ok(sandbox, 'pwd; echo "[${gone-}]"') == "/\n[]\n"

    play(kind, story)


@real
@pytest.mark.parametrize("how", ["kill -9 $$", "kill -9 $PPID; kill -9 $$", "kill 0", "kill -9 0"])
def test_a_command_that_kills_the_shell(kind: str, how: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        result = await sandbox.exec(how, timeout_s=COMMAND_S)
        assert result.exit_code in (137, 143)
        assert "the shell" in result.output
        assert await ok(sandbox, "echo back") == "back\n"

    play(kind, story)


@real
def test_a_timeout_kills_everything_and_tells(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "mkdir -p sub && cd sub && (setsid sleep 61.5 &)")
        result = await sandbox.exec("echo begun; sleep 61.5; echo never > ../after", timeout_s=0.5)
        assert (result.exit_code, result.timed_out) == (124, True)
        assert result.output.startswith("begun\n")
        assert "timed out after 0.5 s" in result.output
        assert "new shell in" in result.output
        left = await ok(sandbox, "basename $PWD; ls ..; ps -eo args | grep -c '[s]leep 61.5' || true")
        assert left == "sub\nsub\n0\n"
        busy = await sandbox.exec("while :; do :; done", timeout_s=0.5)
        assert busy.timed_out
        assert await ok(sandbox, "echo usable") == "usable\n"

    play(kind, story)


@real
def test_a_cancelled_command_does_not_disturb_the_next(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "true")
        command = asyncio.ensure_future(sandbox.exec("echo noise; sleep 62.5", timeout_s=COMMAND_S))
        done, _ = await asyncio.wait([command], timeout=0.3)
        assert not done
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        assert await ok(sandbox, "echo clean; ps -eo args | grep -c '[s]leep 62.5' || true") == "clean\n0\n"

    play(kind, story)


@real
def test_long_output_keeps_head_and_tail(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        output = await ok(sandbox, "echo head; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo tail")
        assert output.startswith("head\nxxx")
        assert output.endswith("xxx\ntail\n")
        assert "bytes left out" in output
        assert len(output) < 70_000
        flood = await sandbox.exec("yes", timeout_s=0.5)
        assert flood.timed_out
        assert len(flood.output) < 70_000
        assert await ok(sandbox, "echo usable") == "usable\n"

    play(kind, story)


@real
def test_background_processes_live_on(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "mkfifo pipe; (read line < pipe; echo got $line > answer) & echo $! > pid")
        await ok(sandbox, "echo hello > pipe; wait $(cat pid)")
        assert await sandbox.read("answer") == b"got hello\n"

    play(kind, story)


@real
def test_latency_of_a_trivial_command(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def story(sandbox: Sandbox) -> None:
        times = []
        for _ in range(201):
            began = time.perf_counter()
            await sandbox.exec("true", timeout_s=COMMAND_S)
            times.append((time.perf_counter() - began) * 1e3)
        cuts = statistics.quantiles(times[1:], n=100)
        with capsys.disabled():
            print(f"\n{kind}: first {times[0]:.1f} ms, p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms")

    play(kind, story)


# --- files -----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
def test_bytes_survive(kind: str, size: int) -> None:
    async def story(sandbox: Sandbox) -> None:
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        for path in ("new/folder/a b'\".bin", "plain"):
            await sandbox.write(path, b"an older and longer text" * 100)
            await sandbox.write(path, data)
            assert await sandbox.read(path) == data
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")

    play(kind, story)


@real
def test_files_do_not_depend_on_the_shell(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "cd /; set -euxC; base64() { echo fake; }; mkdir() { echo fake; }; PATH=/nowhere")
        await sandbox.write("sub/file", b"one")
        await sandbox.write("sub/file", b"two")
        assert await sandbox.read("sub/file") == b"two"

    play(kind, story)


@real
def test_files_that_are_none(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "mkfifo pipe; mkdir folder")
        for path in ("folder", "pipe"):
            with pytest.raises(OSError, match=r"folder|pipe|regular|directory"):
                await sandbox.read(path)
            with pytest.raises(OSError, match=r"folder|pipe|regular|directory"):
                await sandbox.write(path, b"x")

    play(kind, story)


def test_paths_do_not_leave_the_process_sandbox() -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "ln -s /etc out; ln -s /etc/passwd file; ln -s loop loop")
        for path in ("../../x", "/etc/passwd", "out/passwd", "file", "out/new"):
            with pytest.raises(ValueError, match="leads out of the sandbox"):
                await sandbox.read(path)
            with pytest.raises(ValueError, match="leads out of the sandbox"):
                await sandbox.write(path, b"x")
        with pytest.raises(OSError, match="loop"):
            await sandbox.read("loop")

    play("process", story)


@needs_proc
def test_a_full_disk_is_a_sandbox_error_process() -> None:
    with pytest.raises(SandboxError) as caught:
        process._write(Path("/dev/full"), b"x")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "free disk space" in caught.value.hint


FILL_MEMORY = "head -c 70000000 /dev/zero > /dev/shm/fill"


@needs_docker
def test_a_full_disk_is_a_sandbox_error_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_sandbox, "ENGINE_DISK", "/dev/shm")  # a disk that a test can fill

    async def story(sandbox: Sandbox) -> None:
        await sandbox.exec(FILL_MEMORY, timeout_s=COMMAND_S)
        for size in (10_000, 100_000):
            with pytest.raises(SandboxError, match="disk is full"):
                await sandbox.write("/dev/shm/file", b"x" * size)

    play("docker", story)


@needs_docker
def test_what_the_policy_has_filled_is_no_lost_sandbox() -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "ln -s /dev/shm/linked link; mkdir /dev/shm/sub")
        await sandbox.exec(FILL_MEMORY, timeout_s=COMMAND_S)
        for path in ("/dev/shm/file", "/dev/shm/new/folder/file", "/dev/shm/sub/../a b", "link"):
            for size in (10_000, 100_000):
                with pytest.raises(OSError, match="No space left") as caught:
                    await sandbox.write(path, b"x" * size)
                assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, path)
        assert await ok(sandbox, "ls -A /tmp") == "", "nothing is left of big ones"
        await sandbox.write("file", b"x" * 100_000)
        await ok(sandbox, "(while :; do echo No space left on device; done & echo $! > /tmp/noise)")
        for size in (10, 100_000):
            await sandbox.write("file", b"y" * size)
            assert await sandbox.read("file") == b"y" * size
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write("/dev/shm/file", b"x" * 10_000)
        await ok(sandbox, "kill $(cat /tmp/noise)")

    play("docker", story)


@needs_docker
def test_what_looks_like_no_file_is_read_by_the_engine() -> None:
    async def story(sandbox: Sandbox) -> None:
        await sandbox.write("file", data := bytes(range(256)) * 100)
        await ok(sandbox, "(while :; do echo noise; done & echo $! > /tmp/noise)")
        assert [await sandbox.read("file") for _ in range(10)] == [data] * 10
        await ok(sandbox, "kill $(cat /tmp/noise)")
        for path in ("/proc/self/mem", "/proc/1/mem", "/proc/kmsg"):
            with pytest.raises(OSError, match="proc"):
                await sandbox.read(path)
        assert await sandbox.read("file") == data

    play("docker", story)


# --- the same answer everywhere --------------------------------------------------------------------------------------


def toy_outputs(kind: str) -> list[ExecResult]:
    """What the toy repository's check says to wrong, right and broken repairs."""
    results: list[ExecResult] = []

    async def main() -> None:
        async with started(kind) as provider:
            for index in range(4):
                task, sandbox = make_task("train", 0, index), await provider.acquire(TASK)
                head = task.data["files"]["lib.py"].split("\n")[0]
                for path, text in {**task.data["files"], "tests/hidden.txt": task.data["hidden"]}.items():
                    await sandbox.write(path, text.encode())
                for value in (task.data["planted"], task.data["wanted"], "nothing", "("):
                    await sandbox.write("lib.py", f"{head}\n    return {value}  # the test wants 3\n".encode())
                    for cases, first, last in (("cases", 0, 1), ("cases", 3, 4), ("hidden", 0, HIDDEN_CASES)):
                        command = f"python3 -I -S tests/check.py tests/{cases}.txt {first} {last}"
                        results.append(await sandbox.exec(command, timeout_s=COMMAND_S))
                await sandbox.close()

    asyncio.run(main())
    return results


@real
def test_toy_repair_reads_the_same_in_memory(kind: str) -> None:
    memory = toy_outputs("memory")
    assert toy_outputs(kind) == memory
    texts = "".join(result.output for result in memory)
    assert all(word in texts for word in ('{"ok": true}', '"want"', "NameError", "SyntaxError"))


def test_memory_runs_scripts_like_python() -> None:
    scripts = {
        "exit.py": "import sys\nprint(sys.argv)\nsys.exit(3)",
        "say.py": "raise SystemExit('sorry')",
        "lib.py": "def fail():\n    raise ValueError('no')\n",
        "fail.py": "import lib\nlib.fail()\n",
        "nofile.py": "open('missing')",
        "bytes.py": "print(open('lib.py', 'rb').read()[:3], __name__)",
    }

    async def run(sandbox: Sandbox) -> list[ExecResult]:
        for path, text in scripts.items():
            await sandbox.write(path, text.encode())
        return [await sandbox.exec(f"python3 {path} a 'b c'", timeout_s=COMMAND_S) for path in scripts]

    async def main() -> None:
        async with started("memory") as memory, started("process") as real_one:
            ours, theirs = await run(await memory.acquire(TASK)), await run(await real_one.acquire(TASK))
            assert [result.exit_code for result in ours] == [3, 1, 0, 1, 1, 0]
            assert [result.exit_code for result in theirs] == [3, 1, 0, 1, 1, 0]
            for mine, real_ in zip(ours, theirs, strict=True):
                assert mine.output.splitlines()[-1:] == real_.output.splitlines()[-1:]
            assert "lib.py" in ours[3].output
            assert "raise ValueError('no')" in ours[3].output
            sandbox = await memory.acquire(TASK)
            assert (await sandbox.exec("ls -l", timeout_s=1)).exit_code == 127
            assert (await sandbox.exec("python3 'x", timeout_s=1)).exit_code == 2
            assert (await sandbox.exec("python3 missing.py", timeout_s=1)).exit_code == 2

    path_before, bytecode_before = list(sys.path), sys.dont_write_bytecode
    asyncio.run(main())
    assert sys.path == path_before
    assert sys.dont_write_bytecode == bytecode_before
