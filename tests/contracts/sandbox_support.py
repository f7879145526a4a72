"""What the sandbox suites share: providers by kind, a started one, and what is left on this machine.

Docker is required on Linux; `SAO_TEST_DOCKER=0` leaves it out. `.ci/docker.sh` makes the engine and the image.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.protocols import Sandbox
from harness.sandboxes.docker import DockerSandboxes
from harness.sandboxes.docker_engine import Engine
from harness.sandboxes.memory import MemorySandboxes
from harness.sandboxes.process import ProcessSandboxes
from harness.task import Task

IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
HAVE_DOCKER = os.environ.get("SAO_TEST_DOCKER", "1" if sys.platform == "linux" else "0") != "0"
needs_docker = pytest.mark.skipif(not HAVE_DOCKER, reason="SAO_TEST_DOCKER=0, or not Linux: no real containers")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
DOCKER = pytest.param("docker", marks=needs_docker)
real = pytest.mark.parametrize("kind", ["process", DOCKER])
every = pytest.mark.parametrize("kind", ["memory", "process", DOCKER])

PROVIDERS: dict[str, Any] = {"memory": MemorySandboxes, "process": ProcessSandboxes, "docker": DockerSandboxes}
ROOT = Path(__file__).resolve().parents[2]
TASK = Task(id="contract", messages=())
COMMAND_S = 30.0
SOCKET = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")


@asynccontextmanager
async def started(kind: str, run_id: str = "", **options: Any) -> AsyncIterator[Any]:
    """A started provider, closed at the end whatever happens."""
    cls = PROVIDERS[kind]
    if kind == "docker":
        options = {"image": IMAGE, **options}
    provider = cls(cls.Config(**options), run_id or f"test-{uuid.uuid4().hex[:8]}")
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


def play(kind: str, story: Callable[[Sandbox], Awaitable[None]], **options: Any) -> None:
    """Run a story in one sandbox."""

    async def main() -> None:
        async with started(kind, **options) as provider:
            await story(await provider.acquire(TASK))

    asyncio.run(main())


async def ok(sandbox: Sandbox, command: str) -> str:
    """The output of a command that must succeed."""
    result = await sandbox.exec(command, timeout_s=COMMAND_S)
    assert (result.exit_code, result.timed_out) == (0, False), result
    return result.output


def processes_of(mark: str) -> list[int]:
    """Pids whose environment holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def folders_of(run_id: str) -> list[Path]:
    """Folders of a run's process sandboxes."""
    return list(Path(tempfile.gettempdir()).glob(f"sao-{run_id}-*"))


@contextmanager
def an_engine() -> Iterator[Engine]:
    """The environment's engine, for a look from outside."""
    engine = Engine()
    try:
        yield engine
    finally:
        engine.close()


def containers_of(run_id: str) -> list[str]:
    """Ids of a run's containers, running or not."""
    with an_engine() as engine:
        return [container["Id"] for container in engine.find(f"sao.run={run_id}")]


async def until(provider: DockerSandboxes, condition: Callable[[], bool]) -> None:
    """Wait for what the pool tells when it changes."""
    changes = provider._fleet._condition
    async with asyncio.timeout(COMMAND_S), changes:
        await changes.wait_for(condition)


class Proxy:
    """A TCP port that leads to the engine's unix socket, until it is cut."""

    def __init__(self, path: str) -> None:
        self._path, self.port = path, 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen, always at the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Drop every connection; new ones are taken."""
        for writer in self._open:
            writer.transport.abort()

    async def stop(self) -> None:
        """Drop every connection and take no more."""
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._path)
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # cut, or the end of the test
        finally:
            self._open -= {writer, back}
            writer.transport.abort()
            back.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
