"""Group arms: a drawn task is played `group` times, a batch is made of complete groups, a lost member costs one episode."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.chat import Chat
from harness.errors import EngineError
from harness.ledger import Ledger, Pending, Slot
from harness.protocols import GenerateRequest, Generation
from harness.rollout import Clock, complete_groups
from harness.task import Termination
from tests.support import episode, run_virtual
from tests.unit.rollout_support import Job, TimedEngine, job


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.close()


class Planned(TimedEngine):
    """Takes the seconds of `plan` for (draw, member, failures), else 1; a negative number is a loss after as many seconds."""

    def __init__(self, ledger: Ledger, plan: dict[tuple[int, int, int], float] | None = None) -> None:
        super().__init__(Clock())
        self.ledger, self.plan = ledger, plan or {}

    async def generate(self, request: GenerateRequest) -> Generation:
        slot = self.ledger.slot(request.request_id.removesuffix("/0"))
        seconds = self.plan.get((slot.draw, slot.member, slot.failures), 1.0)
        await asyncio.sleep(abs(seconds))
        if seconds < 0:
            raise EngineError("down")
        return Generation([1, 257], [-0.5, -0.5], [self.clock.version] * 2, "stop")


def played(ledger: Ledger, draw: int) -> list[tuple[int, int, str]]:
    """(member, failures, status) of a draw's episodes, in order of dispatch."""
    rows = ledger._db.execute("SELECT member, attempt - 1, status FROM episodes WHERE draw = ? ORDER BY rowid", (draw,))
    return [tuple(row) for row in rows]


def of_draws(ledger: Ledger, episodes: list[str]) -> list[int]:
    return [ledger.slot(e).draw for e in episodes]


# --- complete groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completed", "group", "expected"),
    [
        ("", 2, ""),
        ("a1", 2, ""),
        ("a1 b1 b2 a2 c1", 2, "b1 b2 a1 a2"),
        ("a2 a1", 2, "a2 a1"),
        ("a1 b1 c1", 1, "a1 b1 c1"),
        ("a1 a2 a3 b1 b2 b3 b4 a4", 4, "b1 b2 b3 b4 a1 a2 a3 a4"),
    ],
)
def test_groups_come_in_the_order_in_which_their_last_members_completed(completed: str, group: int, expected: str) -> None:
    pending = [Pending(name, ord(name[0]), 1, 0, 0, 0) for name in completed.split()]
    assert [p.id for p in complete_groups(pending, group)] == expected.split()


@pytest.mark.parametrize(
    ("concurrency", "eta", "batch", "group"),
    [(64, 0.0, 8, 8), (64, 0.0, 8, 2), (64, 2.0, 8, 4), (16, 8.0, 8, 4), (5, 1.0, 8, 8), (64, 0.5, 4, 4), (3, 0.0, 4, 4)],
)
def test_batches_are_complete_groups_and_work_is_bounded(
    chat: Chat, ledger: Ledger, concurrency: int, eta: float, batch: int, group: int
) -> None:
    """Heavy-tailed episodes, a tenth of them lost; `Job` checks the bound all the time."""
    rng = random.Random(1)
    engine = TimedEngine(Clock(), fails=lambda _: rng.random() < 0.1)
    work = job(chat, ledger, concurrency=concurrency, eta=eta, batch=batch, attempts=9, group=group, engine=engine)
    run_virtual(work.run(10))
    assert [len(b) for b in work.batches] == [batch] * 10
    seen: set[int] = set()
    for names in work.batches:
        slots = [ledger.slot(e) for e in names]
        assert [s.draw for s in slots[::group]] == [s.draw for s in slots[group - 1 :: group]], "members side by side"
        for start in range(0, batch, group):
            members = slots[start : start + group]
            assert sorted(s.member for s in members) == list(range(group))
            assert len({s.index for s in members}) == 1
            assert members[0].draw not in seen, "each draw is trained once"
            seen.add(members[0].draw)
    if concurrency >= (eta + 1) * batch:
        assert work.peak == int((eta + 1) * batch), "the budget is used, so that the bound was tested"


