"""The training loop, as a story: episodes run all the time; each full batch moves the critic and the policy; new weights go
back into the engine while other episodes are still running.

Flows in: an opened `Run`. Flows out: a summary; on the way the ledger, metrics and checkpoints. Only weights go back.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from harness.alarms import Alarm, Alarms
from harness.dashboard import Dashboard
from harness.errors import ConfigError, EngineError, LearnerError
from harness.learner import Learner
from harness.ledger import Pending
from harness.protocols import SamplingContract
from harness.rollout import Admission, Clock, Rollout
from harness.run import Run, log
from harness.session import sampling_hash
from harness.stages import VALUE_GATE_HINT, check_gate, evaluate, pretrain_value, warm_start
from harness.telemetry import Telemetry

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


def _introduce_critic(facts: dict[str, Any]) -> None:
    """Say what the critic trains, and refuse one that failed its gate."""
    log.info("critic trains %d parameters and freezes %d", facts["critic_trainable"], facts["critic_frozen"])
    for name, count in facts["critic_trainable_kinds"].items():
        log.info("  trains %s (%d)", name, count)
    record = facts["critic_record"]
    if record is None:
        log.warning("the critic starts untrained: add a [value] table, or give critic.init")
        return
    if not record["gate"]["passed"]:
        raise ConfigError(f"the critic failed its gate: {record['gate']['reason']}", hint=VALUE_GATE_HINT)
    if record["policy_sha256"] != facts["policy_sha256"]:
        log.warning("the critic was trained on another policy than this run starts from")


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
        self.alarms = Alarms()
        self._ringing: set[str] = set()
        self._trained = 0

    async def prepare(self, critic: Path | None) -> None:
        """Load policy and critic, go back to the last checkpoint if there is one, close the ledger's book there.

        Raises `EngineError` if the engine does not sample from the policy that is trained from here on.
        """
        run, config = self.run, self.config
        settings = config.algorithm.model_dump()
        arguments: dict[str, Any] = {}
        if config.critic is not None:
            settings |= config.critic.model_dump(include={"lam", "value_clip", "advantage_values"})
            arguments = {"critic": str(critic), "critic_settings": config.critic.model_dump()}
        arm = {"loss": config.loss.table(), "advantage": config.advantage.table(), "settings": settings}
        facts = await self.learner.call("init", model=str(run.model), arm=arm, **arguments)
        log.info("policy of %d parameters", facts["policy_parameters"])
        if config.critic is not None:
            _introduce_critic(facts)
        point = run.ledger.get("checkpoint", {"batches": 0, "version": 0, "path": None})
        closed = run.ledger.recover(point["batches"], point["version"])
        self._trained = point["batches"]
        run.folder.rewind(point["batches"])
        run.folder.prune_checkpoints(self.config.trainer.keep_checkpoints, point["path"])
        self.clock.consumed, self.clock.version = point["batches"], point["version"]
        if point["path"] is not None:
            await self.learner.call("load", path=str(run.folder.path / point["path"]))
            await run.publish(point["version"])
        if not config.engine.noise:
            await run.probe()
        if (alarms := run.ledger.get("alarms")) is not None:
            self.alarms.restore(alarms)
        if run.resumed:
            log.info("resumed after batch %d: %s", point["batches"], closed)

    async def run_to(self, steps: int) -> None:
        """Consume batches until `steps`. On a stop everything in flight is booked and a checkpoint written."""
        run, algorithm = self.run, self.config.algorithm
        settings = self.config.rollout
        limits = Admission(settings.concurrency, settings.eta, algorithm.batch, settings.max_attempts, algorithm.group)
        tasks = run.tasks("train")
        self.rollout = Rollout(run.stage(), tasks, run.ledger, self.clock, limits, self.config.seed, run.generation)
        self.telemetry = Telemetry(
            run.ledger, settings.concurrency, self.rollout.slot_seconds(), mixed=hasattr(tasks, "shares")
        )
        self.rollout.start()
        try:
            with Dashboard(steps) as dashboard:
                while self.clock.consumed < steps:
                    waited = time.monotonic()
                    batch = await self.next_batch(algorithm.batch)
                    row = await _finish(self.train_on(batch, time.monotonic() - waited))
                    dashboard.show(row)
            if run.version != self.clock.version:
                await run.publish(self.clock.version)
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
        """The first `size` episodes of complete groups, in order of completion; too stale ones are dropped and played again."""
        limit = 4 * max(self.config.rollout.eta, 1.0)
        while True:
            await self.rollout.wait_ready(size, BATCH_WAIT_S)
            stale = [p for p in self.run.ledger.pending() if self.clock.version - p.min_version > limit]
            if not stale:
                return self.rollout.ready()[:size]
            await self.rollout.drop_stale([p.id for p in stale])

    async def train_on(self, batch: list[Pending], waited_s: float) -> dict[str, Any]:
        """One step: book the batch, move critic and policy, publish, log. Returns the metrics row."""
        run, number, critic = self.run, self.clock.consumed + 1, self.config.critic
        start = time.monotonic()
        consumed_version = self.clock.version
        run.ledger.consume(number, [p.id for p in batch], self.clock.version)
        self._trained = -1
        result = await self.learner.call(
            "step",
            paths=[str(run.ledger.path(p.id, s)) for p in batch for s in range(p.segments)],
            sampling=sampling_hash(SamplingContract()),
            number=number,
            version=self.clock.version,
            critic_updates=0 if critic is None else critic.updates,
            update_policy=critic is None or number > critic.policy_freeze_steps,
            max_length=self.config.limits.max_context,
            seed=self.config.seed * 1_000_003 + number,
        )
        trained_s = time.monotonic() - start
        self._trained = number
        if result["stepped"]:
            self.clock.version += 1
            if self.clock.version % self.config.rollout.publish_every == 0:
                await run.publish(self.clock.version)
        run.ledger.finish_batch(number)
        self.clock.consumed = number
        await self.rollout.moved()
        row = self.telemetry.row(
            batch=number,
            version=self.clock.version,
            consumed_version=consumed_version,
            engine_version=run.version,
            capacity=self.rollout.capacity(),
            slot_seconds=self.rollout.slot_seconds(),
            wait_s=waited_s,
            train_s=trained_s,
            publish_s=time.monotonic() - start - trained_s,
            engine=await self._load(),
        )
        row |= result["metrics"]
        run.folder.metrics(row)
        self._heed(self.alarms.check(row))
        if number % self.config.trainer.checkpoint_every == 0:
            await self.checkpoint()
        return row

    async def _load(self) -> dict[str, float]:
        """What the engine says of its load. A row goes without it where it does not answer: the next publish judges that."""
        try:
            return await self.run.engine.metrics()
        except EngineError as error:
            log.warning("no figures of the engine: %s", error)
            return {}

    def _heed(self, alarms: list[Alarm]) -> None:
        """Log alarms as they begin; a grave one stops the run, unless it is told to go on."""
        for alarm in alarms:
            if alarm.name not in self._ringing:
                log.warning("alarm %s: %s", alarm.name, alarm.message)
        self._ringing = {alarm.name for alarm in alarms}
        grave = next((alarm for alarm in alarms if alarm.level == "stop"), None)
        if grave is not None and self.config.alarms == "stop":
            raise LearnerError(f"alarm {grave.name}: {grave.message}", hint="see metrics.jsonl; alarms=warn goes on regardless")

    async def checkpoint(self) -> None:
        """Write the trainer's state and note in the ledger which batch it covers; keep the newest few."""
        run = self.run
        path = Path("checkpoints") / f"batch-{self.clock.consumed:06d}-{run.generation}"
        await self.learner.call("save", path=str(run.folder.path / path))
        run.ledger.put("checkpoint", {"batches": self.clock.consumed, "version": self.clock.version, "path": str(path)})
        run.ledger.put("alarms", self.alarms.state())
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
