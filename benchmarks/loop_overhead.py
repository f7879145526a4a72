"""Harness cost of a 10-turn episode: CPU milliseconds of session, agent, ledger and files, on a scripted engine and instant
sandboxes.

Against the same script and tools called bare, without recording anything.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.support import Steps, fake_stage, one_call
from harness.ledger import Ledger, Slot
from harness.parsers import hermes
from harness.rollout import collect

EPISODES, TURNS = 200, 10


def main() -> None:
    """Print the JSON line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Steps([TURNS] * EPISODES)
        stage = fake_stage(environment, folder / "model")
        ledger = Ledger(folder)
        tasks = [(Slot(i, i), task) for i, task in enumerate(environment.tasks("train"))]

        def play(purpose: str, count: int) -> float:
            start = time.process_time()
            episodes = asyncio.run(collect(stage, tasks[:count], ledger, purpose, version=0, concurrency=32, attempts=1))
            assert all(e.reward == 1.0 and e.trajectories[0].n_turns == TURNS for e in episodes)
            return time.process_time() - start

        play("warm", 10)
        ours = play("bench", EPISODES) / EPISODES * 1e3
        bare = asyncio.run(_bare(environment)) / EPISODES * 1e3
        ledger.close()
    line = {"bench": "loop_overhead", "value": round(ours, 3), "unit": "ms CPU per 10-turn episode"}
    print(json.dumps(line | {"ratio": round(ours / bare, 2), "against": "the same script and tools without the harness"}))


async def _bare(environment: Steps) -> float:
    start = time.process_time()
    rng = random.Random(0)
    for task in environment.tasks("train"):
        live = await environment.begin(task, None)  # type: ignore[arg-type]
        done = False
        while not done:
            _, calls = hermes(one_call("", rng), 0)
            result = await next(t for t in live.tools if t.name == calls[0].name).call(json.loads(calls[0].arguments))
            done = result.done
    return time.process_time() - start