def test_members_of_a_draw_share_task_and_draw_and_have_names_of_their_own(chat: Chat, ledger: Ledger) -> None:
    run_virtual(job(chat, ledger, concurrency=8, eta=0.0, batch=8, group=4, engine=Planned(ledger)).run(2))
    rows = ledger._db.execute("SELECT draw, COUNT(*), COUNT(DISTINCT id), COUNT(DISTINCT task_id) FROM episodes GROUP BY draw")
    assert [tuple(row) for row in rows] == [(draw, 4, 4, 1) for draw in (1, 2, 3, 4)]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_one_lost_member_is_played_again_alone(chat: Chat, ledger: Ledger) -> None:
    engine = Planned(ledger, {(1, 2, 0): -1.0})
    work = job(chat, ledger, concurrency=8, eta=0.0, batch=4, group=4, engine=engine)
    run_virtual(work.run(1))
    assert played(ledger, 1) == [(0, 0, "trained"), (1, 0, "trained"), (2, 0, "dropped"), (3, 0, "trained"), (2, 1, "trained")]
    assert ledger.reasons() == [("engine_error", "EngineError: down", 1)]
    assert ledger.replayed() == 1


def test_a_member_without_further_tries_gives_up_its_group(chat: Chat, ledger: Ledger) -> None:
    """At 2 s member 1 is lost for the second time: 0 waits and is dropped, 2 completes later and is dropped, 3 is lost later
    and is not played again. Admission counts all of them out, or there would be no second batch.
    """
    engine = Planned(ledger, {(1, 1, 0): -1.0, (1, 1, 1): -1.0, (1, 2, 0): 5.0, (1, 3, 0): -4.0})
    work = job(chat, ledger, concurrency=64, eta=0.0, batch=4, attempts=2, group=4, engine=engine)
    run_virtual(work.run(3))
    assert played(ledger, 1) == [(m, f, "dropped") for m, f in ((0, 0), (1, 0), (2, 0), (3, 0), (1, 1))]
    assert [of_draws(ledger, b) for b in work.batches] == [[2] * 4, [3] * 4, [4] * 4]
    assert ledger.counts() == {"trained": 12, "dropped": 5}
    assert ledger.accepted() == 12
    lost, siblings = sorted(ledger.reasons())
    assert (lost, siblings) == (("engine_error", "EngineError: down", 3), ("finished", "a member of its group was lost", 2))
    assert ledger.dropped() == {"engine_error": 3, "other": 2}


def test_a_given_up_group_is_not_dispatched_further(chat: Chat, ledger: Ledger) -> None:
    """Two slots: of the first draw's four members only the first two ever start."""
    engine = Planned(ledger, {(1, 0, 0): -1.0, (1, 1, 0): 3.0})
    work = job(chat, ledger, concurrency=2, eta=1.0, batch=4, attempts=1, group=4, engine=engine)
    run_virtual(work.run(1))
    assert played(ledger, 1) == [(0, 0, "dropped"), (1, 0, "dropped")]
    assert of_draws(ledger, work.batches[0]) == [2] * 4


def test_stale_members_are_played_again_and_their_siblings_stay(chat: Chat, ledger: Ledger) -> None:
    work = job(chat, ledger, concurrency=8, eta=0.0, batch=4, group=2, engine=Planned(ledger))

    async def run() -> None:
        work.rollout.start()
        await work.rollout.wait_ready(4, 100.0)
        before = {p.id: ledger.slot(p.id) for p in ledger.pending()}
        gone = next(e for e, slot in before.items() if (slot.draw, slot.member) == (1, 1))
        await work.rollout.drop_stale([gone])
        assert of_draws(ledger, [p.id for p in work.rollout.ready()]) == [2, 2]
        await work.rollout.wait_ready(4, 100.0)
        after = {p.id: ledger.slot(p.id) for p in work.rollout.ready()}
        (new,) = set(after) - set(before)
        assert set(before) - set(after) == {gone}
        assert after[new] == Slot(1, before[gone].index, 1), "a stale episode is no failed try"
        assert of_draws(ledger, list(after)) == [2, 2, 1, 1], "the group completed anew"
        assert work.rollout.capacity() == 0
        await work.rollout.stop()

    run_virtual(run())
    assert ledger.counts() == {"pending": 4, "dropped": 1}


# --- the next process ------------------------------------------------------------------------------------------------


