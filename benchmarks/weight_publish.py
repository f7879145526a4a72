"""How long vLLM stands still for new weights, with requests in flight: 538 MB in fp32, against reading the bytes once.

The pause is from sending `/pause` to the answer of `/resume`; the file is in the page cache on both sides, and what it is
compared with is timed in a pause too, when nothing else is computed. The step `update_weights` is sha256, read and load (copies
into the layers, packing); the first is measured apart, as the plug-in takes it, the rest is the difference on a quiet machine.
Every request must end whole, with the versions of its tokens in order, from the first to the last.

    python -m benchmarks weight_publish          needs `make setup-vllm`
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_support import SMOLLM2, prompts, require_vllm, vllm_engine, write_policy
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_replica import VllmReplica
from harness.protocols import GenerateRequest
from trainer.weights import sha256

STREAMS, TOKENS, UPDATES, BETWEEN = 6, 96, 6, 2
"""Requests, their new tokens, updates while they run, tokens of each request between two updates."""
POLL_S, WAIT_S = 0.02, 900.0
BLOCK = 2**20
STEPS = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")


def main() -> None:
    """Print the JSON line."""
    require_vllm("weight_publish")
    with tempfile.TemporaryDirectory() as name:
        folders = [write_policy(Path(name) / f"policy-{seed}", SMOLLM2, seed) for seed in (0, 1)]
        print(json.dumps(asyncio.run(measure(folders, Path(name) / "vllm.log"))))


async def measure(folders: list[Path], log: Path) -> dict[str, Any]:
    """The JSON line; the first update warms up."""
    files = [(path := folder / "model.safetensors", sha256(path)) for folder in folders]
    rng = random.Random(0)
    async with vllm_engine(folders[0], log, max_num_seqs=STREAMS) as engine:
        times = watch(engine.replicas[0])
        requests = [
            GenerateRequest(ids, TOKENS, (), request_id=f"{number}")
            for number, ids in enumerate(prompts(rng, STREAMS, SMOLLM2["vocab_size"]))
        ]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        rounds = []
        for version in range(1, UPDATES + 1):
            await grown(engine, running)
            path, digest = files[version % 2]
            read_s, sha256_s = await apart(engine.replicas[0], path)
            await engine.update_weights(path, version, digest)
            spent = {step: times[step][1] - times[step][0] for step in STEPS}
            spent |= {"pause_s": times["resume"][1] - times["pause"][0], "read_s": read_s, "sha256_s": sha256_s}
            rounds.append(spent)
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*running)
    for answer in answers:
        assert len(answer.token_ids) == TOKENS and answer.finish_reason == "length"
        assert answer.versions == sorted(answer.versions) and set(answer.versions) == set(range(UPDATES + 1)), answer.versions

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(of, rounds[1:])), 3)

    line: dict[str, Any] = {"bench": "weight_publish", "value": median(lambda r: r["pause_s"]), "unit": "s pause to resume"}
    line |= {
        "ratio": median(lambda r: r["pause_s"] / r["read_s"]),
        "against": "reading the same bytes once, from the page cache",
    }
    line |= {"against_s": median(lambda r: r["read_s"]), "bytes": files[0][0].stat().st_size}
    line |= {"steps_s": {step: median(lambda r, step=step: r[step]) for step in STEPS}}  # type: ignore[misc]
    line |= {"sha256_s": median(lambda r: r["sha256_s"])}
    line |= {"in_flight": STREAMS, "kept": len(answers), "updates": UPDATES}
    return line | {"load": round(os.getloadavg()[0], 1)}


def watch(replica: VllmReplica) -> dict[str, tuple[float, float]]:
    """When the last call of each route began and ended, kept up to date."""
    times: dict[str, tuple[float, float]] = {}
    call = replica._text

    async def timed(method: str, route: str, *rest: Any) -> str:
        start = time.monotonic()
        answer = await call(method, route, *rest)
        times[route.strip("/").split("?")[0]] = start, time.monotonic()
        return answer

    replica._text = timed  # type: ignore[method-assign]
    return times


async def grown(engine: VllmEngine, running: list[asyncio.Task[Any]]) -> None:
    """Wait until every request has got some tokens more."""

    def counts() -> list[int]:
        return [len(stream.ids) for stream in engine.replicas[0]._streams]

    before: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(before) < STREAMS or min(counts()) < max(before) + BETWEEN:
            assert not any(task.done() for task in running), "a request ended before the last update"
            if len(before) < STREAMS:
                before = counts()
            await asyncio.sleep(POLL_S)


async def apart(replica: VllmReplica, path: Path) -> tuple[float, float]:
    """Seconds to read the file's bytes once, and to take its sha256, while the server stands still."""
    await replica._text("POST", "/pause?mode=keep&clear_cache=false")
    try:
        return await asyncio.to_thread(seconds, read, path), await asyncio.to_thread(seconds, sha256, path)
    finally:
        await replica._text("POST", "/resume")


def read(path: Path) -> None:
    """Every byte, into one small buffer."""
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def seconds(call: Callable[[Path], Any], path: Path) -> float:
    """How long a call takes."""
    start = time.monotonic()
    call(path)
    return time.monotonic() - start
