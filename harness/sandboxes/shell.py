"""One persistent bash behind a byte stream: the protocol that the process sandbox and the container sandbox share.

Flows in: commands (any text) and two hooks of the sandbox: open a stream to a fresh `SUPERVISOR`, and kill everything.
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
from collections.abc import Awaitable, Callable
from typing import Protocol

from harness.errors import SandboxError
from harness.protocols import ExecResult

OUTPUT_CAP = 64 * 1024
"""Bytes of output that one command may return; half from its head, half from its tail."""

# Commands may point fd 1 and 2 of bash elsewhere (`exec >log`); the marker goes to a number that no script uses.
_FD = 199

SUPERVISOR = (
    "exec 2>/dev/null; trap : INT TERM HUP; "
    'while read -r word gone; do [ "$word" = sao-go ] || continue; '
    f"bash --noprofile --norc {_FD}>&1; "
    "printf '\\n%s %d\\n' \"$gone\" $?; done"
)
"""Argument of `bash -c`. It outlives the bash that runs the commands, and ends with its standard input."""

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

    def __init__(self, open_stream: Callable[[], Awaitable[Stream]], kill_all: Callable[[], Awaitable[None]]) -> None:
        self._open_stream, self._kill_all = open_stream, kill_all
        self._stream: Stream | None = None
        self._lock = asyncio.Lock()
        self._gone = b""
        self._folder = b""  # as bash quotes it; empty before the first command
        self._unread = bytearray()  # what background processes wrote after the last marker
        self._busy = False

    async def exec(self, command: str, *, timeout_s: float, cap: int | None = OUTPUT_CAP) -> ExecResult:
        """Run one command. Raises what the two hooks raise; everything a command can do wrong is a result."""
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

    async def _run(self, stream: Stream, command: str, timeout_s: float, output: CappedOutput) -> ExecResult:
        lost = f"the next command gets a new shell in {self._folder.decode() or 'the first folder'}, without its variables"
        try:
            async with asyncio.timeout(timeout_s) as limit:
                bash_ended, code = await self._converse(stream, command, output)
        except (TimeoutError, ConnectionError, EOFError):
            await self._reset()
            if limit.expired():
                output.add(f"\n[timed out after {timeout_s:g} s; all processes were killed; {lost}]\n".encode())
                return ExecResult(output.text(), 124, timed_out=True)
            output.add(f"\n[the shell was killed; {lost}]\n".encode())
            return ExecResult(output.text(), 137)
        if bash_ended:
            await self._start_bash(stream)
            output.add(f"\n[the shell exited with code {code}; {lost}]\n".encode())
        return ExecResult(output.text(), code)

    async def _converse(self, stream: Stream, command: str, output: CappedOutput) -> tuple[bool, int]:
        """Send the command and read up to its marker: whether bash itself ended, and the exit code."""
        nonce = secrets.token_hex(16)
        mark = re.compile(rb"\n(?:(%s)|%s) (\d+)(?: ([^\n]*))?\n" % (self._gone, nonce.encode()))
        await stream.write(
            f"eval -- {shlex.quote(command)} </dev/null >&{_FD} 2>&{_FD}; "
            f'builtin printf \'\\n%s %d %q\\n\' {nonce} "$?" "$PWD" >&{_FD}\n'.encode(errors="replace")
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
        self._stream = None
        self._unread.clear()
        await self._kill_all()
        self._busy = False
