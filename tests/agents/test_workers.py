"""What the harness keeps to when an episode in a worker is over, with a worker of a few lines."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest

from agents.workers import Worker

LATE = """
import json, sys
def read():
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    return json.loads(sys.stdin.buffer.read(size)) if size else sys.exit()
def say(frame):
    body = json.dumps(frame).encode()
    sys.stdout.buffer.write(len(body).to_bytes(4, "big") + body)
    sys.stdout.buffer.flush()
say({"ready": {}})
episode = read()["start"]
say({"ask": 1, "episode": episode, "method": "first", "arguments": {}})
while "cancel" not in read():
    pass
say({"ask": 2, "episode": episode, "method": "late", "arguments": {}})
while (frame := read()).get("answer") != 2:
    pass
say({"done": episode, "end": "stopped", "detail": frame.get("error", "")})
read()
"""


def test_what_a_worker_asks_after_the_end_is_not_played() -> None:
    async def play() -> None:
        asked: list[str] = []
        began, let_go = asyncio.Event(), asyncio.Event()

        async def answer(method: str, arguments: dict[str, Any]) -> None:
            asked.append(method)
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # a clean-up that takes its turn
                let_go.set()

        worker = await Worker.start([sys.executable, "-c", LATE], {})
        playing = asyncio.create_task(worker.play("e", {}, answer))
        await asyncio.wait_for(began.wait(), 60.0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert let_go.is_set(), "the first question is done with when `play` returns"
        assert asked == ["first"]
        assert worker.episodes == 0
        await worker.close()

    asyncio.run(play())


def test_a_question_that_fails_as_the_episode_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        began = asyncio.Event()

        async def answer(method: str, arguments: dict[str, Any]) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError("in place of the cancellation") from None

        worker = await Worker.start([sys.executable, "-c", LATE], {})
        playing = asyncio.create_task(worker.play("e", {}, answer))
        await asyncio.wait_for(began.wait(), 60.0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await worker.close()

    asyncio.run(play())
    gc.collect()
    assert "never retrieved" not in caplog.text
