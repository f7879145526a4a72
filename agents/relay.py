"""A command in a sandbox that reaches one port of this machine's loopback and nothing else (`relay_inside.py` is its end).

Flows in: a sandbox, a command, its environment, the port. Flows out: its exit code and the end of what it printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from pathlib import Path

from harness.errors import SandboxError
from harness.protocols import ByteStream, Sandbox
from harness.sandboxes.shell import CappedOutput

HEADER = struct.Struct(">II")
INSIDE = Path(__file__).with_name("relay_inside.py")
PRINTED = 64 * 1024
"""Bytes kept of what the command printed, half from its head, half from its tail."""


async def run_with_gateway(sandbox: Sandbox, command: str, env: dict[str, str], port: int) -> tuple[int, str]:
    """Run a shell command in the sandbox to its end: (exit code, output). `{gateway}` in a value of `env` is the address.

    The caller limits the time: cancelled, it kills the command. Raises `SandboxError` if the sandbox has no python3 or is lost.
    """
    options = json.dumps({"command": command, "env": env})
    stream = await sandbox.spawn(["python3", "-c", INSIDE.read_text(), options])
    relay = _Relay(stream, port)
    try:
        return await relay.serve()
    finally:
        await relay.close()
        await stream.close()


class _Relay:
    """This machine's end of the connections."""

    def __init__(self, stream: ByteStream, port: int) -> None:
        self._stream, self._port = stream, port
        self._sending = asyncio.Lock()
        self._inbox: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> tuple[int, str]:
        """Carry bytes until the command has ended."""
        printed, unread = CappedOutput(PRINTED), bytearray()
        while True:
            while len(unread) < HEADER.size or len(unread) < HEADER.size + HEADER.unpack_from(unread)[1]:
                data = await self._stream.read()
                if not data:
                    said = (printed.text() + unread.decode(errors="replace"))[-500:].strip()
                    raise SandboxError(
                        f"the command's relay ended: {said}", hint="a command agent needs python3 in the sandbox"
                    )
                unread += data
            channel, size = HEADER.unpack_from(unread)
            data = bytes(unread[HEADER.size : HEADER.size + size])
            del unread[: HEADER.size + size]
            if channel == 0:
                return int(json.loads(data)["exit"]), printed.text()
            if channel == 1:
                printed.add(data)
            else:
                self._inwards(channel, data)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _inwards(self, channel: int, data: bytes) -> None:
        if channel not in self._inbox:
            self._inbox[channel] = asyncio.Queue()
            task = asyncio.create_task(self._connection(channel, self._inbox[channel]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._inbox[channel].put_nowait(data)

    async def _connection(self, channel: int, inbox: asyncio.Queue[bytes]) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._from_sandbox(inbox, writer))
                both.create_task(self._to_sandbox(channel, reader))
        except* ConnectionError:
            await self._send(channel, b"")  # the gateway has closed it; its client sees the end
        finally:
            if writer is not None:
                writer.close()

    async def _from_sandbox(self, inbox: asyncio.Queue[bytes], writer: asyncio.StreamWriter) -> None:
        while data := await inbox.get():
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _to_sandbox(self, channel: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            await self._send(channel, data)
        await self._send(channel, b"")

    async def _send(self, channel: int, data: bytes) -> None:
        async with self._sending:
            await self._stream.write(HEADER.pack(channel, len(data)) + data)
