"""The training loop, as a story: episodes run all the time; each full batch moves the critic and the policy; new weights go
back into the engine while other episodes are still running.

Flows in: an opened `Run`. Flows out: a summary; on the way the ledger, metrics and checkpoints. Only weights go back.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from harness.dashboard import Dashboard
from harness.errors import LearnerError
from harness.learner import Learner
from harness.ledger import Pending
from harness.protocols import SamplingContract
from harness.rollout import Clock, Limits, Rollout
from harness.run import Run, log
from harness.session import sampling_hash
from harness.stages import check_gate, evaluate, pretrain_value, warm_start

BATCH_WAIT_S = 3_600.0
STOP_GRACE_S = 4.0
"""A stop waits this long for the step in progress; a longer step is given back to the ledger."""


async def train(run: Run) -> dict[str, Any]:
    """The main job, from the warm start to the held-out result. Returns the summary."""
    with run.ledger.stopwatch():
        return await _train(run)


async def _train(run: Run) -> dict[str, Any]:
    await warm_start(run)
    await run.launch()
    await check_gate(run)
    before = await evaluate(run, "before")
    critic = await pretrain_value(run)
    loop = Loop(run)
    await loop.prepare(critic)
    await loop.run_to(run.config.steps)
    after = await evaluate(run, "after")
    await run.learner.call("export_policy", model=str(run.model), out=str(run.folder.path / "policy"))
    return summarise(run, before, after)


def summarise(run: Run, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Write and return `summary.json`."""
    summary = {
        "heldout": {"before": before, "after": after},
        "wall_s": round(run.ledger.wall_s(), 2),
        "policy_version": run.version,
        "episodes": run.ledger.counts(),
        "run": str(run.folder.path),
    }
    run.folder.write("summary.json", summary)
    return summary


