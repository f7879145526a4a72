"""Worker processes in which an agent's library runs: started once, each serving many episodes, told apart by episode id.

Flows in: the start of an episode, and a coroutine that answers what the worker asks. Flows out: how the episode ended. A
worker that dies is an `EnvironmentFault` for its episodes; the next episode starts another. A killed harness ends its workers:
their standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agents.openhands_worker import wire
from harness import processes
from harness.errors import EnvironmentFault

log = logging.getLogger("sao")

START_S = 300.0
CANCEL_S = 10.0
"""How long a worker may take to let go of an episode that is over; then it is killed."""

Answer = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""(method, arguments) -> a JSON value. What it raises ends the episode, and is raised by `Worker.play`."""


class _Played:
    """One episode in a worker."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.done: asyncio.Future[wire.Frame] = asyncio.get_running_loop().create_future()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asks: set[asyncio.Task[None]] = set()

    def over(self) -> None:
        """Nothing of it is answered any more, not even what the worker asks before it hears of the end."""
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # somebody has looked at it
        for ask in self.asks:
            ask.cancel()


class Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process, self._folder = process, folder
        self._episodes: dict[str, _Played] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: list[str], env: dict[str, str]) -> Worker:
        """Start it and wait for its libraries. Raises `EnvironmentFault` with the end of its log."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="sao-worker-"))
        process = await processes.start(
            command,
            folder / "log",
            {**env, **dict.fromkeys(("HOME", "TMPDIR", "SAO_WORKER"), str(folder))},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            ready = await asyncio.wait_for(wire.read(process.stdout), START_S)
            if ready is None:
                raise EnvironmentFault(f"the agent's worker did not start:\n{processes.tail(folder / 'log')}")
        except BaseException:
            await processes.end(process, 0.0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        log.info("agent worker %d: %s", process.pid, ready["ready"])
        return cls(process, folder)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def episodes(self) -> int:
        """How many it plays."""
        return len(self._episodes)

    @property
    def ended(self) -> bool:
        """Whether it can serve no more."""
        return self._reading.done()

    async def play(self, episode: str, start: dict[str, Any], answer: Answer) -> wire.Frame:
        """Play one episode to its end. Raises what `answer` raised, or `EnvironmentFault` if the worker dies."""
        played = self._episodes[episode] = _Played(answer)
        try:
            self._send({"start": episode, **start})
            await asyncio.wait((played.done, played.failed), return_when=asyncio.FIRST_COMPLETED)
            if played.failed.done():
                played.failed.result()
            return played.done.result()
        finally:
            played.over()
            await self._let_go(episode, played)

    async def close(self) -> None:
        """End the process."""
        await processes.end(self._process, 2.0)
        await asyncio.gather(self._reading, return_exceptions=True)  # its episodes have been told
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _let_go(self, episode: str, played: _Played) -> None:
        try:
            if not played.done.done():
                self._send({"cancel": episode})
                await asyncio.wait((played.done,), timeout=CANCEL_S)
                if not played.done.done():
                    log.warning("agent worker %d does not let go of episode %s; it is killed", self.pid, episode)
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
        finally:
            if played.done.done() and not played.done.cancelled():
                played.done.exception()
            del self._episodes[episode]
            if played.asks:
                await asyncio.wait(played.asks, timeout=CANCEL_S)

    def _send(self, frame: wire.Frame) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(wire.encode(frame))

    async def _read(self) -> None:
        """Take in what the worker says until it says no more, or something that is no frame."""
        assert self._process.stdout is not None
        try:
            while (frame := await wire.read(self._process.stdout)) is not None:
                self._take(frame)
        finally:
            for played in self._episodes.values():
                if not played.done.done():
                    tail = processes.tail(self._folder / "log")
                    played.done.set_exception(EnvironmentFault(f"agent worker {self.pid} died:\n{tail}"))

    def _take(self, frame: wire.Frame) -> None:
        if "done" in frame:
            if (played := self._episodes.get(frame["done"])) is not None and not played.done.done():
                played.done.set_result(frame)
        elif (played := self._episodes.get(frame["episode"])) is None:
            self._send({"answer": frame["ask"], "error": "the episode is over"})
        else:
            task = asyncio.create_task(self._answer(played, frame))
            played.asks.add(task)
            task.add_done_callback(played.asks.discard)

    async def _answer(self, played: _Played, frame: wire.Frame) -> None:
        """Answer one question; whatever happens, the worker's thread that waits is let go."""
        answer: wire.Frame = {"error": "the episode is over"}
        try:
            if not played.failed.done():
                answer = {"result": await played.answer(frame["method"], frame["arguments"])}
        except Exception as error:  # noqa: BLE001 - raised again by `play`
            if not played.failed.done():
                played.failed.set_exception(error)
        finally:
            self._send({"answer": frame["ask"], **answer})


class Crew:
    """As many workers as asked for, started when they are needed; an episode goes to the one that plays fewest."""

    def __init__(self, command: list[str], env: dict[str, str], size: int) -> None:
        self._command, self._env, self._size = command, env, size
        self._workers: list[Worker] = []
        self._starting = asyncio.Lock()

    async def worker(self) -> Worker:
        """The least busy one. Raises `EnvironmentFault` if none can be started."""
        async with self._starting:
            for dead in [worker for worker in self._workers if worker.ended]:
                self._workers.remove(dead)
                await dead.close()
            least = min(self._workers, key=lambda worker: worker.episodes, default=None)
            if least is None or (least.episodes and len(self._workers) < self._size):
                least = await Worker.start(self._command, self._env)
                self._workers.append(least)
            return least

    async def close(self) -> None:
        """End all of them."""
        async with self._starting:
            workers, self._workers = self._workers, []
        with contextlib.suppress(ProcessLookupError):
            await asyncio.gather(*(worker.close() for worker in workers))
