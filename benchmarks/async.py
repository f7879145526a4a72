"""Wall-clock of single-rollout asynchronous training against synchronous batches, on heavy-tailed episode lengths.

The real scheduler, ledger and episodes; a scripted engine whose every turn takes model time, and a trainer that takes a
fixed time per batch. Same tasks, same engine, same number of batches; only eta differs (0 is synchronous).
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.support import Steps, fake_stage
from harness.ledger import Ledger
from harness.rollout import Admission, Clock, Rollout

BATCH, BATCHES, CONCURRENCY = 16, 12, 16
TURN_S, TRAIN_S = 0.02, 0.25
SIGMA, MEDIAN = 1.0, 10


def main() -> None:
    """Print the JSON line."""
    rng = random.Random(0)
    turns = [max(2, min(200, round(MEDIAN * rng.lognormvariate(0.0, SIGMA)))) for _ in range(4_096)]
    results = {name: asyncio.run(_run(turns, eta)) for name, eta in (("sync", 0.0), ("async", 2.0))}
    ours, other = results["async"], results["sync"]
    line = {"bench": "async", "value": round(ours["wall_s"], 2), "unit": "s for 12 batches of 16"}
    line |= {"ratio": round(other["wall_s"] / ours["wall_s"], 2), "against": "synchronous batches (eta = 0)"}
    for name, result in results.items():
        line |= {f"{name}_{key}": round(result[key], 3) for key in ("trainer_idle", "rollout_idle")}
    print(json.dumps(line))


async def _run(turns: list[int], eta: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger, clock = Ledger(folder), Clock()
        environment = Steps(turns)
        stage = fake_stage(environment, folder / "model", TURN_S)
        rollout = Rollout(stage, environment.tasks("train"), ledger, clock, Admission(CONCURRENCY, eta, BATCH, 1), seed=0)
        start, trained = time.monotonic(), 0.0
        rollout.start()
        for number in range(1, BATCHES + 1):
            await rollout.wait_ready(BATCH, 300.0)
            batch = rollout.ready()[:BATCH]
            ledger.consume(number, [p.id for p in batch], clock.version)
            began = time.monotonic()
            await asyncio.sleep(TRAIN_S)
            trained += time.monotonic() - began
            clock.version += 1
            clock.consumed += 1
            await rollout.moved()
        wall, ended = time.monotonic() - start, time.time()
        await rollout.stop()
        ledger.close()
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as book:
            (seen,) = book.execute("SELECT SUM(MIN(completed_s, ?) - submitted_s) FROM episodes", (ended,)).fetchone()
    return {"wall_s": wall, "trainer_idle": 1 - trained / wall, "rollout_idle": 1 - seen / (CONCURRENCY * wall)}