def test_the_next_process_plays_exactly_the_missing_members(chat: Chat, ledger: Ledger, tmp_path: Path) -> None:
    """Killed with member 0 waiting, 1 running, 2 lost once, 3 to 5 never dispatched."""
    for member in range(3):
        ledger.dispatch(f"old{member}", "train", "train/7", Slot(1, 7, member), 0)
    ledger.complete(episode("old0"), 0, "pending")
    ledger.drop("old2", Termination.SANDBOX_LOST, "gone")
    book = Ledger(tmp_path)
    book.recover(0, 0)
    work = job(chat, book, concurrency=64, eta=0.0, batch=6, group=6, engine=Planned(book))
    run_virtual(work.run(1))
    old = [(0, 0, "trained"), (1, 0, "dropped"), (2, 0, "dropped")]
    assert played(book, 1) == old + [(1, 0, "trained"), (2, 1, "trained"), *((m, 0, "trained") for m in (3, 4, 5))]
    assert work.batches[0][0] == "old0"
    assert {book.slot(e).index for e in work.batches[0]} == {7}
    book.close()


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5])
def test_a_stopped_group_goes_on_in_the_next_process(chat: Chat, ledger: Ledger, seconds: float) -> None:
    """Members take 1, 2, 3 and 4 s; what completed before the stop is kept, the others are played once more."""
    engine = Planned(ledger, {(1, member, 0): member + 1.0 for member in range(4)})
    work = job(chat, ledger, concurrency=4, eta=0.0, batch=4, group=4, engine=engine)

    async def run() -> None:
        work.rollout.start()
        await asyncio.sleep(seconds)
        await work.rollout.stop()

    run_virtual(run())
    kept = {p.id for p in ledger.pending()}
    assert len(kept) == int(seconds)
    ledger.recover(0, 0)
    again = work.again()
    run_virtual(again.run(1))
    assert kept <= set(again.batches[0])
    assert of_draws(ledger, again.batches[0]) == [1] * 4
    assert ledger.counts() == {"trained": 4, "dropped": 4 - len(kept)}


def test_a_given_up_group_stays_given_up_in_the_next_process(chat: Chat, ledger: Ledger) -> None:
    """Killed after member 1's last try, before its siblings were dropped: 0 waits, 2 was running, 3 never began."""
    for member in range(3):
        ledger.dispatch(f"old{member}", "train", "train/7", Slot(1, 7, member, failures=member % 2), 0)
    ledger.dispatch("first", "train", "train/7", Slot(1, 7, 1), 0)
    ledger.complete(episode("old0"), 0, "pending")
    for name in ("first", "old1"):
        ledger.drop(name, Termination.ENGINE_ERROR, "down")
    ledger.recover(0, 0)
    work = job(chat, ledger, concurrency=64, eta=0.0, batch=4, attempts=2, group=4, engine=Planned(ledger))
    run_virtual(work.run(2))
    assert Counter(status for _, _, status in played(ledger, 1)) == {"dropped": 4}
    assert [of_draws(ledger, b) for b in work.batches] == [[2] * 4, [3] * 4]


def test_an_episode_aborted_in_a_later_epoch_is_played_again(chat: Chat, ledger: Ledger) -> None:
    """One task: its first epoch was trained, its second was running when the process died."""
    ledger.dispatch("epoch1", "train", "train/0", Slot(1, 0), 0)
    ledger.complete(episode("epoch1"), 0, "pending")
    ledger.consume(1, ["epoch1"], 0)
    ledger.dispatch("epoch2", "train", "train/0", Slot(2, 0), 1)
    ledger.recover(1, 1)
    work = job(chat, ledger, concurrency=1, eta=0.0, batch=1, size=1, engine=Planned(ledger))
    work.clock.version = work.clock.consumed = 1
    run_virtual(work.run(2))
    assert of_draws(ledger, [e for b in work.batches for e in b]) == [2, 3]
    assert played(ledger, 2) == [(0, 0, "dropped"), (0, 0, "trained")]


# --- all of it together ----------------------------------------------------------------------------------------------


