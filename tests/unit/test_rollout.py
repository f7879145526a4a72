"""T-ASYNC: the scheduler in virtual time, with heavy-tailed episodes. Bounded, first in first out, every episode booked."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.chat import Chat
from harness.episode import Stage
from harness.errors import ConfigError, InfrastructureError, InvariantError
from harness.ledger import Ledger, Slot
from harness.protocols import GenerateRequest, Generation
from harness.rollout import Clock, Rollout, capacity, collect
from harness.task import Task, Termination
from harness.trajectory import Trajectory
from tests.support import FnAgent, FnEnvironment, PlayedEngine, WatchedSandboxes, run_virtual, stage_of
from tests.unit.rollout_support import Job, TimedEngine, job


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.close()


@pytest.mark.parametrize(
    ("concurrency", "eta", "batch"), [(64, 0.0, 8), (64, 2.0, 8), (16, 8.0, 8), (5, 1.0, 8), (64, 0.5, 8), (3, 0.0, 1)]
)
def test_outstanding_work_is_bounded_at_all_times(chat: Chat, ledger: Ledger, concurrency: int, eta: float, batch: int) -> None:
    work = job(chat, ledger, concurrency=concurrency, eta=eta, batch=batch)
    run_virtual(work.run(12))
    if concurrency >= (eta + 1) * batch:
        assert work.peak == int((eta + 1) * batch), "the budget is used, so that the bound was tested"
    assert [len(b) for b in work.batches] == [batch] * 12


def test_synchronous_means_that_no_token_is_stale(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=64, eta=0.0, batch=8)
    run_virtual(work.run(6))
    for version, batch in enumerate(work.batches):
        made = [Trajectory.load(ledger.path(e)) for e in batch]
        assert {v for t in made for v in t.policy_versions[t.loss_mask].tolist()} == {version}


def test_no_episode_is_trained_twice_or_lost(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=32, eta=2.0, batch=8)
    run_virtual(work.run(20))
    trained = [e for b in work.batches for e in b]
    assert len(trained) == len(set(trained)) == 160
    counts = ledger.counts()
    assert counts["trained"] == 160
    assert "running" not in counts
    assert sum(counts.values()) == counts["trained"] + counts.get("pending", 0) + counts.get("dropped", 0)


def test_batches_are_first_in_first_out_by_completion(chat: Chat, ledger: Ledger) -> None:
    engine = TimedEngine(Clock())
    work = job(chat, ledger, concurrency=32, eta=2.0, batch=8, engine=engine)
    run_virtual(work.run(20))
    assert [e for b in work.batches for e in b] == engine.ends[:160]
    assert engine.ends[:160] != sorted(engine.ends[:160]), "the tail really mixes the order"


def test_versions_change_inside_a_trajectory_while_it_runs(chat: Chat, ledger: Ledger) -> None:
    """In-flight episodes go on across weight updates, and each token says which weights sampled it."""
    work = job(chat, ledger, concurrency=32, eta=2.0, batch=8)
    run_virtual(work.run(20))
    made = [Trajectory.load(ledger.path(e)) for b in work.batches for e in b]
    spread = [t.policy_versions[t.loss_mask].tolist() for t in made]
    assert all(a <= b for a, b in spread)
    assert any(a < b for a, b in spread)
    assert max(b - a for a, b in spread) > work.limits.eta, "the formula bounds the mean lag, not each one"


def test_no_deadlock_while_the_policy_is_frozen(chat: Chat, ledger: Ledger) -> None:
    """Admission counts consumed batches, not versions: critic-only batches move it too."""
    work = job(chat, ledger, concurrency=32, eta=2.0, batch=8, frozen=20)
    run_virtual(work.run(20))
    assert (len(work.batches), work.clock.version) == (20, 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"concurrency": 256, "running": 0, "eta": 8, "consumed": 0, "batch": 128, "accepted": 0}, 256),
        ({"concurrency": 2000, "running": 0, "eta": 8, "consumed": 0, "batch": 128, "accepted": 0}, 1152),
        ({"concurrency": 2000, "running": 100, "eta": 8, "consumed": 2, "batch": 128, "accepted": 300}, 1008),
        ({"concurrency": 8, "running": 8, "eta": 8, "consumed": 0, "batch": 128, "accepted": 0}, 0),
        ({"concurrency": 64, "running": 3, "eta": 0, "consumed": 1, "batch": 8, "accepted": 13}, 0),
        ({"concurrency": 64, "running": 0, "eta": 0.5, "consumed": 0, "batch": 3, "accepted": 0}, 4),
    ],
)
def test_capacity_by_hand(arguments: dict[str, Any], expected: int) -> None:
    assert capacity(**arguments) == expected


# --- task order ------------------------------------------------------------------------------------------------------


class Tasks(list[Task]):
    """A list that may say that it is a stream."""

    ordered: bool


def test_a_stream_is_played_in_its_order(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=16, eta=1.0, batch=8, size=100)
    tasks = Tasks(work.rollout._tasks)
    tasks.ordered = True
    work.rollout = Rollout(work.stage, tasks, ledger, work.clock, work.limits, 3, 1)
    run_virtual(work.run(6))
    played = [row[0] for row in ledger._db.execute("SELECT task_index FROM episodes ORDER BY rowid")]
    assert played == list(range(len(played))) and len(played) >= 48


def test_the_prompts_of_an_epoch_are_each_dispatched_once(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=16, eta=1.0, batch=8, size=16)
    run_virtual(work.run(4))
    rows = ledger._db.execute("SELECT task_index FROM episodes ORDER BY rowid LIMIT 32").fetchall()
    assert Counter(r[0] for r in rows) == dict.fromkeys(range(16), 2)


def test_no_tasks_is_the_user_s_to_correct(chat: Chat, ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="task"):
        run_virtual(_wait_once(job(chat, ledger, concurrency=4, eta=0.0, batch=2, size=0)))


async def _wait_once(work: Job, timeout_s: float = 1e4) -> None:
    work.rollout.start()
    try:
        await work.rollout.wait_ready(work.limits.batch, timeout_s)
    finally:
        await work.rollout.stop()


# --- losses ----------------------------------------------------------------------------------------------------------


def attempts_of(ledger: Ledger) -> dict[int, list[tuple[int, str]]]:
    rows = ledger._db.execute("SELECT task_index, attempt, status FROM episodes ORDER BY rowid").fetchall()
    tries: dict[int, list[tuple[int, str]]] = {}
    for index, attempt, status in rows:
        tries.setdefault(index, []).append((attempt, status))
    return tries


def test_lost_episodes_are_tried_again_up_to_the_limit_then_dropped(chat: Chat, ledger: Ledger) -> None:
    """Odd tasks lose every try, even ones their first."""

    def fails(request: GenerateRequest) -> bool:
        slot = ledger.slot(request.request_id.removesuffix("/0"))
        return slot.index % 2 == 1 or slot.failures == 0

    work = job(chat, ledger, concurrency=4, eta=0.0, batch=4, engine=TimedEngine(Clock(), fails=fails))
    run_virtual(work.run(6))
    tries = attempts_of(ledger)
    whole = {i: t for i, t in tries.items() if len(t) == 3 or t[-1][1] == "trained"}
    assert len(whole) > 24
    for index, rows in whole.items():
        if index % 2:
            assert rows == [(1, "dropped"), (2, "dropped"), (3, "dropped")]
        else:
            assert rows == [(1, "dropped"), (2, "trained")]
    assert max(len(t) for t in tries.values()) == 3
    assert {r[0] for r in ledger.reasons()} <= {"engine_error", "aborted"}


def test_the_same_task_may_be_lost_twice_at_once(chat: Chat, ledger: Ledger) -> None:
    """Fewer tasks than slots: one task runs several times side by side, and all of them are lost together."""
    lost = [True] * 8
    engine = TimedEngine(Clock(), sigma=0.0, fails=lambda _: bool(lost) and lost.pop())
    work = job(chat, ledger, concurrency=8, eta=0.0, batch=8, engine=engine, size=2)
    run_virtual(work.run(2))
    assert ledger.counts() == {"trained": 16, "dropped": 8}


def test_a_long_row_of_losses_stops_the_run_and_says_why(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=4, eta=1.0, batch=4, engine=TimedEngine(Clock(), fails=lambda _: True))
    with pytest.raises(InfrastructureError, match=r"in a row.*down"):
        run_virtual(work.run(1))
    counts = ledger.counts()
    assert set(counts) == {"dropped"}
    assert counts["dropped"] < 40


def test_a_prompt_that_never_fits_stops_the_run_too(chat: Chat, ledger: Ledger) -> None:
    """The policy samples nothing in any episode (`max_context` below the prompt): not an endless round of dispatches."""
    stage = stage_of(chat, PlayedEngine(chat, []), max_context=2)
    work = job(chat, ledger, concurrency=4, eta=0.0, batch=4, stage=stage)
    with pytest.raises(InfrastructureError, match="max_context"):
        run_virtual(_wait_once(work))
    assert ledger.counts()["dropped"] < 100


def test_losses_now_and_then_do_not_stop_the_run(chat: Chat, ledger: Ledger) -> None:
    rng = random.Random(1)
    work = job(chat, ledger, concurrency=4, eta=1.0, batch=4, engine=TimedEngine(Clock(), fails=lambda _: rng.random() < 0.5))
    run_virtual(work.run(20))
    assert ledger.counts()["dropped"] > 20


@pytest.mark.parametrize("error", [InvariantError("corrupt"), ConfigError("no image"), ZeroDivisionError()])
def test_a_failure_comes_out_of_wait_ready(chat: Chat, ledger: Ledger, error: Exception) -> None:
    def begin(task: Task, sandbox: Any) -> None:
        if isinstance(error, ZeroDivisionError):
            ledger.put = None  # type: ignore[method-assign, assignment]  # the next dispatch raises TypeError
            return
        raise error

    stage = stage_of(chat, TimedEngine(Clock()), environment=FnEnvironment(begin_hook=begin))
    work = job(chat, ledger, concurrency=2, eta=3.0, batch=8, stage=stage)
    with pytest.raises(TypeError if isinstance(error, ZeroDivisionError) else type(error)):
        run_virtual(_wait_once(work))
    assert "running" not in ledger.counts()


def test_a_full_disk_stops_the_run_with_the_next_step(chat: Chat, ledger: Ledger) -> None:
    class Full(type(ledger)):  # type: ignore[misc]
        def path(self, episode_id: str, segment: int = 0) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

    ledger.__class__ = Full
    work = job(chat, ledger, concurrency=2, eta=0.0, batch=2)
    with pytest.raises(InfrastructureError, match="No space left") as caught:
        run_virtual(_wait_once(work))
    assert "--resume" in caught.value.hint
    assert set(ledger.counts()) == {"dropped"}


def test_waiting_has_a_limit(chat: Chat, ledger: Ledger) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(1e9)

    stage = stage_of(chat, PlayedEngine(chat, []), agent=FnAgent(never), wall_s=1e8)
    work = job(chat, ledger, concurrency=2, eta=0.0, batch=2, stage=stage)
    with pytest.raises(InfrastructureError, match="no batch of 2 episodes within 60 s"):
        run_virtual(_wait_once(work, 60.0))


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 20])
def test_stop_books_everything_whenever_it_comes(chat: Chat, ledger: Ledger, rounds: int) -> None:
    """After any number of turns of the event loop: also episodes that were dispatched but have not begun."""
    engine = TimedEngine(Clock())
    sandboxes = WatchedSandboxes()
    work = job(chat, ledger, concurrency=8, eta=1.0, batch=8, engine=engine, stage=stage_of(chat, engine, sandboxes=sandboxes))

    async def run() -> None:
        work.rollout.start()
        for _ in range(rounds):
            await asyncio.sleep(0)
        await work.rollout.stop()

    run_virtual(run())
    counts = ledger.counts()
    assert set(counts) <= {"dropped"}
    assert counts.get("dropped", 0) in (0, 8)
    assert rounds < 2 or counts["dropped"] == 8
    assert [r[:2] for r in ledger.reasons()] in ([], [("aborted", "stopped")])
    assert all(s.closed == 1 for s in sandboxes.made)
    assert work.rollout.running == 0


def test_stopping_twice_is_stopping_once(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=4, eta=1.0, batch=4)

    async def run() -> None:
        work.rollout.start()
        await asyncio.sleep(0.3)
        await work.rollout.stop()
        before = ledger.counts()
        await work.rollout.stop()
        assert ledger.counts() == before

    run_virtual(run())


def test_aborted_tasks_are_played_by_the_next_process(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=4, eta=0.0, batch=4, engine=TimedEngine(Clock(), sigma=0.0))

    async def run() -> None:
        work.rollout.start()
        await asyncio.sleep(0.5)
        await work.rollout.stop()

    run_virtual(run())
    aborted = [slot.index for slot in ledger.redo(1)]
    assert len(aborted) == 4
    ledger.recover(0, 0)
    again = work.again()
    run_virtual(again.run(2))
    tries = attempts_of(ledger)
    assert all(tries[i] == [(1, "dropped"), (1, "trained")] for i in aborted), "an abort is not a failed try"
    assert sum(ledger.counts().values()) == 12


def test_stale_episodes_are_dropped_counted_out_and_tried_again(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=8, eta=0.0, batch=4, engine=TimedEngine(Clock(), sigma=0.0))

    async def run() -> None:
        work.rollout.start()
        await work.rollout.wait_ready(4, 100.0)
        old = [p.id for p in ledger.pending()]
        await work.rollout.drop_stale(old)
        await work.rollout.wait_ready(4, 100.0)
        fresh = [p.id for p in ledger.pending()]
        assert not set(old) & set(fresh)
        assert sorted(ledger.slot(e).draw for e in old) == sorted(ledger.slot(e).draw for e in fresh)
        await work.rollout.stop()

    run_virtual(run())
    assert ledger.accepted() == 4
    assert ledger.reasons() == [("finished", "too stale", 4)]


# --- collect ---------------------------------------------------------------------------------------------------------


def gather(stage: Stage, ledger: Ledger, indices: list[int], **more: Any) -> Any:
    tasks = FnEnvironment(size=100).tasks("train")
    options = {"version": 0, "concurrency": 3, "attempts": 3} | more
    return run_virtual(collect(stage, [(Slot(n, i), tasks[i]) for n, i in enumerate(indices)], ledger, "value", **options))


def test_collect_plays_each_task_and_keeps_the_order(chat: Chat, ledger: Ledger) -> None:
    sandboxes = WatchedSandboxes()
    episodes = gather(stage_of(chat, TimedEngine(Clock()), sandboxes=sandboxes), ledger, [5, 2, 9, 4])
    assert [e.task_id for e in episodes] == ["train/5", "train/2", "train/9", "train/4"]
    assert ledger.counts("value") == {"pending": 4}
    assert all(ledger.path(e.id).is_file() for e in episodes)


def test_collect_respects_concurrency(chat: Chat, ledger: Ledger) -> None:
    peak = now = 0

    async def agent(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        nonlocal peak, now
        now += 1
        peak = max(peak, now)
        await session.complete(list(task.messages))
        now -= 1
        return Termination.FINISHED

    gather(stage_of(chat, TimedEngine(Clock()), agent=FnAgent(agent)), ledger, list(range(20)))
    assert peak == 3


def test_collect_plays_a_task_that_comes_twice_twice(chat: Chat, ledger: Ledger) -> None:
    """More episodes are wanted than there are tasks: the second epoch repeats them."""
    episodes = gather(stage_of(chat, TimedEngine(Clock())), ledger, [0, 1, 0, 1, 0])
    assert len({e.id for e in episodes}) == 5
    assert ledger.counts("value") == {"pending": 5}


def test_collect_retries_losses_and_gives_up(chat: Chat, ledger: Ledger) -> None:
    def fails(request: GenerateRequest) -> bool:
        slot = ledger.slot(request.request_id.removesuffix("/0"))
        return (slot.index, slot.failures) != (0, 1)

    engine = TimedEngine(Clock(), fails=fails)
    lost, played = gather(stage_of(chat, engine), ledger, [1, 0])
    assert (lost.reward, lost.termination) == (None, Termination.ENGINE_ERROR)
    assert played.reward == 1.0
    assert ledger.counts("value") == {"dropped": 4, "pending": 1}


def test_collect_for_evaluation_stores_no_trajectory(chat: Chat, ledger: Ledger) -> None:
    gather(stage_of(chat, TimedEngine(Clock())), ledger, [0, 1], keep=False)
    assert ledger.counts("value") == {"evaluated": 2}
    assert list(ledger.trajectories.iterdir()) == []


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_judged_counts_in_an_evaluation_and_not_for_training(chat: Chat, ledger: Ledger, keep: bool) -> None:
    """The prompt alone is longer than the context: the policy says nothing, and gets the reward of that."""
    (episode,) = gather(stage_of(chat, PlayedEngine(chat, []), max_context=2), ledger, [0], keep=keep)
    assert (episode.termination, episode.reward, episode.trajectories) == (Termination.MAX_CONTEXT, 1.0, ())
    assert ledger.counts("value") == ({"dropped": 3} if keep else {"evaluated": 1})
    assert [judged.reward for judged in ledger.judged()] == ([] if keep else [1.0])


def test_an_evaluated_episode_without_a_verdict_is_tried_again(chat: Chat, ledger: Ledger) -> None:
    (lost,) = gather(stage_of(chat, TimedEngine(Clock(), fails=lambda _: True)), ledger, [0], keep=False)
    assert (lost.reward, ledger.counts("value")) == (None, {"dropped": 3})


def test_a_cancelled_collect_books_what_ran(chat: Chat, ledger: Ledger) -> None:
    async def run() -> None:
        tasks = FnEnvironment(size=9).tasks("train")
        stage = stage_of(chat, TimedEngine(Clock(), sigma=0.0))
        work = asyncio.create_task(
            collect(
                stage,
                [(Slot(i, i), task) for i, task in enumerate(tasks)],
                ledger,
                "value",
                version=0,
                concurrency=3,
                attempts=1,
            )
        )
        await asyncio.sleep(0.5)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run_virtual(run())
    assert ledger.counts("value") == {"dropped": 3}


def test_seeds_are_the_task_s_own(chat: Chat, ledger: Ledger, tmp_path: Path) -> None:
    """Evaluation before and after samples each task with the same seed, whatever order the episodes end in."""

    class Noting(TimedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            seeds.append((request.request_id.rsplit("-", 1)[0], request.seed))
            return await super().generate(request)

    seeds: list[tuple[str, int | None]] = []
    gather(stage_of(chat, Noting(Clock())), ledger, [0, 1, 2], seed=9, keep=False)
    first = dict(seeds)
    assert len(set(first.values())) == 3
    other = Ledger(tmp_path / "other")
    seeds.clear()
    gather(stage_of(chat, Noting(Clock(), rng=random.Random(5))), other, [0, 1, 2], seed=9, keep=False)
    assert dict(seeds) == first
