"""One persistent bash behind a byte stream: the protocol that the process sandbox and the container sandbox share.

Flows in: commands (any text) and hooks of the sandbox: open a stream to a fresh `SUPERVISOR`, kill everything, and say
which limit ended the stream (or raise, if it was no command's doing).
Flows out: `ExecResult`s. On the wire:

    us    sao-go <gone>                                  the supervisor starts a bash on the same stream
    us    eval -- '<command>' </dev/null ...; printf ... one line of shell; the quotes make any text safe
    bash  <output> \\n<nonce> <exit code> <folder>\\n      <nonce> is random per command: no output can look like it
    sup.  <output> \\n<gone> <exit code>\\n                bash has ended (`exit 3`, `kill -9 $$`); we send sao-go again

A command that runs too long, or whose caller was cancelled, takes everything in the sandbox with it: killing only its
own process would let the rest of the command line run on. Only the working folder is carried into the next bash.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from harness.errors import SandboxError
from harness.protocols import ExecResult

OUTPUT_CAP = 64 * 1024
"""Bytes of output that one command may return; half from its head, half from its tail."""

Limit = Literal["", "memory", "pids", "file_size", "disk"]
KILLED: dict[Limit, str] = {
    "": "the shell was killed",
    "memory": "the sandbox was killed at its memory limit",
    "disk": "the sandbox's disk budget is exceeded; all processes were killed; the files are kept: delete some at once",
}

# Commands may point fd 1 and 2 of bash elsewhere (`exec >log`); the marker goes to a number that no script uses.
_FD = 199

SUPERVISOR = (
    "exec 2>/dev/null; trap : INT TERM HUP; "
    'while read -r word gone; do [ "$word" = sao-go ] || continue; '
    f"bash --noprofile --norc {_FD}>&1; "
    "printf '\\n%s %d\\n' \"$gone\" $?; done"
)
"""Argument of `bash -c`. It outlives the bash that runs the commands, and ends with its standard input."""

_ALARM = 198
_LOOP, _START, _END = SUPERVISOR.partition("bash --noprofile")
# The pipe is open both ways, so that nobody who writes dies when the alarm has been killed; it has a process group of its
# own, so that `kill 0` does not reach it; and each bash gets a new one: one that is being killed still looks alive.
WATCHED_SUPERVISOR = (
    f"exec {_ALARM}<> <(:); alarm=; {_LOOP}"
    '[ -z "$alarm" ] || { kill -9 $alarm; wait $alarm; }; set -m; while read -r seconds; do [ "$seconds" ] || continue; '
    f'read -r -t "$seconds" _; [ $? -le 128 ] || kill -9 -1; done <&{_ALARM} & alarm=$!; set +m; '
    f"{_START}{_END.removesuffix('done')}printf '\\n' >&{_ALARM}; done"
)
"""The same with an alarm for where process ids are the sandbox's own: a command past its time kills all processes but 1.

Each command winds the alarm with its seconds and an empty line stops it, so that a command ends on time also when nobody
outside is left to end it. It costs no process per command; a timeout then needs no call outside.
"""
ALARM_S = 3.0
"""How long after a command's time the alarm may ring before everything is killed from outside."""

# A longer line than the marker of the deepest possible folder cannot be the beginning of a marker.
_MARK_MAX = 32 * 1024


class Stream(Protocol):
    """A supervisor's standard input and output."""

    async def read(self) -> bytes:
        """Some bytes; empty at the end of the stream."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of it. Raises `ConnectionError` if nobody reads any more."""
        ...


class CappedOutput:
    """Keeps the first and the last half of `cap` bytes (None: everything) and counts what fell out between."""

    def __init__(self, cap: int | None) -> None:
        self._half = None if cap is None else cap // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        if self._half is None:
            self._head += data
            return
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    def text(self) -> str:
        """What was kept, with the gap marked; bytes that are not UTF-8 become U+FFFD."""
        gap = f"\n[... {self._dropped} bytes left out ...]\n".encode() if self._dropped else b""
        return bytes(self._head + gap + self._tail).decode(errors="replace")


