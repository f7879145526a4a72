"""What an episode can leave behind on this machine: processes, temporary files, open files, ports, tasks, threads.

Flows in: nothing. Flows out: names of what there is now, to be compared with what there was. What the sandbox providers keep
for themselves is not counted; without /proc (not Linux) processes, open files and ports are not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from pathlib import Path

HARNESS = str(Path(__file__).resolve().parents[1])
SETTLE_S = 5.0
"""How long what is ending may take."""
LISTENING = "0A"
POOLS = ("asyncio_", "ThreadPoolExecutor", "docker_")
"""Threads that wait for work, the event loop's and the Docker engine's clients: there may be more of them later."""


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
            pid = int(stat.parent.name)
            parents[pid], names[pid] = int(tail.split()[1]), head.partition("(")[2]
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
