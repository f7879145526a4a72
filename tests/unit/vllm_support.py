"""What the suites of the vLLM client share: an engine over fake replicas, requests, conditions to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import Deadlines
from harness.protocols import GenerateRequest
from tests.vllm.fake_replica import STOP, FakeReplica, with_replicas

SOON = Deadlines(10.0, 50.0, 50.0, 55.0, 20.0, 20.0, 20.0)
"""No limit that a slow machine meets before the test's own."""
PROMPT = [11, 12, 13]


def ask(n: int = 40, request_id: str = "e/0", *, prompt: list[int] = PROMPT, seed: int | None = 5) -> GenerateRequest:
    return GenerateRequest(prompt, n, (STOP,), seed=seed, request_id=request_id)


def engine_test(
    n: int, test: Callable[[VllmEngine, list[FakeReplica]], Awaitable[None]], *, urls: bool = False, **options: Any
) -> None:
    """Run `test` on an engine over `n` fakes; afterwards nothing may be left in flight."""

    async def work(fakes: list[FakeReplica]) -> None:
        engine = VllmEngine([fake.url if urls else fake for fake in fakes], **({"deadlines": SOON} | options))
        try:
            await test(engine, fakes)
            assert all(lane.in_flight == lane.tokens == 0 for lane in engine.router.lanes) and not engine.router.queue
            assert not any(replica._streams for replica in engine.replicas)
        finally:
            await engine.close()

    asyncio.run(with_replicas(n, work))


def weights(version: int) -> Path:
    return Path(f"v{version}.safetensors")


def received(engine: VllmEngine, n: int) -> Callable[[], bool]:
    """Whether some attempt has received at least n tokens."""
    return lambda: any(len(stream.ids) >= n for replica in engine.replicas for stream in replica._streams)