async def _session(work: Job, rng: random.Random, seconds: float, killed: Path | None) -> None:
    """Train for a while with episodes that grow stale; then stop, or copy the ledger as a kill would leave it, and stop."""
    rollout, clock, ledger, limits = work.rollout, work.clock, work.ledger, work.limits
    start = rollout.running + ledger.accepted() - clock.consumed * limits.batch
    bound = max(start, int((limits.eta + 1) * limits.batch))

    async def train() -> None:
        while True:
            await rollout.wait_ready(limits.batch, 1_000.0)
            outstanding = rollout.running + ledger.accepted() - clock.consumed * limits.batch
            assert outstanding <= bound
            stale = [p.id for p in ledger.pending() if rng.random() < 0.05]
            if stale:
                await rollout.drop_stale(stale)
                continue
            batch = [p.id for p in rollout.ready()[: limits.batch]]
            ledger.consume(clock.consumed + 1, batch, clock.version)
            await asyncio.sleep(rng.uniform(0, 3))
            clock.version += limits.group > 1 or rng.random() < 0.7
            clock.consumed += 1
            ledger.finish_batch(clock.consumed)
            if rng.random() < 0.4:
                ledger.put("checkpoint", [clock.consumed, clock.version])
            await rollout.moved()

    rollout.start()
    try:
        async with asyncio.timeout(seconds):
            await train()
    except TimeoutError:
        pass
    if killed is not None:
        ledger._db.execute("VACUUM INTO ?", (str(killed / "ledger.sqlite"),))
    await rollout.stop()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_draw_is_whole_or_given_up(chat: Chat, tmp_path: Path, group: int, seed: int) -> None:
    """Random losses, stale drops, stops, kills and checkpoints that lie back: six processes, one book."""
    rng = random.Random(f"{seed}/{group}")
    attempts, eta = rng.choice([1, 2, 3]), rng.choice([0.0, 0.5, 2.0])
    engine = TimedEngine(Clock(), sigma=1.0, rng=rng, fails=lambda _: rng.random() < 0.2)
    folder = tmp_path / "0"
    ledger = Ledger(folder)
    limits: dict[str, Any] = {"concurrency": rng.choice([5, 64]), "eta": eta, "batch": 4, "attempts": attempts, "group": group}
    work = job(chat, ledger, **limits, engine=engine)
    for generation in range(1, 7):
        killed = rng.random() < 0.5
        folder = tmp_path / str(generation)
        folder.mkdir()
        run_virtual(_session(work, rng, rng.uniform(2, 25), folder if killed else None))
        if killed:
            ledger.close()
            ledger = Ledger(folder)
        work.clock.consumed, work.clock.version = ledger.get("checkpoint", [0, 0])
        ledger.recover(work.clock.consumed, work.clock.version)
        work.ledger = ledger
        work = work.again()
        _check(ledger, work, group, attempts)
    before = work.clock.consumed
    run_virtual(_session(work, rng, 60.0, None))
    assert work.clock.consumed > before + 3, "nothing of this history keeps it from going on"
    ledger.recover(work.clock.consumed, work.clock.version)
    _check(ledger, work, group, attempts)
    assert {"trained", "dropped"} <= set(ledger.counts("train"))
    ledger.close()


def _check(ledger: Ledger, work: Job, group: int, attempts: int) -> None:
    """Between two processes, and with a scheduler that has looked at the book."""
    rows = ledger._db.execute("SELECT * FROM episodes ORDER BY rowid").fetchall()
    todo = Counter((slot.draw, slot.member) for slot in ledger.redo(group))
    assert ledger.get("drawn") == max(row["draw"] for row in rows)
    for draw in {row["draw"] for row in rows}:
        mine = [row for row in rows if row["draw"] == draw]
        alive = Counter(row["member"] for row in mine if row["status"] in ("pending", "trained"))
        failed = Counter(r["member"] for r in mine if r["termination"] == "engine_error")
        assert len({row["task_index"] for row in mine}) == 1
        assert max(failed.values(), default=0) <= attempts
        if max(failed.values(), default=0) == attempts:
            assert not alive, "given up"
        else:
            assert sorted([*alive.elements(), *(m for d, m in todo.elements() if d == draw)]) == list(range(group))
        batches = {row["batch"] for row in mine if row["status"] == "trained"}
        assert len(batches) <= 1
        assert not batches or len(alive) == group, "a trained group is whole"
    sizes = Counter(row["batch"] for row in rows if row["status"] == "trained")
    assert sizes == dict.fromkeys(range(1, work.clock.consumed + 1), work.limits.batch)
