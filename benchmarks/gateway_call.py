"""A chat completion over HTTP: milliseconds more than the same call on the session itself, side by side.

Both sides play the same conversation, which grows from 20 messages to 40 of 1 kB each (bodies of 20 to 40 kB), one call on each
side in turns; the engine answers at once. The client is aiohttp with a connection that is kept alive.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from benchmarks.support import Steps, fake_stage
from harness.episode import Stage
from harness.gateway import Gateway
from harness.protocols import Message

ROUNDS, CALLS, START = 30, 10, 20
TEXT = "the quick brown fox jumps over the lazy dog and back, " * 19


def main() -> None:
    """Print the JSON line."""
    http, direct = zip(*asyncio.run(_measure()), strict=True)
    over = statistics.quantiles([h - d for h, d in zip(http, direct, strict=True)], n=20)
    line = {"bench": "gateway_call", "value": round(over[9], 3), "unit": "ms p50 over HTTP more than session.complete"}
    line |= {"p95_ms": round(over[18], 3), "http_p50_ms": round(statistics.median(http), 3)}
    line |= {"against": "session.complete, same messages", "against_p50_ms": round(statistics.median(direct), 3)}
    print(json.dumps(line | {"load": round(os.getloadavg()[0], 1)}))


async def _measure() -> list[tuple[float, float]]:
    gateway = Gateway()
    await gateway.start()
    try:
        with tempfile.TemporaryDirectory() as name:
            stage = fake_stage(Steps([1]), Path(name))
            async with aiohttp.ClientSession() as client:
                return [pair for number in range(ROUNDS) for pair in await _round(client, gateway, stage, number)]
    finally:
        await gateway.close()


async def _round(client: aiohttp.ClientSession, gateway: Gateway, stage: Stage, number: int) -> list[tuple[float, float]]:
    """One conversation: milliseconds of each call over HTTP and on the session."""
    pairs: list[tuple[float, float]] = []
    history: list[Message] = [{"role": "user" if i % 2 == 0 else "assistant", "content": TEXT} for i in range(START + 1)]
    direct = stage.session(f"direct-{number}", None)
    async with gateway.open(stage.session(f"http-{number}", None)) as end:
        headers = {"Authorization": f"Bearer {end.secret}"}
        for _ in range(CALLS):
            start = time.perf_counter()
            async with client.post(f"{end.url}/chat/completions", json={"messages": history}, headers=headers) as answer:
                message = (await answer.json())["choices"][0]["message"]
            between = time.perf_counter()
            reply = await direct.complete(history)
            pairs.append(((between - start) * 1e3, (time.perf_counter() - between) * 1e3))
            assert message == reply.message()
            (call,) = message["tool_calls"]
            history += [message, {"role": "tool", "tool_call_id": call["id"], "content": TEXT}]
    return pairs