class Loop:
    """RL proper: batches out of the ledger, steps, publishes, checkpoints."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.learner: Learner = run.learner
        self.clock = Clock()
        self.started = time.monotonic()
        self._seen = (self.started, 0.0)
        self._trained = 0
        self._not_finite = 0

    async def prepare(self, critic: Path) -> None:
        """Load policy and critic, go back to the last checkpoint if there is one, close the ledger's book there."""
        run = self.run
        facts = await self.learner.call(
            "init",
            model=str(run.model),
            critic=str(critic),
            critic_settings=self.config.critic.model_dump(),
            bias=run.ledger.mean_reward("value"),
        )
        log.info(
            "policy of %d parameters; critic trains %d and freezes %d",
            facts["policy_parameters"],
            facts["critic_trainable"],
            facts["critic_frozen"],
        )
        point = run.ledger.get("checkpoint", {"batches": 0, "version": 0, "path": None})
        closed = run.ledger.recover(point["batches"], point["version"])
        self._trained = point["batches"]
        run.folder.rewind(point["batches"])
        run.folder.prune_checkpoints(self.config.trainer.keep_checkpoints, point["path"])
        self.clock.consumed, self.clock.version = point["batches"], point["version"]
        if point["path"] is not None:
            await self.learner.call("load", path=str(run.folder.path / point["path"]))
            await run.publish(point["version"])
        if run.resumed:
            log.info("resumed after batch %d: %s", point["batches"], closed)

    async def run_to(self, steps: int) -> None:
        """Consume batches until `steps`. On a stop everything in flight is booked and a checkpoint written."""
        run, algorithm = self.run, self.config.algorithm
        settings = self.config.rollout
        limits = Limits(settings.concurrency, settings.eta, algorithm.batch, settings.max_attempts)
        self.rollout = Rollout(
            run.stage(), run.tasks("train"), run.ledger, self.clock, limits, self.config.seed, run.generation
        )
        self._seen = (time.monotonic(), self.rollout.slot_seconds())
        self.rollout.start()
        try:
            with Dashboard(steps) as dashboard:
                while self.clock.consumed < steps:
                    waited = time.monotonic()
                    batch = await self.next_batch(algorithm.batch)
                    row = await _finish(self.train_on(batch, time.monotonic() - waited))
                    dashboard.show(row)
        finally:
            await self.rollout.stop()
            await self._last_checkpoint()

    async def _last_checkpoint(self) -> None:
        """Keep what was trained since the last one, if trainer and ledger agree; a stop gives it only the grace."""
        covered = self.run.ledger.get("checkpoint", {"batches": 0})["batches"]
        if self.clock.consumed == covered or self._trained != self.clock.consumed or not self.learner.idle:
            return
        task = asyncio.current_task()
        stopping = task is not None and task.cancelling() > 0
        try:
            async with asyncio.timeout(STOP_GRACE_S if stopping else None):
                await self.checkpoint()
        except TimeoutError:
            log.info("no time for a last checkpoint: batches after %d will be trained again", covered)

    async def next_batch(self, size: int) -> list[Pending]:
        """The first `size` waiting episodes in order of completion; too stale ones are dropped and their tasks tried again."""
        limit = 4 * max(self.config.rollout.eta, 1.0)
        while True:
            await self.rollout.wait_pending(size, BATCH_WAIT_S)
            pending = self.run.ledger.pending()
            stale = [p for p in pending if self.clock.version - p.min_version > limit]
            if not stale:
                return pending[:size]
            await self.rollout.drop_stale([p.id for p in stale])

    async def train_on(self, batch: list[Pending], waited_s: float) -> dict[str, Any]:
        """One step: book the batch, move critic and policy, publish, log. Returns the metrics row."""
        run, number = self.run, self.clock.consumed + 1
        start = time.monotonic()
        lag = sum(self.clock.version - p.submit_version for p in batch) / len(batch)
        run.ledger.consume(number, [p.id for p in batch], self.clock.version)
        self._trained = -1
        result = await self.learner.call(
            "step",
            paths=[str(run.ledger.path(p.id, s)) for p in batch for s in range(p.segments)],
            sampling=sampling_hash(SamplingContract()),
            version=self.clock.version,
            algorithm=self.config.algorithm.model_dump(),
            critic_updates=self.config.critic.updates,
            update_policy=number > self.config.critic.policy_freeze_steps,
            seed=self.config.seed * 1_000_003 + number,
        )
        trained_s = time.monotonic() - start
        self._trained = number
        self._check_finite(result["metrics"])
        if result["stepped"]:
            await run.publish(self.clock.version + 1)
            self.clock.version += 1
        run.ledger.finish_batch(number)
        self.clock.consumed = number
        await self.rollout.moved()
        row = self._row(waited_s, time.monotonic() - start) | {
            "async/submission_lag": lag,
            "time/train_s": round(trained_s, 4),
            "time/publish_s": round(time.monotonic() - start - trained_s, 4),
            **result["metrics"],
        }
        run.folder.metrics(row)
        if number % self.config.trainer.checkpoint_every == 0:
            await self.checkpoint()
        return row

    def _check_finite(self, metrics: dict[str, Any]) -> None:
        """Skipped steps are data; three in a row are a broken run."""
        skipped = any(name.startswith("grad/") and value is None for name, value in metrics.items())
        self._not_finite = self._not_finite + 1 if skipped else 0
        if self._not_finite == 3:
            raise LearnerError("three steps in a row had a gradient that is not finite", hint="lower the learning rate, resume")

    def _row(self, waited_s: float, step_s: float) -> dict[str, Any]:
        """What the harness knows of the step that just ended."""
        seen = self.run.ledger.batch_facts(self.clock.consumed)
        now, slot_s = time.monotonic(), self.rollout.slot_seconds()
        in_flight = (slot_s - self._seen[1]) / max(now - self._seen[0], 1e-9)
        self._seen = (now, slot_s)
        return {
            "step": self.clock.consumed,
            "version": self.clock.version,
            "elapsed_s": round(now - self.started, 3),
            "reward/mean": seen["reward"],
            "rollout/success": seen["success"],
            "rollout/turns": seen["turns"],
            "rollout/action_tokens": seen["action_tokens"],
            "rollout/tokens_per_s": seen["tokens"] / max(waited_s + step_s, 1e-9),
            "async/in_flight": in_flight,
            "async/rollout_idle": 1 - in_flight / self.config.rollout.concurrency,
            "async/trainer_idle": waited_s / max(waited_s + step_s, 1e-9),
            "async/queue": len(self.run.ledger.pending()),
            "time/wait_s": round(waited_s, 4),
        }

    async def checkpoint(self) -> None:
        """Write the trainer's state and note in the ledger which batch it covers; keep the newest few."""
        run = self.run
        path = Path("checkpoints") / f"batch-{self.clock.consumed:06d}-{run.generation}"
        await self.learner.call("save", path=str(run.folder.path / path))
        run.ledger.put("checkpoint", {"batches": self.clock.consumed, "version": self.clock.version, "path": str(path)})
        run.folder.prune_checkpoints(self.config.trainer.keep_checkpoints, str(path))


async def _finish(step: Any) -> Any:
    """Await a step; on cancellation let it end within the grace, so that ledger, trainer and engine agree."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=STOP_GRACE_S)
        task.cancel()
        raise
