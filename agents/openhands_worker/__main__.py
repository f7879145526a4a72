"""Serve conversations over standard input and output until the harness is gone. Start it through `agents.workers`."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

THREADS = 256
"""Tools that may wait for the harness at the same time."""


async def main() -> None:
    """See the module docstring."""
    # Whatever the libraries print goes to the log, not between the frames.
    pipe_out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="tool"))
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), pipe_out)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)

    from importlib.metadata import version

    from agents.openhands_worker import wire
    from agents.openhands_worker.episode import Episode
    from agents.openhands_worker.link import Link

    link = Link(writer)
    episodes: dict[str, Episode] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def play(episode: Episode, name: str) -> None:
        try:
            end = await episode.play()
        except Exception as error:  # noqa: BLE001 - one episode's failure is its result, told to the harness
            end = {"end": "error", "detail": f"{type(error).__name__}: {error}", "counts": {}}
        del episodes[name]
        link.send({"done": name, **end})

    link.send({"ready": {name: version(name) for name in ("openhands-sdk", "openhands-tools")}})
    while (frame := await wire.read(reader)) is not None:
        if "start" in frame:
            episodes[frame["start"]] = Episode(link, frame)
            task = asyncio.create_task(play(episodes[frame["start"]], frame["start"]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        elif "cancel" in frame:
            if (episode := episodes.get(frame["cancel"])) is not None:
                episode.cancel()
        else:
            link.answered(frame)
    shutil.rmtree(os.environ["SAO_WORKER"], ignore_errors=True)
    os._exit(0)  # the harness is gone: nobody waits for the threads of tools


if __name__ == "__main__":
    asyncio.run(main())
