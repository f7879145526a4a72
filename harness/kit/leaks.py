"""What an episode can leave behind on this machine: processes, files, open files, ports, tasks, threads.

Flows in: nothing. Flows out: names of what there is now, to be compared with what there was. What the sandbox providers keep
for themselves is not counted; without /proc (not Linux) processes, open files and ports are not seen. A process that has left
its parents (double fork, setsid) is seen inside `adopting` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HARNESS = str(Path(__file__).resolve().parents[1])
SETTLE_S = 5.0
"""How long what is ending may take."""
LISTENING = "0A"
POOLS = ("asyncio_", "ThreadPoolExecutor", "docker_")
"""Threads that wait for work, the event loop's and the Docker engine's clients: there may be more of them later."""
USUAL = {"__pycache__", ".cache", ".config", ".local"}
"""Where programs keep what is no episode's."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER, prctl(2)."""


@contextmanager
def adopting() -> Iterator[None]:
    """While the block runs, a descendant whose parents end becomes a child of this process instead of the system's (Linux)."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)


def outside() -> set[str]:
    """What lies in the current folder and at the top of the home folder, where no episode should write."""
    found = set()
    for folder, name in ((Path.cwd(), "the current folder"), (Path("~").expanduser(), "the home folder")):
        with contextlib.suppress(OSError):
            found |= {f"{entry} in {name}" for entry in os.listdir(folder) if entry not in USUAL}
    return found


def holdings() -> set[str]:
    """One line per thing."""
    temporary = {f"temporary file {name}" for name in os.listdir(tempfile.gettempdir()) if not name.startswith("sao-")}
    threads = {
        f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon and not thread.name.startswith(POOLS)
    }
    return temporary | threads | _tasks() | _processes() | _files()


async def left_since(before: set[str]) -> list[str]:
    """What is there that was not, once it has had time to end."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (left := holdings() - before) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)
    return sorted(left)


def _tasks() -> set[str]:
    found = set()
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and not code.co_filename.startswith(HARNESS):
            found.add(f"asyncio task {code.co_qualname} ({task.get_name()})")
    return found


def _processes() -> set[str]:
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, parent = tail.split()[:2]
            if state not in "ZX":  # one that has ended and that nobody has asked for
                pid = int(stat.parent.name)
                parents[pid], names[pid] = int(parent), head.partition("(")[2]
    found: set[int] = set()
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found |= below
    return {f"process {names[pid]} (pid {pid})" for pid in found}


def _files() -> set[str]:
    listening = _listening()
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:[") and target[8:-1] in listening:
                found.add(f"listening port {listening[target[8:-1]]}")
            elif target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                found.add(f"open file {target}")
    return found


def _listening() -> dict[str, int]:
    """Port by inode."""
    ports = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING:
                    ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports
