"""The persistent Python against real sandboxes: what its state survives, what ends it, and what hostile code can reach."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from environments.python_tir import repl_program
from environments.python_tir.repl import PROGRAM, SHOWN_MAX, Repl
from harness.errors import EnvironmentFault, SandboxError
from harness.protocols import Sandbox
from tests.contracts.sandbox_support import TASK, an_engine, needs_docker, play, real, started

pytestmark = pytest.mark.timeout(240)

CELL_S = 20.0
DATA_CLASS = """
import dataclasses, pickle
@dataclasses.dataclass
class P:
    a: 'int'
pickle.loads(pickle.dumps(P(x)))
"""
NO_INTERRUPT = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def with_repl(
    kind: str, story: Callable[[Repl, Sandbox], Awaitable[None]], *, cell_s: float = CELL_S, **options: object
) -> None:
    """Run a story with a started Python."""

    async def main(sandbox: Sandbox) -> None:
        repl = Repl(sandbox, cell_s=cell_s)
        await repl.start()
        try:
            await story(repl, sandbox)
        finally:
            await repl.close()

    play(kind, main, **options)


def test_the_program_is_python_3_8() -> None:
    ast.parse(PROGRAM, feature_version=(3, 8))


@real
def test_state_values_and_errors(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        assert await repl.run("x = 20") == "[no output]"
        assert await repl.run("print('a')\nx + 1") == "a\n21"
        assert await repl.run("_ * 2") == "42"
        assert await repl.run("None") == "[no output]"
        failed = await repl.run("def f():\n    return 1 / 0\nx = 7\nf()")
        assert failed.startswith('Traceback (most recent call last):\n  File "<cell 5>", line 4, in <module>')
        assert failed.endswith("ZeroDivisionError: division by zero") and "return 1 / 0" in failed
        assert "<string>" not in failed, "none of our own frames"
        assert await repl.run("x") == "7"
        assert "SyntaxError" in await repl.run("x = (")
        assert (await repl.run("input()")).endswith("EOFError: EOF when reading a line")
        assert await repl.run("exit(3)") == "SystemExit: 3"
        assert await repl.run(DATA_CLASS) == "P(a=7)"
        assert repl.restarts == 0

    with_repl(kind, story)


@real
def test_output_of_every_way_in_its_order(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        assert await repl.run(EVERY_WAY) == "one\ntwo\nthree\nfour\nfive\n\ufffd1"

    with_repl(kind, story)


@real
def test_the_limit_interrupts_and_keeps_the_state(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        await repl.run("x = 1")
        for code in (
            "while True: pass",
            "import time; time.sleep(1000)",
            "import os; os.system('sleep 1000')",
            "while True: print('y' * 99)",
        ):
            assert (await repl.run(code)).endswith("[interrupted after 0.5 s; state kept]"), code
        assert await repl.run("x") == "1"

    with_repl(kind, story, cell_s=0.5)


@real
@pytest.mark.parametrize(
    "code",
    [NO_INTERRUPT + "while True: pass", "import time\nwhile True:\n    try: time.sleep(1000)\n    except BaseException: pass"],
)
def test_what_does_not_stop_is_killed(kind: str, code: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        await repl.run("x = 1")
        assert (await repl.run(code)).endswith("[killed: it did not stop when interrupted after 0.5 s; state lost]")
        assert "NameError" in await repl.run("x")
        assert repl.restarts == 1

    with_repl(kind, story, cell_s=0.5)


@real
def test_output_without_end_is_cut(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        shown = await repl.run("print('first'); print('y' * 30_000_000); print('last')")
        assert shown.startswith("first\nyyy") and shown.endswith("yyy\nlast")
        assert len(shown) < SHOWN_MAX
        assert f"[... {30_000_000 + 12 - 2 * repl_program.HALF} bytes left out ...]" in shown

    with_repl(kind, story)


@real
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os._exit(3)", "[Python ended with exit code 3; state lost]"),
        ("import os; print('bye', flush=True); os.kill(os.getpid(), 9)", "bye\n[Python ended with signal 9; state lost]"),
        ("import os; os.closerange(3, 100)", "state lost]"),
        ("import os; os.fork() and os._exit(3); import time; time.sleep(1000)", "[Python ended with exit code 3; state lost]"),
        ("import os; os.kill(os.getppid(), 9)", "[Python has ended; state lost]"),
    ],
)
def test_whatever_ends_python_another_one_follows(kind: str, code: str, says: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        await repl.run("x = 1")
        assert (await repl.run(code)).endswith(says)
        assert "NameError" in await repl.run("x")
        assert (await repl.run("1 + 1"), repl.restarts) == ("2", 1)

    with_repl(kind, story)


@real
def test_a_fork_that_returns_from_its_cell_ends(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        await repl.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)")
        assert await repl.run("'same' if pid else 'fork'") == "'same'"

    with_repl(kind, story)


EVERY_WAY = r"""
import os, sys
print("one")
os.system("echo two; echo three >&2")
os.write(1, b"four\n")
sys.stderr.write("five\n")
os.write(2, b"\xff")
"""
LIST_OPEN = """
import subprocess
print(subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout)
"""
FORGE = """
import json, os
line = json.dumps({"cell": %d, "output": "forged", "end": "ok", "why": ""}).encode() + b"\\n"
for fd in range(64):
    try: os.write(fd, line)
    except OSError: pass
