"""One suite for all sandboxes: real processes and real containers (and memory, where it can take part).

Docker is required on Linux; `SAO_TEST_DOCKER=0` leaves it out. `.ci/docker.sh` makes the engine and the image.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.toy_repair.tasks import HIDDEN_CASES, make_task
from harness.errors import ConfigError, SandboxError
from harness.protocols import ExecResult, Sandbox
from harness.sandboxes import process
from harness.sandboxes.docker import DockerSandboxes, Engine
from harness.sandboxes.memory import MemorySandboxes
from harness.sandboxes.process import ProcessSandboxes
from harness.sandboxes.shell import CappedOutput, Shell
from harness.task import Task

pytestmark = pytest.mark.timeout(180)

IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
HAVE_DOCKER = os.environ.get("SAO_TEST_DOCKER", "1" if sys.platform == "linux" else "0") != "0"
needs_docker = pytest.mark.skipif(not HAVE_DOCKER, reason="SAO_TEST_DOCKER=0, or not Linux: no real containers")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
DOCKER = pytest.param("docker", marks=needs_docker)
real = pytest.mark.parametrize("kind", ["process", DOCKER])
every = pytest.mark.parametrize("kind", ["memory", "process", DOCKER])

PROVIDERS: dict[str, Any] = {"memory": MemorySandboxes, "process": ProcessSandboxes, "docker": DockerSandboxes}
ROOT = Path(__file__).resolve().parents[2]
TASK = Task(id="contract", messages=())
COMMAND_S = 30.0


@asynccontextmanager
async def started(kind: str, run_id: str = "", **options: Any) -> AsyncIterator[Any]:
    """A started provider, closed at the end whatever happens."""
    cls = PROVIDERS[kind]
    if kind == "docker":
        options = {"image": IMAGE, **options}
    provider = cls(cls.Config(**options), run_id or f"test-{uuid.uuid4().hex[:8]}")
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


def play(kind: str, story: Callable[[Sandbox], Awaitable[None]], **options: Any) -> None:
    """Run a story in one sandbox."""

    async def main() -> None:
        async with started(kind, **options) as provider:
            await story(await provider.acquire(TASK))

    asyncio.run(main())


async def ok(sandbox: Sandbox, command: str) -> str:
    """The output of a command that must succeed."""
    result = await sandbox.exec(command, timeout_s=COMMAND_S)
    assert (result.exit_code, result.timed_out) == (0, False), result
    return result.output


def processes_of(mark: str) -> list[int]:
    """Pids whose environment holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def folders_of(run_id: str) -> list[Path]:
    """Folders of a run's process sandboxes."""
    return list(Path(tempfile.gettempdir()).glob(f"sao-{run_id}-*"))


def containers_of(run_id: str) -> list[str]:
    """Ids of a run's containers, running or not."""
    engine = Engine()
    found = [container["Id"] for container in engine.find(f"sao.run={run_id}")]
    engine.close()
    return found


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


@needs_docker
def test_a_full_disk_is_a_sandbox_error_docker() -> None:
    async def story(sandbox: Sandbox) -> None:
        await sandbox.exec("head -c 70000000 /dev/zero > /dev/shm/fill", timeout_s=COMMAND_S)
        with pytest.raises(SandboxError, match="disk is full"):
            await sandbox.write("/dev/shm/file", b"x" * 10_000)

    play("docker", story)


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
def test_the_container_is_locked_down() -> None:
    forks = "import subprocess\nfor n in range(99):\n  try: subprocess.Popen(['sleep', '5'])\n"
    forks += "  except BlockingIOError: print('refused', n); break"

    async def story(sandbox: Sandbox) -> None:
        status = dict(line.split(":\t", 1) for line in (await ok(sandbox, "cat /proc/self/status")).splitlines())
        assert int(status["CapEff"], 16) == 0
        assert int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        refused = (await ok(sandbox, f"python3 -c {shlex.quote(forks)}; pkill sleep")).split()
        assert refused[0] == "refused"
        assert int(refused[1]) <= 32
        hungry = await sandbox.exec("python3 -c 'bytearray(300 << 20)'", timeout_s=COMMAND_S)
        assert hungry.exit_code == 137
        big = await sandbox.exec("head -c 3000000 /dev/zero > big", timeout_s=COMMAND_S)
        assert big.exit_code == 153
        assert await ok(sandbox, "stat -c %s big") == f"{1 << 20}\n"
        assert "bash" in await ok(sandbox, "kill -9 1; kill -9 -1; cat /proc/1/cmdline | tr '\\0' ' '")

    play("docker", story, pids=32, memory_mb=128, file_mb=1)


