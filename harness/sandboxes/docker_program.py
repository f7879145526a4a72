"""A program beside the shell of a container: a `docker exec` that we speak to, and that can be ended.

Flows in: a command line. Flows out: a `Program`. A disconnected `docker exec` runs on, so it says which process it is before it
becomes the command; what is in that process's session is killed when we let go of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from harness.errors import SandboxError
from harness.sandboxes.docker_engine import AttachedStream, Engine

START_S = 60.0
TERMINAL = {"TERM": "xterm-256color"}

# It waits for a line: what is said before we have the connection can be lost. One pipe for all: two would lose the order.
_LAUNCH = 'exec 2>&1; read -r _ || exit; echo "$$"; [ -d "$0" ] || mkdir -p -- "$0"; cd -- "$0"; exec "$@"'
# Again, because they may have forked meanwhile; the fields behind the name are state, parent, group, session.
KILL_SESSION = (
    'again=1; for round in {1..100}; do [ "$again" ] || break; again=; '
    'for file in /proc/[0-9]*/stat; do read -r line 2>/dev/null <"$file" || continue; fields=(${line##*) }); '
    '[ "${fields[3]}" = "$0" ] && [ "${fields[0]}" != Z ] || continue; '
    'pid=${file#/proc/}; kill -9 "${pid%/stat}" && again=1; done; done'
)
"""Argument of `bash -c`, followed by the number of the session's leader."""


class Program:
    """See the module docstring."""

    def __init__(self, exec_id: str, pid: str, stream: AttachedStream, first: bytes) -> None:
        self.exec_id, self.pid = exec_id, pid
        self.over = False
        """Whether we have ended it, alone or with all that ran in the container."""
        self.why_ended: Callable[[Program], Awaitable[None]] | None = None
        """Asked when the stream ends. Raises if that was none of the program's or the sandbox's doing."""
        self.end: Callable[[Program], Awaitable[None]] | None = None
        """Kills its session."""
        self._stream, self._first = stream, first

    @classmethod
    async def start(
        cls, engine: Engine, container: str, folder: str, command: Sequence[str], tty: bool
    ) -> Program | SandboxError:
        """Start it; an error, not raised, is one of the container's runtime: there may be no process or memory left."""
        words, environment = ["bash", "-c", _LAUNCH, folder, *command], TERMINAL if tty else {}
        exec_id, connection = await engine.call(engine.spawn, container, words, "/", tty, environment)
        stream = await AttachedStream.open(connection, framed=not tty)
        said = b""
        try:
            async with asyncio.timeout(START_S):
                await stream.write(b"\n")
                while not (found := re.match(rb"\s*(\d+)\r?\n", said)):
                    data = await stream.read()
                    if not data:
                        raise ConnectionResetError(said.decode(errors="replace").strip())
                    said += data
        except (TimeoutError, ConnectionError) as error:
            stream.close()
            return SandboxError(f"no program could be started: {error or 'it does not answer'}")
        except BaseException:
            stream.close()
            raise
        return cls(exec_id, found[1].decode(), stream, said[found.end() :])

    async def read(self) -> bytes:
        """See `ByteStream`."""
        if self._first:
            data, self._first = self._first, b""
            return data
        try:
            data = await self._stream.read()
        except ConnectionError:
            data = b""
        if not data and not self.over and self.why_ended is not None:
            await self.why_ended(self)
        return data

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        if self.over or self._stream.ended:
            raise ConnectionResetError("the program has ended")
        await self._stream.write(data)

    async def close(self) -> None:
        """See `ByteStream`."""
        if not self.over:
            self.over = True
            try:
                if self.end is not None:
                    await self.end(self)
            finally:
                self.detach()

    def detach(self) -> None:
        """Let go of the connection."""
        self.over = True
        self._stream.close()


class Refusal:
    """A `ByteStream` of a program that did not run, with the reason for its output."""

    def __init__(self, reason: str) -> None:
        self._reason = f"[{reason}; this program did not run]\n".encode()

    async def read(self) -> bytes:
        """See `ByteStream`."""
        reason, self._reason = self._reason, b""
        return reason

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        raise ConnectionResetError("the program did not run")

    async def close(self) -> None:
        """See `ByteStream`."""
