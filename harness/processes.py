"""Child processes of the harness: started in their own session, with a log file, ended with everything below them.

A child learns that the harness is gone from a closed pipe or socket, so even `kill -9` of the harness leaves none behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path


async def start(
    command: Sequence[str], log: Path, env: dict[str, str], *, stdout: int | None = None
) -> asyncio.subprocess.Process:
    """Start a child whose standard input is a pipe that we hold; stderr (and stdout unless given) goes to `log`."""
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=file if stdout is None else stdout,
            stderr=file,
            env=os.environ | env,
            start_new_session=True,
        )


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Close the child's input, wait `grace_s`, then kill its whole session."""
    if process.returncode is None and process.stdin is not None:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"
