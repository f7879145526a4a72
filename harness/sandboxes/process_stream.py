"""Programs of the process sandbox: how one is started, with pipes or with a terminal, and what is left of it at its end.

Flows in: a command line, a folder, an environment. Flows out: `ProcessStream`s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from asyncio.subprocess import PIPE, STDOUT, SubprocessStreamProtocol
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import SandboxError

KILL_S = 30.0
STUCK = "look for processes in state D in ps: they hang in the kernel"
CHUNK = 2**16

# A session's leader gets the first terminal that it opens as its controlling one; one that it inherits open is none.
TAKE_TERMINAL = 'exec <>"$1" >&0 2>&1; shift; '


def let_signals_through() -> None:
    """Have programs take the signals that we were started to ignore, as by `nohup sao train .. &`.

    A program inherits that a signal is ignored, but not that a handler takes it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)


class ProcessStream(SubprocessStreamProtocol):
    """Standard input and output of a process; in a terminal it speaks through the other end of that."""

    def __init__(self) -> None:
        super().__init__(limit=CHUNK, loop=asyncio.get_running_loop())
        self._exited = asyncio.Event()
        self._process: asyncio.SubprocessTransport | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._terminal: asyncio.ReadTransport | None = None

    @classmethod
    async def open(cls, command: Sequence[str], folder: Path, environment: dict[str, str]) -> ProcessStream:
        """Start it with pipes, as the leader of a session. Raises `SandboxError`."""
        self = await cls._start(command, folder, environment, PIPE, PIPE)
        self._reader, self._writer = self.stdout, self.stdin
        return self

    @classmethod
    async def open_terminal(
        cls, command: Callable[[str], Sequence[str]], folder: Path, environment: dict[str, str]
    ) -> ProcessStream:
        """Start what `command` makes of the terminal's name, and which must begin with `TAKE_TERMINAL`."""
        ours, theirs = os.openpty()
        try:
            self = await cls._start(command(os.ttyname(theirs)), folder, environment, theirs, theirs)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)  # it had to be open until the program has it: else we read the end at once
        loop, reader = asyncio.get_running_loop(), _TerminalReader(limit=CHUNK)
        back = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        write_end = os.fdopen(os.dup(ours), "wb", buffering=0)
        self._terminal, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
        )
        transport, _ = await loop.connect_write_pipe(lambda: back, write_end)
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, back, None, loop)
        if self._exited.is_set():
            self._stop_writing()
        return self

    @classmethod
    async def _start(
        cls, command: Sequence[str], folder: Path, environment: dict[str, str], stdin: int, stdout: int
    ) -> ProcessStream:
        try:
            # Not create_subprocess_exec: it hides the transport, which alone lets go of pipes that a child holds.
            transport, self = await asyncio.get_running_loop().subprocess_exec(
                cls,
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process could be started: {error}") from error
        self._process = transport
        return self

    @property
    def pid(self) -> int:
        """The process; it leads a session and a group of that number."""
        assert self._process is not None
        return self._process.get_pid()

    @property
    def ended(self) -> bool:
        """Whether the process is known to be dead."""
        return self._exited.is_set()

    def process_exited(self) -> None:
        """Called by the event loop."""
        super().process_exited()
        self._exited.set()
        if self._terminal is not None:
            self._stop_writing()  # a terminal takes bytes also when nobody is left to read them

    async def wait_for_exit(self) -> None:
        """Wait until the killed process is dead. Raises `SandboxError` if it does not die."""
        try:
            await asyncio.wait_for(self._exited.wait(), KILL_S)
        except TimeoutError as error:
            raise SandboxError(f"a process does not die within {KILL_S:g} s", hint=STUCK) from error

    def let_go(self) -> None:
        """Close our ends."""
        if self._process is not None:
            self._process.close()
        if self._terminal is not None:
            self._terminal.close()
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.transport.abort()

    async def read(self) -> bytes:
        """See `ByteStream`."""
        assert self._reader is not None
        return await self._reader.read(CHUNK)

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        assert self._writer is not None
        if self._exited.is_set():
            raise ConnectionResetError("the program has ended")
        self._writer.write(data)
        await self._writer.drain()


class Program:
    """A `ByteStream`: a process that was started beside the shell, and the way to end it."""

    def __init__(self, stream: ProcessStream, kill_session: Callable[[int], None]) -> None:
        self._stream, self._kill_session = stream, kill_session
        self.read, self.write = stream.read, stream.write

    @property
    def ended(self) -> bool:
        """Whether the process is dead."""
        return self._stream.ended

    async def kill(self) -> None:
        """Kill its session, if it lives, and wait until it is dead."""
        if not self.ended:
            await asyncio.to_thread(self._kill_session, self._stream.pid)
            await self._stream.wait_for_exit()

    async def close(self) -> None:
        """See `ByteStream`."""
        try:
            await self.kill()
        finally:
            self._stream.let_go()


class _TerminalReader(asyncio.StreamReader):
    def set_exception(self, exc: Exception) -> None:
        self.feed_eof()  # EIO: nobody has the terminal open any more; what was written before can still be read
