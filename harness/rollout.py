"""The scheduler: keeps episodes in flight, as many as staleness allows, and books every one of them.

Flows in: tasks, a `Stage`, the current policy version. Flows out: completed episodes in the ledger, in order of completion. It
never waits for the trainer except through admission control (algorithm.md 4.5): running + queued <= (eta + 1) * batch.

Group arms play every drawn task `group` times. The members are episodes like any others; one that infrastructure loses is
played again by itself, and a batch is made of the groups that are complete.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.episode import Episode, Stage, run_episode
from harness.errors import InfrastructureError, SandboxError
from harness.ledger import Ledger, Pending, Slot
from harness.order import TaskOrder
from harness.task import Task, Termination

SEEDS = 1_000
"""Between the seeds of two episodes: each turn takes the next one."""
TASKS = 100_000
"""Between the seeds of two samples of one task, in episodes; 21 samples stay below 2^31, which some endpoints ask for."""
LOST_IN_A_ROW = 5
"""Episodes per slot that infrastructure may lose without one success before the run stops."""


def lost_error(count: int, last: str) -> InfrastructureError:
    """What stops a run that produces nothing."""
    return InfrastructureError(f"{count} episodes in a row were lost; the last: {last}", hint="mend the cause, then --resume")


def capacity(*, concurrency: int, running: int, eta: float, consumed: int, batch: int, accepted: int) -> int:
    """How many episodes may start now (algorithm.md 4.5; consumed and accepted count since the start of training)."""
    return min(concurrency - running, int((eta + consumed + 1) * batch) - (accepted + running))


def complete_groups(pending: Sequence[Pending], group: int) -> list[Pending]:
    """The episodes of complete groups, groups in the order in which their last members completed."""
    members: dict[int, list[Pending]] = {}
    complete: list[Pending] = []
    for episode in pending:
        members.setdefault(episode.draw, []).append(episode)
        if len(members[episode.draw]) == group:
            complete += members[episode.draw]
    return complete


@dataclass(slots=True)
class Clock:
    """The numbers that admission and records need; the loop moves them."""

    version: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Scheduler limits: episodes in flight, staleness budget, batch size, tries per episode, episodes per prompt."""

    concurrency: int
    eta: float
    batch: int
    attempts: int
    group: int = 1


