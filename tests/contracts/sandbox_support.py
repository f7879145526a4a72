"""What the sandbox suites share: providers by kind, a started one, and what is left on this machine.

Docker is required on Linux; `SAO_TEST_DOCKER=0` leaves it out. `.ci/docker.sh` makes the engine and the image.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.protocols import Sandbox
from harness.sandboxes.docker import DockerSandboxes, Engine
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


def containers_of(run_id: str) -> list[str]:
    """Ids of a run's containers, running or not."""
    engine = Engine()
    found = [container["Id"] for container in engine.find(f"sao.run={run_id}")]
    engine.close()
    return found
