"""Who blocks the event loop: a beat in the loop, and a thread that looks at the loop's stack when the beat stays away.

Flows in: a running loop. Flows out: one line per stall that happened inside an environment's code (below `watch.py`); a
machine that is slow elsewhere is nobody's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

from harness.kit import watch

BLOCKED_S = 1.0
"""A call that keeps the loop this long blocks it: every other episode waits."""
BEAT_S = 0.1
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


@asynccontextmanager
async def stalls() -> AsyncIterator[list[str]]:
    """The list that grows with each stall while the block runs."""
    found: list[str] = []
    beat, ended = [time.monotonic()], threading.Event()
    loop_thread = threading.get_ident()

    async def heart() -> None:
        while True:
            beat[0] = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def guard() -> None:
        told = 0.0
        while not ended.wait(BEAT_S):
            last = beat[0]
            if last != told and time.monotonic() - last > BLOCKED_S:
                culprit = _culprit(sys._current_frames().get(loop_thread))
                if culprit:
                    told = last
                    found.append(culprit)

    thread = threading.Thread(target=guard, name="sao-stalls", daemon=True)
    task = asyncio.create_task(heart())
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _culprit(frame: FrameType | None) -> str:
    """The innermost line that is no library's, if the stack leads through an environment."""
    own, watched = "", False
    while frame is not None:
        name = frame.f_code.co_filename
        watched |= name == watch.__file__
        if not own and not name.startswith(LIBRARIES):
            own = f"{name}:{frame.f_lineno} `{linecache.getline(name, frame.f_lineno).strip()}`"
        frame = frame.f_back
    return own if watched else ""
