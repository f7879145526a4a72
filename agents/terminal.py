"""The terminal tool: one command at a time in a persistent shell, as OpenHands' own one shows itself to a model.

Flows in: a command, or input for the one that runs. Flows out: a `TerminalResult` with the texts of OpenHands. A command
that gives no output for a while, or takes longer than asked, is answered as running (exit code -1) and runs on: the model
may wait for it (an empty command), type into it, press keys, or reset the terminal.

Whatever the policy can cause is a result, also a shell that has ended; a lost sandbox is a `SandboxError`.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import dataclass, replace

from agents.interactive import InteractiveBash
from harness.protocols import Sandbox

START_S = 120.0
"""How long a shell may take to begin; more than a while only where the policy has used up all processes."""

CHOICES = (
    "You may wait longer to see additional output by sending empty command '', send other commands to interact with the "
    'current process, send keys ("C-c", "C-z", "C-d") to interrupt/kill the previous command before sending your new command, '
    "or use the timeout parameter in terminal for future commands."
)
CONTINUED = "[Below is the output of the previous command.]\n"
NOTHING_TO_SHOW = "No previous running command to retrieve logs from."
NOTHING_TO_TYPE = "No previous running command to interact with."
RESET = "Terminal session has been reset. All previous environment variables and session state have been cleared."
REFUSED = (
    '\n[Your command "{command}" is NOT executed. The previous command is still running - You CANNOT send new commands until '
    "the previous command is completed. By setting `is_input` to `true`, you can interact with the current process: {choices}]"
)
LOST_SHELL = "the next command gets a new shell in {folder}, without its variables"

KEYS = {
    "ENTER": b"\n",
    "TAB": b"\t",
    "BS": b"\x7f",
    "ESC": b"\x1b",
    "UP": b"\x1b[A",
    "DOWN": b"\x1b[B",
    "RIGHT": b"\x1b[C",
    "LEFT": b"\x1b[D",
    "HOME": b"\x1b[H",
    "END": b"\x1b[F",
    "PGUP": b"\x1b[5~",
    "PGDN": b"\x1b[6~",
}
_CONTROL = re.compile(r"(?:C-|CTRL-|CTRL\+)([A-Z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TerminalResult:
    """What the model sees of a command: `prefix`, `output` and `suffix`, and what OpenHands calls its metadata."""

    output: str
    exit_code: int = -1
    """-1: it still runs, or nothing was run."""
    working_dir: str = ""
    python: str = ""
    pid: int = -1
    """Of the last process in the background."""
    username: str = ""
    hostname: str = ""
    prefix: str = ""
    suffix: str = ""
    is_error: bool = False
    timed_out: bool = False


class Terminal:
    """One per episode; its shell starts with the first command."""

    def __init__(self, sandbox: Sandbox, folder: str | None = None, no_change_s: float = 30.0, hard_s: float = 1200.0) -> None:
        """Commands start in `folder`. No call takes longer than `hard_s` seconds, whatever the model asks for."""
        self._sandbox, self._first_folder = sandbox, folder or ""
        self._no_change_s, self._hard_s = no_change_s, hard_s
        self._folder = self._first_folder
        self._python = self._username = self._hostname = ""
        self._bash: InteractiveBash | None = None
        self._running = False  # a command whose end the model has not seen
        self._shown = False  # whether the model has seen some of its output
        self._lock = asyncio.Lock()

    async def run(
        self, command: str, *, is_input: bool = False, timeout_s: float | None = None, reset: bool = False
    ) -> TerminalResult:
        """Run a command, or type into the running one. Raises `SandboxError`; everything else is a result."""
        async with self._lock:
            if not reset:
                return await self._run(command, is_input, timeout_s)
            await self._end()
            self._folder = self._first_folder
            if not command.strip():
                return TerminalResult(RESET)
            result = await self._run(command, False, timeout_s)
            return replace(result, output=f"{RESET}\n\n{result.output}")

    async def close(self) -> None:
        """End the shell and what it has started."""
        async with self._lock:
            await self._end()

    async def _run(self, command: str, is_input: bool, timeout_s: float | None) -> TerminalResult:
        word, bash = command.strip(), self._bash
        if not self._running and (not word or is_input):
            return TerminalResult(NOTHING_TO_TYPE if word else NOTHING_TO_SHOW, is_error=True)
        if bash is not None and self._running:
            over = bash.ended or bash.prompt is not None
            if word and is_input and not over:
                await bash.press(_keys(command))
            elif word and not is_input and not over:
                return self._unfinished(bash, REFUSED.format(command=word, choices=CHOICES), is_error=True)
            if not word or is_input:
                return await self._outcome(bash, "" if over else word, timeout_s)
        return await self._begin(word, timeout_s)

    async def _begin(self, command: str, timeout_s: float | None) -> TerminalResult:
        """Run a command where none runs."""
        if "\0" in command:
            return TerminalResult("bash: a command cannot contain a NUL byte", 126)
        left = ""
        if (bash := self._bash) is not None and bash.ended:  # while nobody looked
            left = f"{self._text(bash)}\n[{self._farewell(bash)}]\n".lstrip("\n")
            await self._end()
        if self._bash is None:
            bash = self._bash = await InteractiveBash.open(self._sandbox)
            try:
                greeted = await self._greet(bash)
            except BaseException:
                await self._end()
                raise
            if not greeted:
                result = (
                    self._ended(bash)
                    if bash.ended
                    else TerminalResult(f"[no shell begins in this sandbox within {START_S:g} s]")
                )
                await self._end()
                return replace(result, output=left + result.output, is_error=True)
        assert bash is not None
        self._running, self._shown = True, False
        if (control := _CONTROL.fullmatch(command)) is None:
            await bash.start(command)
        else:  # nothing runs that could take it
            await bash.start({"C": "(exit 130)", "D": "exit"}.get(control[1].upper(), "true"))
        result = await self._outcome(bash, command, timeout_s)
        return replace(result, output=left + result.output)

    async def _greet(self, bash: InteractiveBash) -> bool:
        """Wait for a new shell and make it ours: no history, in our folder; whether that works."""
        folder = f"cd -- {shlex.quote(self._folder)} 2>/dev/null; " if self._folder else ""
        until = asyncio.get_running_loop().time() + START_S
        await bash.start(
            f'unset HISTFILE; set +o history +H; {folder}printf "%s\\n" "$(id -un 2>/dev/null)" "${{HOSTNAME%%.*}}"; true'
        )
        while bash.prompt is None and not bash.ended and asyncio.get_running_loop().time() < until:
            await bash.wait(until)
        if bash.prompt is None or bash.ended:
            return False
        self._folder, self._python = bash.prompt.folder, bash.prompt.python
        self._username, self._hostname = ("\n\n" + bash.take()).split("\n")[-3:-1]
        return True

    # --- what is answered --------------------------------------------------------------------------------------------

    async def _outcome(self, bash: InteractiveBash, command: str, timeout_s: float | None) -> TerminalResult:
        """Wait for the end of the running command or of the model's patience."""
        now = asyncio.get_running_loop().time
        began, limit = now(), self._hard_s if timeout_s is None else min(self._hard_s, timeout_s)
        while bash.prompt is None and not bash.ended:
            quiet = timeout_s is None and now() >= max(began, bash.changed) + self._no_change_s
            if quiet or now() >= began + limit:
                what = (
                    f"has no new output after {self._no_change_s:g} seconds"
                    if quiet
                    else f"timed out after {float(limit)} seconds"
                )
                return self._unfinished(bash, f"\n[The command {what}. {CHOICES}]")
            await bash.wait(
                min(began + limit, max(began, bash.changed) + self._no_change_s) if timeout_s is None else began + limit
            )
        if bash.prompt is None:
            result = self._ended(bash)
            await self._end()
            return result
        self._running, prompt = False, bash.prompt
        self._folder, self._python = prompt.folder, prompt.python
        control = f" CTRL+{command[-1].upper()} was sent." if _CONTROL.fullmatch(command) else ""
        return self._result(
            self._text(bash),
            exit_code=prompt.exit_code,
            pid=prompt.job,
            suffix=f"\n[The command completed with exit code {prompt.exit_code}.{control}]",
        )

    def _ended(self, bash: InteractiveBash) -> TerminalResult:
        code = 137 if bash.exit_code is None else bash.exit_code
        return self._result(self._text(bash), exit_code=code, suffix=f"\n[{self._farewell(bash)}]")

    def _farewell(self, bash: InteractiveBash) -> str:
        how = "was killed" if bash.exit_code is None else f"exited with code {bash.exit_code}"
        return f"The shell {how}; {LOST_SHELL.format(folder=self._folder or 'the first folder')}."

    def _unfinished(self, bash: InteractiveBash, suffix: str, *, is_error: bool = False) -> TerminalResult:
        text = bash.take()
        prefix = CONTINUED if self._shown else ""
        self._shown = self._shown or bool(text)
        return TerminalResult(text.rstrip(), prefix=prefix, suffix=suffix, is_error=is_error, timed_out=not is_error)

    def _result(self, output: str, *, exit_code: int, suffix: str, pid: int = -1) -> TerminalResult:
        return TerminalResult(output, exit_code, self._folder, self._python, pid, self._username, self._hostname, suffix=suffix)

    @staticmethod
    def _text(bash: InteractiveBash) -> str:
        return bash.take().rstrip()

    async def _end(self) -> None:
        bash, self._bash, self._running = self._bash, None, False
        if bash is not None:
            await bash.close()


def _keys(typed: str) -> bytes:
    """The bytes of a named key, or of a line with its end."""
    word = typed.strip()
    if (control := _CONTROL.fullmatch(word)) is not None:
        return bytes([ord(control[1].upper()) & 0x1F])
    return KEYS.get(word) or typed.rstrip("\n").encode(errors="replace") + b"\n"
