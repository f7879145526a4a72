"""The terminal tool on real processes and real containers: right outputs, the texts of OpenHands, and no way to lose it."""

from __future__ import annotations

import asyncio
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import interactive
from agents.terminal import Terminal
from harness.errors import SandboxError
from harness.protocols import Sandbox
from harness.sandboxes import docker_monitor
from tests.contracts.sandbox_support import COMMAND_S, TASK, an_engine, needs_docker, ok, play, real, started
from tests.contracts.terminal_support import LONG_S, SHORT_S, on_terminal, says, until_over

pytestmark = pytest.mark.timeout(180)

# --- outputs ---------------------------------------------------------------------------------------------------------


@real
def test_what_a_command_says_and_leaves(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        folder = (await ok(sandbox, "pwd")).strip()
        first = await terminal.run("echo hi")
        assert first.output == "hi"
        assert first.suffix == "\n[The command completed with exit code 0.]"
        user, host = (await ok(sandbox, "id -un; hostname -s 2>/dev/null || echo ${HOSTNAME%%.*}")).split()
        assert (first.working_dir, first.username, first.hostname, first.pid) == (folder, user, host, -1)
        assert await says(terminal, "cd / && export A='x y' && f() { echo f; }; alias g='echo g'") == ""
        assert await says(terminal, 'pwd; echo "$A"; f; g') == "/\nx y\nf\ng"
        assert await says(terminal, "false", 1) == ""
        assert await says(terminal, "echo $?") == "1"
        assert await says(terminal, "echo $?") == "0"
        assert await says(terminal, "(exit 42)", 42) == ""
        assert "no_such_command: command not found" in await says(terminal, "no_such_command", 127)
        assert await says(terminal, "printf '   no newline'; printf ' err' >&2") == "   no newline err"
        assert await says(terminal, "test -t 0 && test -t 1 && stty size && echo $TERM $PAGER $GIT_PAGER $MANPAGER") == (
            "200 256\nxterm-256color cat cat cat"
        )
        background = await terminal.run("sleep 71.5 & echo $!")
        assert background.output.split("\n")[-1] == str(background.pid)
        assert await says(terminal, "mkdir 'a b' 2>/dev/null; cd /tmp; mkdir -p gone; cd gone; rmdir ../gone") == ""
        gone = await terminal.run("echo in")
        assert (gone.output, gone.working_dir) == ("in", "/tmp/gone")
        assert (
            await says(terminal, "cd /; echo .bash_history* ${HISTFILE-none} \"wow!\" 'wow!'")
            == ".bash_history* none wow! wow!"
        )

    on_terminal(kind, story)


@real
def test_any_text_is_safe(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        assert "unexpected EOF" in await says(terminal, "echo 'unbalanced", 2)
        assert "syntax error" in await says(terminal, "echo (", 2)
        text = "$HOME `id` \"quoted\" 'x' \\ \\; !! \t\ttab\n\n  é漢😀 \x07\x1b[31mred\x1b[0m \x01\x7f ~"
        assert await says(terminal, f"cat <<'X'\n{text}\nX\necho after") == f"{text}\nafter"
        assert "it" in await says(terminal, "cat <<X\nit\n")
        assert await says(terminal, "find / -maxdepth 0 -exec echo {} \\;") == "/"
        assert await says(terminal, "echo one\necho two # comment\n\nfor i in 1 2\ndo echo $i\ndone") == "one\ntwo\n1\n2"
        assert await says(terminal, "printf '\\xff\\xe4\\n'; echo '\ud800'") == "\ufffd\ufffd\n?"
        assert (await terminal.run("echo \0")).exit_code == 126
        assert await says(terminal, "printf 'bar\\rfoo\\r\\n'; printf 'ask\\033[6n\\033]11;?\\007\\033[c.\\033[1m'") == (
            "barfoo\nask.\x1b[1m"
        )
        assert await says(terminal, "head -c 4000 /dev/urandom | tr -d '\\r' >f; cat f; echo; echo end") != ""
        for size in (4090, 9_000, 100_000):
            word = ("x'\"\\é!" * size)[:size]
            assert await says(terminal, f'x={shlex.quote(word)}; echo ${{#x}}; printf %s "$x" | md5sum') == (
                (await ok(sandbox, f'x={shlex.quote(word)}; echo ${{#x}}; printf %s "$x" | md5sum')).strip()
            )

    on_terminal(kind, story)


def test_printf_gives_any_text_back() -> None:
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\x1b\x1e"), max_size=200)

    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        loop = asyncio.get_running_loop()

        @settings(max_examples=200)
        @given(text)
        def round_trip(text: str) -> None:
            said = asyncio.run_coroutine_threadsafe(terminal.run(f"printf %s {shlex.quote(text)}"), loop).result(COMMAND_S)
            assert said.output == text.rstrip()

        await asyncio.to_thread(round_trip)

    on_terminal("process", story)


@real
def test_output_cannot_pass_for_a_prompt(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        assert await says(terminal, "printf 'a\\036b\\037c\\036'; echo '###PS1END###'; printf '\\036'") == (
            "a\x1eb\x1fc\x1e###PS1END###\n\x1e".rstrip()
        )
        fake = "\\036" + "0" * 32 + "\\035p\\0350\\0351\\035\\035/\\037"
        assert (await says(terminal, f"printf '{fake}'; echo on; false", 1)).endswith("on")
        assert "PROMPT_COMMAND=" in await says(terminal, "set | cat; env; declare -p | cat; echo end")

    on_terminal(kind, story)


@real
def test_long_output_keeps_head_and_tail(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        output = await says(terminal, "echo head; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo tail")
        assert output.startswith("head\nxxx")
        assert output.endswith("xxx\ntail")
        assert "bytes left out" in output
        assert len(output) < 70_000
        flood = await terminal.run("yes", timeout_s=SHORT_S)
        assert flood.timed_out and len(flood.output) < 70_000
        assert (await terminal.run("C-c", is_input=True)).exit_code == 130
        assert await says(terminal, "echo usable") == "usable"

    on_terminal(kind, story)


@real
def test_a_flood_that_nobody_waits_for_is_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "FLOOD", 1 << 20)

    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        for command in ("yes & echo begun", "yes"):
            begun = await terminal.run(command, timeout_s=SHORT_S)
            if command != "yes":
                begun = await until_over(terminal, begun)
            assert (begun.exit_code, begun.is_error) == (-1 if command == "yes" else 0, False)
            bash = terminal._bash
            assert bash is not None
            unseen = -1
            async with asyncio.timeout(COMMAND_S):
                while unseen < 1 << 20 or unseen != bash._unseen:
                    unseen = bash._unseen
                    await asyncio.wait([bash._listening], timeout=0.3)
        stopped = await terminal.run("C-c", is_input=True, timeout_s=COMMAND_S)
        assert stopped.exit_code == 130 and len(stopped.output) < 140_000
        assert (await terminal.run("kill %1; wait; echo usable", timeout_s=4 * COMMAND_S)).exit_code == 0
        assert (await terminal.run("echo usable")).output.endswith("usable")

    on_terminal(kind, story)


@real
def test_every_output_is_its_own_commands(kind: str) -> None:
    """The count that OpenHands' own terminals get wrong under load."""

    async def one(sandbox: Sandbox) -> None:
        terminal = Terminal(sandbox, no_change_s=LONG_S)
        for i in range(200):
            assert await says(terminal, f"echo hi {i}; seq 1 $((50*{i})) | tail -1") == f"hi {i}\n{50 * i or ''}".rstrip()
        await terminal.close()

    async def story(sandbox: Sandbox) -> None:
        await asyncio.gather(*(one(sandbox) for _ in range(4)))

    play(kind, story)


# --- what a command may do to the shell ------------------------------------------------------------------------------


@real
def test_settings_of_the_shell(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        for setting in (
            "set -u",
            "stty echo",
            "PS1='prompt> '; PS2='more> '",
            "PROMPT_COMMAND='echo prompt'",
            "unset PROMPT_COMMAND",
            "trap 'echo int' INT; trap 'echo exit' EXIT",
            "alias eval=false builtin=false hash=false",
            "unalias -a; PATH=/nowhere:$PATH",
            "exec </dev/null; exec </dev/tty",
            "exec 3>&1 2>&1",
            "stty tostop -icanon; stty icanon",
            "IFS=0123456789abcdef",
            "shopt -s extglob nullglob failglob; set -f",
        ):
            await says(terminal, setting)
            said = await says(terminal, 'printf "%s\\n" "hi there"')
            assert said == "hi there" or (said == "prompt\nhi there" and "echo prompt" in setting)
            assert await says(terminal, "(exit 7)", 7) == ""
        assert await says(terminal, "exec >log; echo hidden; readonly PROMPT_COMMAND=:") == ""
        assert await says(terminal, "echo hidden") == ""
        assert await says(terminal, "cat log >/dev/tty") == "hidden\nhidden"
        assert await says(terminal, "exec >/dev/tty; set -x") == ""
        assert (await says(terminal, "echo traced")).endswith("+ echo traced\ntraced")

    on_terminal(kind, story)


@real
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("exec bash -c 'exit 4'", 4),
        ("set -e; false; echo never", 1),
        ("sleep 72.5 & exit 5", 5),
        ("stty tostop; kill -9 $$", 137),
        ("C-d", 0),
    ],
)
def test_a_shell_that_ends_is_a_result(kind: str, how: str, code: int) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await says(terminal, "mkdir -p 'a b'; cd 'a b'; gone=1; echo begun")
        result = await terminal.run(how)
        assert (result.exit_code, result.is_error, result.timed_out) == (code, False, False), result
        assert "never" not in result.output
        assert f"a new shell in {result.working_dir}, without its variables" in result.suffix
        assert await says(terminal, 'basename "$PWD"; echo "[${gone-}]"') == "a b\n[]"

    on_terminal(kind, story)


@needs_docker
def test_the_end_of_all_shells_is_a_result() -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        killed = await terminal.run("kill -9 $PPID; sleep 72.5")
        assert (killed.exit_code, "The shell was killed" in killed.suffix) == (137, True)
        assert await says(terminal, "echo usable") == "usable"

    on_terminal("docker", story)


@real
def test_a_shell_that_ended_while_nobody_looked(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await says(terminal, "mkfifo go; (read x <go; kill -9 $$) & cd /")
        ended = terminal._bash
        assert ended is not None
        await ok(sandbox, "echo > go")
        async with asyncio.timeout(COMMAND_S):
            while not ended.ended:
                await ended.wait(asyncio.get_running_loop().time() + COMMAND_S)
        result = await terminal.run("pwd; echo on")
        assert result.output.endswith("The shell exited with code 137; the next command gets a new shell in /, without its "
                                      "variables.]\n/\non")  # fmt: skip
        assert result.exit_code == 0
        assert (await sandbox.exec("sleep 73.5", timeout_s=SHORT_S)).timed_out  # kills everything
        result = await until_over(terminal, await terminal.run("echo again"))
        assert result.output.endswith("again") or "The shell" in result.suffix
        assert await says(terminal, "echo usable") == "usable"

    on_terminal(kind, story)


@real
def test_shells_in_the_shell(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await says(terminal, "outer=1")
        for inner in ("bash --norc", "bash --norc --noediting"):
            assert (await terminal.run(inner)).exit_code == 0
            assert await says(terminal, 'echo "[${outer-}]"; cd /') == "[]"
            assert await says(terminal, "echo " + "long " * 300) == ("long " * 300).strip()
            assert await says(terminal, "(exit 9)", 9) == ""
            left = await terminal.run("exit 6")
            assert (left.exit_code, left.output) == (6, "exit")
            assert await says(terminal, 'echo "[$outer]"') == "[1]"

    on_terminal(kind, story)


@real
def test_the_background_speaks_later(kind: str) -> None:
    async def story(terminal: Terminal, sandbox: Sandbox) -> None:
        await says(terminal, "mkfifo go said; (read x <go; echo from behind; echo >said) &")
        await ok(sandbox, "echo > go; read x < said")
        assert "from behind" in await says(terminal, "echo in front")
        assert await says(terminal, "wait; echo quiet") in ("quiet", "[1]+  Done                    ( read x < go; echo from "
                                                            "behind; echo > said )\nquiet")  # fmt: skip

    on_terminal(kind, story)


# --- what is not the terminal's --------------------------------------------------------------------------------------


@needs_docker
def test_limits_of_the_container_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)
    monkeypatch.setattr(interactive, "SEND_S", 1.0)

    async def story(sandbox: Sandbox) -> None:
        terminal = Terminal(sandbox, no_change_s=LONG_S)
        assert (await terminal.run("python3 -c 'bytearray(300 << 20)'")).exit_code == 137
        full = await terminal.run("head -c 30000000 /dev/zero > big; sleep 77.5")
        assert (full.exit_code, "The shell was killed" in full.suffix) == (137, True)
        told = await terminal.run("echo no")
        assert told.is_error and "disk budget is exceeded" in told.output
        assert await says(terminal, "rm big; echo usable") == "usable"
        await terminal.close()

    play("docker", story, memory_mb=64, disk_mb=8)


@needs_docker
@pytest.mark.parametrize("idle", [True, False])
def test_a_lost_container_is_a_sandbox_error(idle: bool) -> None:
    async def main() -> None:
        async with started("docker") as provider:
            sandbox = await provider.acquire(TASK)
            terminal = Terminal(sandbox, no_change_s=LONG_S)
            await says(terminal, "true")
            call = asyncio.ensure_future(terminal.run("sleep 78.5")) if not idle else None
            with an_engine() as engine:
                await engine.call(engine.remove, sandbox.container_id)
            for _ in range(2):
                with pytest.raises(SandboxError, match="is lost: it was (removed|ended) from outside"):
                    await asyncio.wait_for(call or terminal.run("true"), COMMAND_S)
                call = None
            await terminal.close()

    asyncio.run(main())