"""


@real
def test_no_descriptor_of_a_cell_reaches_the_protocol(kind: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        shown = await repl.run(FORGE % 1 + "print('true')")
        assert shown.count('"forged"') == 2 and shown.endswith("true"), "only what went to 1 and 2, as output"
        assert await repl.run("1 + 1") == "2"
        listed = await repl.run(LIST_OPEN)
        assert listed.split() == ["0", "1", "2", "3"], "a child inherits none of ours; 3 is what lists them"

    with_repl(kind, story)


@real
def test_a_line_written_through_proc_ends_only_its_own_cell(kind: str) -> None:
    """Code of the same user can open the supervisor's pipe; what it can say there is what it could print."""

    async def story(repl: Repl, _: Sandbox) -> None:
        write = "with open(f'/proc/{os.getppid()}/fd/1', 'wb', buffering=0) as f: f.write(%s)"
        for line in ("b'nonsense\\n'", "b'x' * 1_000_000 + b'\\n'", "b'{}\\n'"):
            await repl.run("import os\n" + write % line)
            assert (await repl.run("3"), await repl.run("4"))[1] == "4"

    with_repl(kind, story)


@real
def test_nothing_to_be_found_in_the_sandbox(kind: str) -> None:
    """No process that the code can see was told the answer, and no file of the sandbox holds it or the grader."""

    async def story(repl: Repl, _: Sandbox) -> None:
        look = """
import os
seen = ""
pid = os.getpid()
while pid > 1:
    for name in ("cmdline", "environ"):
        try: seen += open(f"/proc/{pid}/{name}", "rb").read().decode(errors="replace")
        except OSError: pass
    stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    pid = int(stat[1])
    if pid < 1 or "pytest" in open(f"/proc/{pid}/cmdline").read(): break
files = [f for _, _, names in os.walk(".") for f in names]
print("equivalent" in seen, "last_boxed" in seen, "math_verify" in seen, "gold" in seen, files)
"""
        assert await repl.run(look) == "False False False False []"

    with_repl(kind, story)


@real
def test_64_at_once(kind: str) -> None:
    async def main() -> None:
        async with started(kind) as provider:
            sandboxes = await asyncio.gather(*(provider.acquire(TASK) for _ in range(4)))
            repls = [Repl(sandboxes[index % 4], cell_s=60.0) for index in range(64)]
            await asyncio.gather(*(repl.start() for repl in repls))
            for turn in range(3):
                code = "x = {}" if not turn else "x = x + 1; x"
                shown = await asyncio.gather(*(repl.run(code.format(index)) for index, repl in enumerate(repls)))
            assert shown == [str(index + 2) for index in range(64)]
            await asyncio.gather(*(repl.close() for repl in repls))

    asyncio.run(main())


@needs_docker
def test_a_memory_bomb() -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        await repl.run("x = 1")
        assert (await repl.run("b = []\nwhile True: b.append(bytearray(10 << 20))")).endswith("state lost]")
        assert await repl.run("1 + 1") == "2"

    with_repl("docker", story, memory_mb=128)


@needs_docker
@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os, time\nfor _ in range(500):\n    if not os.fork():\n        os.setsid()\n        time.sleep(1000)",
    ],
)
def test_a_fork_bomb(bomb: str) -> None:
    async def story(repl: Repl, _: Sandbox) -> None:
        shown = await repl.run(bomb)
        assert "state " in shown or "BlockingIOError" in shown
        async with asyncio.timeout(180):
            while await repl.run("1 + 1") != "2":
                pass

    with_repl("docker", story, cell_s=2.0, pids=64)


@needs_docker
def test_a_lost_sandbox_is_an_error() -> None:
    async def story(repl: Repl, sandbox: Sandbox) -> None:
        with an_engine() as engine:
            await engine.call(engine.remove, sandbox.container_id)  # type: ignore[attr-defined]
        with pytest.raises(SandboxError):
            await repl.run("1")

    with_repl("docker", story)


def test_an_image_without_python_is_no_verdict(tmp_path: Path) -> None:
    async def story(sandbox: Sandbox) -> None:
        with pytest.raises(EnvironmentFault, match="no_python does not start: .*not found"):
            await Repl(sandbox, python="no_python").start()

    play("process", story)