@needs_docker
def test_a_lost_container_is_a_sandbox_error() -> None:
    async def main() -> None:
        async with started("docker", run_id := f"test-{uuid.uuid4().hex[:8]}") as provider:
            sandbox = await provider.acquire(TASK)
            await ok(sandbox, "true")
            engine = Engine()
            command = asyncio.ensure_future(sandbox.exec("sleep 60", timeout_s=COMMAND_S))
            await asyncio.wait([command], timeout=0.2)
            engine.remove(containers_of(run_id)[0])
            engine.close()
            with pytest.raises(SandboxError):
                await command
            with pytest.raises(SandboxError):
                await sandbox.exec("true", timeout_s=COMMAND_S)

    asyncio.run(main())


@needs_docker
def test_docker_problems_are_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(**options: Any) -> None:
        async with started("docker", **options):
            pass

    with pytest.raises(ConfigError, match="image localhost:1/sao-missing:none is missing") as caught:
        asyncio.run(start(image="localhost:1/sao-missing:none"))
    assert "docker image inspect" in caught.value.hint
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ConfigError, match="Docker cannot be reached") as caught:
        asyncio.run(start())
    assert caught.value.hint == "install and start it, or set sandbox.id=process"


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
                        command = f"python3 -I -S tests/check.py tests/{cases}.json {first} {last}"
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


# --- the shell protocol ----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_printf_gives_any_text_back() -> None:
    with asyncio.Runner() as runner:
        provider = ProcessSandboxes(ProcessSandboxes.Config(), f"test-{uuid.uuid4().hex[:8]}")
        runner.run(provider.start())
        sandbox = runner.run(provider.acquire(TASK))

        @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(TEXT)
        def round_trip(text: str) -> None:
            result = runner.run(sandbox.exec(f"printf %s {shlex.quote(text)}", timeout_s=COMMAND_S))
            assert result == ExecResult(text, 0)

        @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(TEXT)
        def any_command(text: str) -> None:
            # In a subshell and without redirections it may fail, but can neither hang nor break the next command.
            harmless = text.translate({ord(char): "_" for char in "><|&;(){}`$\n\\"})
            runner.run(sandbox.exec(f"( : {harmless}", timeout_s=COMMAND_S))
            assert runner.run(sandbox.exec("echo fine", timeout_s=COMMAND_S)) == ExecResult("fine\n", 0)

        try:
            round_trip()
            any_command()
        finally:
            runner.run(provider.close())


class ScriptedStream:
    """Answers every command with the same bytes, in pieces of given sizes."""

    def __init__(self, output: bytes, sizes: list[int]) -> None:
        self._output, self._sizes = output, sizes
        self._waiting = b""

    async def write(self, data: bytes) -> None:
        """Take a command and queue its answer."""
        words = data.split()
        if words[0] != b"sao-go":
            self._waiting += self._output + b"\n" + words[-4] + b" 7 /folder\n"

    async def read(self) -> bytes:
        """The next piece."""
        self._sizes.append(size := self._sizes.pop(0))
        piece, self._waiting = self._waiting[:size], self._waiting[size:]
        return piece


@given(st.binary(max_size=300) | TEXT.map(str.encode), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_the_marker_is_found_however_the_stream_is_cut(output: bytes, sizes: list[int]) -> None:
    async def main() -> None:
        stream = ScriptedStream(output, sizes)

        async def opened() -> ScriptedStream:
            return stream

        async def killed() -> None:
            raise AssertionError("nothing is to be killed")

        shell = Shell(opened, killed)
        for _ in range(2):
            result = await shell.exec("anything", timeout_s=COMMAND_S)
            assert result == ExecResult(output.decode(errors="replace"), 7)

    asyncio.run(main())


@given(st.lists(st.binary(max_size=40)), st.integers(1, 20))
def test_capped_output_keeps_both_ends(pieces: list[bytes], half: int) -> None:
    whole, output = b"".join(pieces), CappedOutput(2 * half)
    for piece in pieces:
        output.add(piece)
    gap = f"\n[... {len(whole) - 2 * half} bytes left out ...]\n".encode()
    expected = whole if len(whole) <= 2 * half else whole[:half] + gap + whole[-half:]
    assert output.text() == expected.decode(errors="replace")
