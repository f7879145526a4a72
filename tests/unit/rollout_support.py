"""What the tests of the scheduler share: an engine in virtual time, and a scheduler with a fake trainer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.chat import Chat
from harness.episode import Stage
from harness.errors import EngineError
from harness.ledger import Ledger
from harness.protocols import GenerateRequest, Generation
from harness.rollout import Admission, Clock, Rollout
from harness.task import Task
from tests.support import USER, stage_of


@dataclass
class TimedEngine:
    """Takes a heavy-tailed time for each call, and stamps tokens with the version at their moment."""

    clock: Clock
    sigma: float = 1.5
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    fails: Callable[[GenerateRequest], bool] = lambda request: False
    ends: list[str] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Generation:
        start = self.clock.version
        await asyncio.sleep(self.rng.lognormvariate(0, self.sigma))
        if self.fails(request):
            raise EngineError("down")
        self.ends.append(request.request_id.removesuffix("/0"))
        return Generation([1, 257], [-0.5, -0.5], [start, self.clock.version], "stop")

    async def score(self, token_ids: list[int]) -> list[float]:
        return []

    async def update_weights(self, path: Path, version: int) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Job:
    """A scheduler with a fake trainer."""

    ledger: Ledger
    stage: Stage
    limits: Admission
    clock: Clock
    size: int = 1000
    step_s: float = 1.0
    frozen: int = 0
    batches: list[list[str]] = field(default_factory=list)
    peak: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        tasks = [Task(f"train/{i}", (USER,)) for i in range(self.size)]
        self.rollout = Rollout(self.stage, tasks, self.ledger, self.clock, self.limits, 3, self.generation)

    def again(self) -> Job:
        """The same job in the next process: a new scheduler on what the ledger holds."""
        return replace(self, generation=self.generation + 1, batches=[], peak=0)

    def check(self) -> None:
        """running + queued <= (eta + 1) * batch, and what is in the trainer's hands counts as queued."""
        running = self.rollout.running
        assert running == self.ledger.counts("train").get("running", 0)
        outstanding = running + self.ledger.accepted() - self.clock.consumed * self.limits.batch
        assert outstanding <= (self.limits.eta + 1) * self.limits.batch
        assert running <= self.limits.concurrency
        self.peak = max(self.peak, outstanding)

    async def watch(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(0.05)

    async def run(self, steps: int) -> None:
        watcher = asyncio.create_task(self.watch())
        self.rollout.start()
        try:
            for number in range(self.clock.consumed + 1, self.clock.consumed + steps + 1):
                await self.rollout.wait_ready(self.limits.batch, 2e3)
                batch = self.rollout.ready()[: self.limits.batch]
                self.ledger.consume(number, [p.id for p in batch], self.clock.version)
                self.batches.append([p.id for p in batch])
                if self.limits.eta == 0:
                    assert self.rollout.running == 0, "synchronous: nothing runs while the trainer works"
                    assert {p.submit_version for p in batch} == {self.clock.version}
                self.check()
                await asyncio.sleep(self.step_s)
                self.clock.version += number > self.frozen
                self.clock.consumed = number
                await self.rollout.moved()
        finally:
            await self.rollout.stop()
            assert not watcher.done() or watcher.exception() is None, watcher.exception()
            watcher.cancel()


def job(
    chat: Chat, ledger: Ledger, *, concurrency: int, eta: float, batch: int, attempts: int = 3, group: int = 1, **more: Any
) -> Job:
    """A job on a fake engine; `more` has `engine`, `stage` or fields of `Job`."""
    clock = Clock()
    engine = more.pop("engine", None) or TimedEngine(clock)
    engine.clock = clock
    stage = more.pop("stage", None) or stage_of(chat, engine)
    return Job(ledger, stage, Admission(concurrency, eta, batch, attempts, group), clock, **more)
