"""The worker's end of the pipe: calls to the harness, awaited by conversations or waited for by the threads of their tools."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from agents.openhands_worker import wire


class Refused(Exception):
    """The harness cannot or will not answer; it knows why, and ends the episode if it must."""


class Link:
    """See the module docstring."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    def send(self, frame: wire.Frame) -> None:
        """Send one frame."""
        self._writer.write(wire.encode(frame))

    async def call(self, episode: str, method: str, **arguments: Any) -> Any:
        """Ask the harness. Raises `Refused`."""
        number = next(self._numbers)
        answer = self._open[number] = self._loop.create_future()
        self.send({"ask": number, "episode": episode, "method": method, "arguments": arguments})
        try:
            return await answer
        finally:
            del self._open[number]

    def call_from_thread(self, episode: str, method: str, **arguments: Any) -> Any:
        """The same for a tool's thread; the harness bounds how long it takes."""
        return asyncio.run_coroutine_threadsafe(self.call(episode, method, **arguments), self._loop).result()

    def answered(self, frame: wire.Frame) -> None:
        """Hand an answer to who waits for it; nobody does after a cancellation."""
        answer = self._open.get(frame["answer"])
        if answer is None or answer.done():
            return
        if "error" in frame:
            answer.set_exception(Refused(frame["error"]))
        else:
            answer.set_result(frame["result"])
