"""Commands that run on: when the terminal answers all the same, what it says, and how a model goes on from there."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agents.terminal import CHOICES, CONTINUED, NOTHING_TO_SHOW, NOTHING_TO_TYPE, RESET, Terminal, TerminalResult
from harness.protocols import Sandbox
from tests.contracts.sandbox_support import COMMAND_S, ok, play, real
from tests.contracts.terminal_support import LONG_S, SHORT_S, on_terminal, says, until_over, until_started

pytestmark = pytest.mark.timeout(180)


@real
def test_patience_and_its_texts(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        for command, text in (("", NOTHING_TO_SHOW), ("x", NOTHING_TO_TYPE), ("C-c", NOTHING_TO_TYPE)):
            nothing = await terminal.run(command, is_input=bool(command))
            assert nothing == TerminalResult(text, is_error=True)
        await ok(sandbox, "mkfifo go over")
        quiet = await until_started(terminal, "echo begun; read x <go; echo $x; read x <over; echo end; (exit 3)")
        assert quiet.suffix == f"\n[The command has no new output after {SHORT_S:g} seconds. {CHOICES}]"
        assert (quiet.exit_code, quiet.prefix, quiet.timed_out, quiet.is_error) == (-1, "", True, False)
        refused = await terminal.run("echo other")
        assert refused.suffix.startswith(
            '\n[Your command "echo other" is NOT executed. The previous command is still running - '
        )
        assert (refused.exit_code, refused.is_error, refused.prefix, refused.output) == (-1, True, CONTINUED, "")
        late = await terminal.run("", timeout_s=0.25)
        assert late.suffix == f"\n[The command timed out after 0.25 seconds. {CHOICES}]"
        assert late.prefix == CONTINUED and late.timed_out
        await ok(sandbox, "echo middle > go")
        more = await terminal.run("")
        async with asyncio.timeout(COMMAND_S):
            while not more.output:  # a busy machine may take longer than this model's patience
                more = await terminal.run("")
        assert (more.output, more.prefix, more.exit_code) == ("middle", CONTINUED, -1)
        await ok(sandbox, "echo > over")
        end = await until_over(terminal, await terminal.run(""))
        assert (end.output, end.exit_code, end.suffix) == ("end", 3, "\n[The command completed with exit code 3.]")
        assert (await terminal.run("")).output == NOTHING_TO_SHOW

    on_terminal(kind, story, SHORT_S)


@real
def test_a_command_that_ended_while_nobody_looked(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await ok(sandbox, "mkfifo go")
        for then, is_input in (("", False), ("C-c", True), ("text", True), ("echo next", False)):
            assert (await terminal.run("echo begun; read x <go; echo ended; (exit 3)", timeout_s=0)).timed_out
            await ok(sandbox, "echo > go")
            bash = terminal._bash
            assert bash is not None
            async with asyncio.timeout(COMMAND_S):
                while bash.prompt is None:
                    await bash.wait(asyncio.get_running_loop().time() + COMMAND_S)
            result = await terminal.run(then, is_input=is_input)
            if then == "echo next":
                assert (result.output.split("\n")[-2:], result.exit_code) == (["ended", "next"], 0)
            else:
                assert (result.output.split("\n")[-1], result.exit_code) == ("ended", 3)
                assert result.suffix == "\n[The command completed with exit code 3.]"
        assert await says(terminal, "echo clean") == "clean"

    on_terminal(kind, story)


@real
def test_typing(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        assert (await terminal.run("read -r x; echo got $x", timeout_s=0)).exit_code == -1
        answer = await terminal.run("  some text ", is_input=True, timeout_s=COMMAND_S)
        assert (answer.output, answer.exit_code) == ("got some text", 0)
        assert (await terminal.run("cat; echo over", timeout_s=0)).exit_code == -1
        line = await terminal.run("line", is_input=True, timeout_s=SHORT_S)
        async with asyncio.timeout(COMMAND_S):
            while line.output != "line":
                line = await terminal.run("", timeout_s=SHORT_S)
        over = await terminal.run("C-d", is_input=True, timeout_s=COMMAND_S)
        assert over.output.endswith("over")
        assert over.suffix == "\n[The command completed with exit code 0. CTRL+D was sent.]"
        await terminal.run('read -rsn1 a; read -rsn2 b; printf \'%q %q\' "$a" "$b"', timeout_s=0)
        assert (await terminal.run("UP", is_input=True, timeout_s=COMMAND_S)).output == "$'\\E' \\[A"
        script = "while True:\n  try: exec(input('>> '))\n  except EOFError: break\nprint('bye')"
        await terminal.run(f"python3 -c {shlex.quote(script)}", timeout_s=0)
        await terminal.run("a = 20", is_input=True, timeout_s=0)
        await terminal.run("print(a * 2 + 2)", is_input=True, timeout_s=0)
        bye = await until_over(terminal, await terminal.run("CTRL+D", is_input=True, timeout_s=COMMAND_S))
        assert "42" in bye.output and bye.output.endswith("bye")

    on_terminal(kind, story)


@real
def test_keys_that_stop(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await until_started(terminal, "echo begun; sleep 74.5; echo never")
        stopped = await terminal.run("C-c", is_input=True, timeout_s=COMMAND_S)
        assert (stopped.exit_code, "never" in stopped.output) == (130, False)
        assert stopped.suffix == "\n[The command completed with exit code 130. CTRL+C was sent.]"
        await until_started(terminal, "echo begun; cat")
        asleep = await terminal.run("C-z", is_input=True, timeout_s=COMMAND_S)
        assert asleep.exit_code == 148
        assert "Stopped" in asleep.output + await says(terminal, "jobs")
        await until_started(terminal, "echo begun; fg")
        assert (await terminal.run("c-d", is_input=True, timeout_s=COMMAND_S)).exit_code == 0
        await until_started(terminal, "trap '' INT; echo begun; sleep 74.5")
        assert (await terminal.run("C-c", is_input=True)).exit_code == -1
        await ok(sandbox, "pkill -fx 'sleep 74.5'")
        assert (await until_over(terminal, await terminal.run(""))).exit_code == 143
        for key, code in (("C-c", 130), ("C-l", 0)):  # where nothing runs
            idle = await terminal.run(key, timeout_s=COMMAND_S)
            assert idle.suffix == f"\n[The command completed with exit code {code}. CTRL+{key[-1].upper()} was sent.]"
        assert await says(terminal, "echo usable") == "usable"

    on_terminal(kind, story, SHORT_S)


def test_keys_stop_commands_of_a_harness_in_the_background() -> None:
    """`nohup sao train .. &` ignores these signals, and a program inherits that."""
    ignore = "import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3)]; import subprocess; "
    test = f"{Path(__file__)}::test_keys_that_stop[process]"
    again = f"sys.exit(subprocess.run([sys.executable, '-m', 'pytest', '-q', {test!r}], timeout=170).returncode)"
    done = subprocess.run([sys.executable, "-c", ignore + again], capture_output=True, text=True, timeout=175, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@real
def test_a_hard_limit_over_all(kind: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        terminal = Terminal(sandbox, "/", no_change_s=LONG_S, hard_s=5.0)
        capped = await terminal.run("pwd; sleep 75.5", timeout_s=1e9)
        assert capped.suffix == f"\n[The command timed out after 5.0 seconds. {CHOICES}]"
        assert capped.output == "/"
        assert (await terminal.run("")).timed_out
        assert (await terminal.run("sleep 1", timeout_s=float("nan"))).is_error  # another runs
        await terminal.close()
        assert await ok(sandbox, "pgrep -fx 'sleep 75.5' || echo none") == "none\n"

    play(kind, story)


@real
def test_reset(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        folder = (await terminal.run("a=1; pwd; cd /")).output
        await until_started(terminal, "echo begun; sleep 76.5")
        assert await terminal.run("", reset=True) == TerminalResult(RESET)
        assert await ok(sandbox, "pgrep -fx 'sleep 76.5' || echo none") == "none\n"
        assert await says(terminal, 'pwd; echo "[${a-}]"') == f"{folder}\n[]"
        again = await terminal.run("echo on", reset=True, timeout_s=COMMAND_S)
        assert (again.output, again.exit_code) == (f"{RESET}\n\non", 0)

    on_terminal(kind, story, SHORT_S)


@real
def test_a_cancelled_call_loses_nothing(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await says(terminal, "mkfifo go")
        call = asyncio.ensure_future(terminal.run("echo begun; read x <go; echo end"))
        await asyncio.wait([call], timeout=0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await ok(sandbox, "echo > go")
        assert (await until_over(terminal, await terminal.run(""))).output == "begun\nend"

    on_terminal(kind, story)


@real
def test_a_call_that_is_cancelled_while_the_shell_begins(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        for steps in range(0, 40, 4):
            call = asyncio.ensure_future(terminal.run("echo never seen", reset=True))
            for _ in range(steps):
                await asyncio.wait([call], timeout=0.002)
            call.cancel()
            await asyncio.wait([call])
            result = await terminal.run("echo on", reset=not call.cancelled())
            if result.is_error:  # the command itself had begun, and is not over yet
                await until_over(terminal, await terminal.run(""))
                result = await terminal.run("echo on")
            assert result.output.endswith("on") and result.exit_code == 0

    on_terminal(kind, story)