class Rollout:
    """Runs training episodes in the background until stopped."""

    def __init__(
        self,
        stage: Stage,
        tasks: Sequence[Task],
        ledger: Ledger,
        clock: Clock,
        limits: Admission,
        seed: int,
        generation: int = 1,
    ) -> None:
        self._stage, self._tasks, self._ledger, self._clock, self._limits = stage, tasks, ledger, clock, limits
        self._generation = generation
        self._order = TaskOrder(tasks, seed, ledger.get("drawn", 0))
        self._again: list[Slot] = []  # oldest draw first, or admission could fill up with groups that lack one member each
        self._given_up: set[int] = set()
        self._running: dict[asyncio.Task[None], str] = {}
        self._accepted = ledger.accepted()
        self._again += ledger.redo(limits.group)
        for draw in {slot.draw for slot in self._again if slot.failures >= limits.attempts}:
            self._give_up(draw)
        self._launched = 0
        self._changed = asyncio.Condition()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._lost = 0
        self._slot_s, self._since = 0.0, time.monotonic()

    def slot_seconds(self) -> float:
        """Episodes in flight, integrated over time since the start."""
        now = time.monotonic()
        self._slot_s += len(self._running) * (now - self._since)
        self._since = now
        return self._slot_s

    @property
    def running(self) -> int:
        """Episodes in flight."""
        return len(self._running)

    def start(self) -> None:
        """Begin to schedule."""
        self._loop = asyncio.create_task(self._schedule(), name="rollout")

    async def stop(self) -> None:
        """Abort what runs; every aborted episode is booked as dropped."""
        self._stopping = True
        if self._loop is not None:
            self._loop.cancel()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, *([self._loop] if self._loop else []), return_exceptions=True)
        for episode_id in self._running.values():  # cancelled before their first step
            self._ledger.drop(episode_id, Termination.ABORTED, "stopped")
        self._running.clear()

    async def moved(self) -> None:
        """The clock moved: admit again."""
        async with self._changed:
            self._changed.notify_all()

    def ready(self) -> list[Pending]:
        """Waiting episodes that a batch may take: those of complete groups."""
        return complete_groups(self._ledger.pending(), self._limits.group)

    async def wait_ready(self, count: int, timeout_s: float) -> None:
        """Return when at least `count` episodes are ready. Raises the scheduler's failure, or `InfrastructureError` after
        `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._failure is not None or len(self.ready()) >= count)
        except TimeoutError:
            raise InfrastructureError(
                f"no batch of {count} episodes within {timeout_s:.0f} s",
                hint="look at dropped episodes: `sao status RUN`",
            ) from None
        if self._failure is not None:
            raise self._failure

    async def _schedule(self) -> None:
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self.capacity() > 0)
                    for _ in range(self.capacity()):
                        self._launch()
        except Exception as error:  # noqa: BLE001 - the loop raises it out of `wait_ready`
            await self._fail(error)

    def capacity(self) -> int:
        """How many episodes admission would start now."""
        limits, clock = self._limits, self._clock
        return capacity(
            concurrency=limits.concurrency,
            running=len(self._running),
            eta=limits.eta,
            consumed=clock.consumed,
            batch=limits.batch,
            accepted=self._accepted,
        )

    def _launch(self) -> None:
        if not self._again:
            index = next(self._order)
            self._again += [Slot(self._order.drawn, index, member) for member in range(self._limits.group)]
        slot = self._again.pop(0)
        self._launched += 1
        episode_id = f"train-{self._generation}-{self._launched:07d}-{slot.index}-{slot.failures + 1}"
        task = self._tasks[slot.index]
        self._ledger.dispatch(episode_id, "train", task.id, slot, self._clock.version)
        self.slot_seconds()
        self._running[asyncio.create_task(self._run(task, slot, episode_id))] = episode_id

    async def _run(self, task: Task, slot: Slot, episode_id: str) -> None:
        runner = asyncio.current_task()
        assert runner is not None
        booked = False
        try:
            episode = await run_episode(self._stage, task, episode_id)
            failure = await self._book(episode, slot)
            booked = True
            if failure is not None:
                raise failure
        except Exception as error:  # noqa: BLE001 - the loop raises it out of `wait_ready`
            await self._fail(error)
        finally:
            self.slot_seconds()
            self._running.pop(runner)
            if not booked:
                reason = "stopped" if self._stopping else "failed"
                self._ledger.drop(episode_id, Termination.ABORTED, reason)
            async with self._changed:
                self._changed.notify_all()

    async def _book(self, episode: Episode, slot: Slot) -> InfrastructureError | None:
        """Write one outcome; the error that stops the run when nothing but infrastructure losses come in."""
        if episode.trainable:
            await save(self._ledger, episode)
            self._ledger.complete(episode, self._clock.version, "pending")
            self._accepted += 1
            self._lost = 0
            if slot.draw in self._given_up:
                self._give_up(slot.draw)
            return None
        reason = episode.error or f"the policy sampled nothing ({episode.termination.value})"
        self._ledger.drop(episode.id, episode.termination, reason)
        failures = slot.failures + 1
        if episode.termination.policy_caused or failures >= self._limits.attempts:
            self._give_up(slot.draw)
        elif slot.draw not in self._given_up:
            insort(self._again, replace(slot, failures=failures))
        self._lost += 1
        if self._lost < LOST_IN_A_ROW * self._limits.concurrency:
            return None
        return lost_error(self._lost, reason)

    def _give_up(self, draw: int) -> None:
        """A group that can no longer be completed: what it holds is dropped, and what it would still play is not played."""
        self._given_up.add(draw)
        self._again = [slot for slot in self._again if slot.draw != draw]
        for episode in self._ledger.pending():
            if episode.draw == draw:
                self._ledger.drop(episode.id, None, "a member of its group was lost")
                self._accepted -= 1

    async def drop_stale(self, episodes: list[str]) -> None:
        """Waiting episodes that grew too old: drop them, count them out of admission, play them again."""
        for episode_id in episodes:
            self._ledger.drop(episode_id, None, "too stale")
            insort(self._again, self._ledger.slot(episode_id))
        self._accepted -= len(episodes)
        await self.moved()

    async def _fail(self, error: BaseException) -> None:
        async with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


async def save(ledger: Ledger, episode: Episode, *, tokens: bool = True) -> None:
    """Write an episode's artifacts and (with `tokens`) its trajectory files. A full disk is an infrastructure failure with the
    next step.
    """

    def write() -> None:
        for trajectory in episode.trajectories if tokens else ():
            trajectory.save(ledger.path(episode.id, trajectory.segment))
        for name, data in episode.artifacts.items():
            path = ledger.artifact(episode.id, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise SandboxError(
            f"cannot write {ledger.trajectories.parent}: {error.strerror}", hint="free disk space, then --resume"
        ) from error


async def collect(
    stage: Stage,
    tasks: Iterable[tuple[Slot, Task]],
    ledger: Ledger,
    purpose: str,
    *,
    version: int,
    concurrency: int,
    attempts: int,
    generation: int = 1,
    seed: int | None = None,
    keep: bool = True,
    records: bool = False,
    heed: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play each slot's task with fixed weights (evaluation, value pre-training); infrastructure losses are retried.

    `keep` stores trajectories and leaves the episodes pending; otherwise they are booked as evaluated, and count as soon as
    they are judged, also if the policy had no room to say anything; `records` stores the trajectories of these too. Episodes
    are in the order of `tasks`; one lost in every try comes back as its last, rewardless episode. `heed` hears of each as it
    ends. Samples of a task differ by `Slot.member`.
    """
    gate = asyncio.Semaphore(concurrency)
    lost = 0

    async def play(slot: Slot, task: Task) -> Episode:
        episode = await judged(slot, task)
        if heed is not None:
            heed(episode)
        return episode

    async def judged(slot: Slot, task: Task) -> Episode:
        nonlocal lost
        sample = None if seed is None else seed + SEEDS * (slot.index + TASKS * slot.member)
        for attempt in range(1, attempts + 1):
            async with gate:
                episode_id = f"{purpose}-{generation}-{slot.draw:06d}-{attempt}"
                ledger.dispatch(episode_id, purpose, task.id, replace(slot, failures=attempt - 1), version)
                try:
                    episode = await run_episode(stage, task, episode_id, sample)
                except BaseException:
                    ledger.drop(episode_id, Termination.ABORTED, "stopped")
                    raise
                if episode.trainable or (not keep and episode.reward is not None):
                    await save(ledger, episode, tokens=keep or records)
                    ledger.complete(episode, version, "pending" if keep else "evaluated")
                    lost = 0
                    return episode
                reason = episode.error or f"the policy sampled nothing ({episode.termination.value})"
                ledger.drop(episode_id, episode.termination, reason)
                lost += 1
                if lost >= LOST_IN_A_ROW * concurrency:
                    raise lost_error(lost, reason)
        return episode

    async with asyncio.TaskGroup() as group:
        played = [group.create_task(play(slot, task)) for slot, task in tasks]
    return [task.result() for task in played]