class Shell:
    """Runs commands one after the other in one bash, which is started by the first of them."""

    def __init__(
        self,
        open_stream: Callable[[], Awaitable[Stream]],
        kill_all: Callable[[], Awaitable[None]],
        why_ended: Callable[[], Awaitable[Limit]] | None = None,
        watched: bool = False,
    ) -> None:
        self._open_stream, self._kill_all, self._why_ended = open_stream, kill_all, why_ended
        self._watched = watched
        self._stream: Stream | None = None
        self._lock = asyncio.Lock()
        self._gone = b""
        self._folder = b""  # as bash quotes it; empty before the first command
        self._unread = bytearray()  # what background processes wrote after the last marker
        self._busy = False

    async def exec(self, command: str, *, timeout_s: float, cap: int | None = OUTPUT_CAP) -> ExecResult:
        """Run one command. Raises what the hooks raise; everything a command can do wrong is a result."""
        if "\0" in command:
            return ExecResult("bash: a command cannot contain a NUL byte\n", 126)
        async with self._lock:
            if self._busy:  # the caller of the command before was cancelled, or its shell could not be restarted
                await self._reset()
            if self._stream is None:
                self._stream = await self._open_stream()
                await self._start_bash(self._stream)
            self._busy = True
            result = await self._run(self._stream, command, timeout_s, CappedOutput(cap))
            self._busy = False
            return result

    def forget(self) -> None:
        """The stream has ended while no command ran: the next one opens another, in the same folder."""
        self._stream = None
        self._unread.clear()

    async def _run(self, stream: Stream, command: str, timeout_s: float, output: CappedOutput) -> ExecResult:
        lost = f"the next command gets a new shell in {self._folder.decode() or 'the first folder'}, without its variables"
        late = f"timed out after {timeout_s:g} s; all processes were killed"
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + ALARM_S * self._watched):
                bash_ended, code = await self._converse(stream, command, timeout_s, output)
        except (TimeoutError, ConnectionError, EOFError):
            timed_out = time.monotonic() - began >= timeout_s
            limit_hit: Limit = "" if timed_out or self._why_ended is None else await self._why_ended()
            await self._reset()
            output.add(f"\n[{late if timed_out else KILLED[limit_hit]}; {lost}]\n".encode())
            return ExecResult(output.text(), 124 if timed_out else 137, timed_out, limit_hit)
        if bash_ended:
            timed_out = self._watched and code == 137 and time.monotonic() - began >= timeout_s
            await self._start_bash(stream)
            if timed_out:
                await self._drain(stream)
            output.add(f"\n[{late if timed_out else f'the shell exited with code {code}'}; {lost}]\n".encode())
            code = 124 if timed_out else code
            return ExecResult(output.text(), code, timed_out)
        return ExecResult(output.text(), code, killed_by="file_size" if code == 128 + signal.SIGXFSZ else "")

    async def _drain(self, stream: Stream) -> None:
        """Throw away what killed processes were writing when bash had ended already."""
        try:
            async with asyncio.timeout(ALARM_S):
                await self._converse(stream, ":", ALARM_S, CappedOutput(0))
        except (TimeoutError, ConnectionError, EOFError):
            await self._reset()

    async def _converse(self, stream: Stream, command: str, seconds: float, output: CappedOutput) -> tuple[bool, int]:
        """Send the command and read up to its marker: whether bash itself ended, and the exit code."""
        nonce = secrets.token_hex(16)
        mark = re.compile(rb"\n(?:(%s)|%s) (\d+)(?: ([^\n]*))?\n" % (self._gone, nonce.encode()))
        wind = f"builtin printf '%s\\n' {max(seconds, 0.001):.3f} >&{_ALARM} || :; " if self._watched else ""
        stop = f"; builtin printf '\\n' >&{_ALARM} || :" if self._watched else ""
        await stream.write(
            f"{wind}eval -- {shlex.quote(command)} </dev/null >&{_FD} 2>&{_FD}; "
            f'builtin printf \'\\n%s %d %q\\n\' {nonce} "$?" "$PWD" >&{_FD}{stop}\n'.encode(errors="replace")
        )
        unread = self._unread
        while not (found := mark.search(unread)):
            # A marker cut in two by the reads begins at the last newline.
            done = unread.rfind(b"\n")
            if done < 0 or len(unread) - done > _MARK_MAX:
                done = len(unread)
            output.add(bytes(unread[:done]))
            del unread[:done]
            data = await stream.read()
            if not data:
                output.add(bytes(unread))
                raise EOFError
            unread += data
        output.add(bytes(unread[: found.start()]))
        bash_ended, code, self._folder = found[1] is not None, int(found[2]), found[3] or self._folder
        del unread[: found.end()]
        return bash_ended, code

    async def _start_bash(self, stream: Stream) -> None:
        self._gone = secrets.token_hex(16).encode()
        folder = b"cd -- " + self._folder + b"\n" if self._folder else b""
        try:
            await stream.write(b"sao-go " + self._gone + b"\n" + folder)
        except ConnectionError as error:
            raise SandboxError("the sandbox ended before its shell began") from error

    async def _reset(self) -> None:
        self._busy = True
        self.forget()
        await self._kill_all()
        self._busy = False
