"""The ledger: every episode one outcome, every batch its own episodes, whatever moment the process dies at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ConfigError, InvariantError
from harness.ledger import Ledger, Slot
from harness.task import Termination, Usage
from tests.support import episode


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.close()


def start(ledger: Ledger, *names: str, purpose: str = "train", version: int = 0) -> None:
    """Each name a draw and a task of its own."""
    for name in names:
        ledger.dispatch(name, purpose, f"task/{name}", Slot(sum(map(ord, name)), sum(map(ord, name))), version)


def finish(ledger: Ledger, *names: str, version: int = 0, reward: float = 1.0) -> None:
    for name in names:
        ledger.complete(episode(name, version=version, reward=reward), version, "pending")


def waiting(ledger: Ledger, purpose: str = "train") -> list[str]:
    return [p.id for p in ledger.pending(purpose)]


def test_the_way_of_an_episode(ledger: Ledger) -> None:
    start(ledger, "a", version=2)
    assert ledger.counts() == {"running": 1}
    finish(ledger, "a", version=3)
    assert ledger.counts() == {"pending": 1}
    (p,) = ledger.pending()
    assert (p.id, p.segments, p.min_version, p.submit_version, p.complete_version) == ("a", 1, 3, 2, 3)
    ledger.consume(1, ["a"], 3)
    assert (ledger.counts(), waiting(ledger)) == ({"trained": 1}, [])


def test_what_was_used_is_that_of_the_trajectories_or_what_the_session_says(ledger: Ledger) -> None:
    start(ledger, "tokens", "told", purpose="eval")
    made = episode("tokens", segments=2)
    ledger.complete(made, 0, "evaluated")
    told = replace(episode("told"), trajectories=(), usage=Usage(turns=3, tokens=70, action_tokens=20))
    ledger.complete(told, 0, "evaluated")
    rows = ledger._db.execute("SELECT turns, tokens, action_tokens, segments FROM episodes ORDER BY position").fetchall()
    lengths, actions = sum(map(len, made.trajectories)), sum(t.n_actions for t in made.trajectories)
    assert [tuple(row) for row in rows] == [(4, lengths, actions, 2), (3, 70, 20, 0)]


def test_waiting_episodes_come_in_order_of_completion_not_of_dispatch(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c")
    finish(ledger, "c", "a", "b")
    assert waiting(ledger) == ["c", "a", "b"]


def test_order_goes_on_after_reopening(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    start(book, "a", "b", "c")
    finish(book, "b")
    book.close()
    book = Ledger(tmp_path)
    finish(book, "a", "c")
    assert waiting(book) == ["b", "a", "c"]
    book.close()


def test_no_second_dispatch_under_one_name(ledger: Ledger) -> None:
    start(ledger, "a")
    with pytest.raises(Exception, match="UNIQUE|already"):
        start(ledger, "a")
    assert ledger.counts() == {"running": 1}


def test_exactly_one_outcome(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c", "d")
    finish(ledger, "a")
    with pytest.raises(InvariantError):
        finish(ledger, "a")
    ledger.drop("b", Termination.SANDBOX_LOST, "gone")
    for again in (lambda: finish(ledger, "b"), lambda: ledger.drop("b", None, "x")):
        with pytest.raises(InvariantError):
            again()
    finish(ledger, "c")
    ledger.consume(1, ["c"], 0)
    for again in (lambda: finish(ledger, "c"), lambda: ledger.drop("c", None, "x")):
        with pytest.raises(InvariantError):
            again()
    with pytest.raises(InvariantError):
        finish(ledger, "never dispatched")
    assert ledger.counts() == {"pending": 1, "dropped": 1, "trained": 1, "running": 1}


@pytest.mark.parametrize("bad", [["a", "a"], ["a", "running"], ["a", "dropped"], ["a", "trained"], ["a", "nobody"]])
def test_a_batch_is_taken_whole_or_not_at_all(ledger: Ledger, bad: list[str]) -> None:
    start(ledger, "a", "running", "dropped", "trained")
    finish(ledger, "a", "trained")
    ledger.drop("dropped", None, "x")
    ledger.consume(1, ["trained"], 0)
    before = ledger.counts()
    with pytest.raises(InvariantError):
        ledger.consume(2, bad, 0)
    assert (ledger.counts(), waiting(ledger)) == (before, ["a"])
    ledger.consume(2, ["a"], 0)  # the number is still free


def test_a_batch_number_is_used_once(ledger: Ledger) -> None:
    start(ledger, "a", "b")
    finish(ledger, "a", "b")
    ledger.consume(1, ["a"], 0)
    with pytest.raises(Exception, match="UNIQUE|batch"):
        ledger.consume(1, ["b"], 0)
    assert waiting(ledger) == ["b"]


def test_versions_are_those_of_the_tokens(ledger: Ledger) -> None:
    start(ledger, "a", "b")
    finish(ledger, "b", version=4)
    finish(ledger, "a", version=7)
    assert [(p.id, p.min_version) for p in ledger.pending()] == [("b", 4), ("a", 7)]


# --- crashes ---------------------------------------------------------------------------------------------------------


def crash(path: Path, batches: int, version: int) -> tuple[Ledger, dict[str, int]]:
    """The next process opens the file (nobody closed it) and closes the book."""
    book = Ledger(path)
    return book, book.recover(batches, version)


def test_crash_while_running(tmp_path: Path) -> None:
    start(Ledger(tmp_path), "a")
    book, closed = crash(tmp_path, 0, 0)
    assert closed == {"aborted": 1, "given_back": 0, "lost_weights": 0}
    assert book.counts() == {"dropped": 1}
    assert book.reasons() == [("aborted", "the harness stopped", 1)]
    assert book.redo(1) == [Slot(ord("a"), ord("a"))]


def test_crash_while_waiting(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    start(book, "a")
    finish(book, "a")
    book, closed = crash(tmp_path, 0, 0)
    assert (sum(closed.values()), waiting(book)) == (0, ["a"])


@pytest.mark.parametrize("finished", [False, True])
def test_crash_after_a_batch_that_no_checkpoint_covers(tmp_path: Path, finished: bool) -> None:
    book = Ledger(tmp_path)
    start(book, "a", "b")
    finish(book, "b", "a")
    book.consume(1, ["b", "a"], 0)
    if finished:
        book.finish_batch(1)
    book, closed = crash(tmp_path, 0, 0)
    assert closed == {"aborted": 0, "given_back": 2, "lost_weights": 0}
    assert waiting(book) == ["b", "a"], "in the old order"
    book.consume(1, ["b", "a"], 0)
    assert book.counts() == {"trained": 2}


def test_crash_after_a_covered_batch_changes_nothing(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    start(book, "a")
    finish(book, "a")
    book.consume(1, ["a"], 0)
    book.finish_batch(1)
    book, closed = crash(tmp_path, 1, 1)
    assert (sum(closed.values()), book.counts()) == (0, {"trained": 1})


def test_episodes_of_lost_weights_are_dropped_and_their_tasks_done_again(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    start(book, "old", "new", "taken", version=0)
    finish(book, "old", version=1)
    finish(book, "new", "taken", version=2)
    book.consume(2, ["taken"], 2)
    book, closed = crash(tmp_path, 1, 1)
    assert closed == {"aborted": 0, "given_back": 1, "lost_weights": 2}
    assert waiting(book) == ["old"]
    assert [slot.failures for slot in book.redo(1)] == [0, 0]
    assert sum(book.counts().values()) == 3


def test_crash_in_the_middle_of_taking_a_batch(tmp_path: Path) -> None:
    """Killed inside the transaction: another process sees none of it."""
    book = Ledger(tmp_path)
    start(book, "a", "b")
    finish(book, "a", "b")
    book._db.execute("BEGIN")
    book._db.execute("UPDATE episodes SET status = 'trained', batch = 1 WHERE id = 'a'")
    book.close()  # without a commit, as kill -9
    book, closed = crash(tmp_path, 0, 0)
    assert (sum(closed.values()), waiting(book)) == (0, ["a", "b"])


def test_recovering_twice_is_recovering_once(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    start(book, "a", "b", version=1)
    finish(book, "a", version=1)
    book.consume(1, ["a"], 1)
    book, _ = crash(tmp_path, 0, 0)
    before = book.counts()
    book, closed = crash(tmp_path, 0, 0)
    assert (sum(closed.values()), book.counts()) == (0, before)


def test_other_purposes_keep_what_they_have(tmp_path: Path) -> None:
    """Retired value episodes carry batch 0 and must not be given back; evaluated ones neither."""
    book = Ledger(tmp_path)
    start(book, "v", purpose="value")
    start(book, "e", purpose="eval-before")
    finish(book, "v")
    book.complete(episode("e"), 0, "evaluated")
    book.retire("value")
    book, closed = crash(tmp_path, 0, 0)
    assert sum(closed.values()) == 0
    assert (book.counts("value"), book.counts("eval-before")) == ({"trained": 1}, {"evaluated": 1})


# --- questions -------------------------------------------------------------------------------------------------------


def test_retire_takes_the_waiting_ones_of_one_purpose(ledger: Ledger) -> None:
    start(ledger, "v1", "v2", "v3", purpose="value")
    start(ledger, "t")
    finish(ledger, "v1", "v3", "t")
    ledger.drop("v2", Termination.ENGINE_ERROR, "x")
    ledger.retire("value")
    assert ledger.counts("value") == {"trained": 2, "dropped": 1}
    assert waiting(ledger) == ["t"]
    assert ledger.accepted() == 1, "value episodes are not in the trainer's queue"


def test_redo_names_slots_without_any_result(ledger: Ledger) -> None:
    for failures in (0, 1):
        ledger.dispatch(f"x{failures}", "train", "task/x", Slot(1, 7, failures=failures), 0)
        ledger.drop(f"x{failures}", Termination.SANDBOX_LOST, "gone")
    ledger.dispatch("y1", "train", "task/y", Slot(2, 8), 0)
    ledger.drop("y1", Termination.SANDBOX_LOST, "gone")
    ledger.dispatch("y2", "train", "task/y", Slot(2, 8, failures=1), 0)
    ledger.complete(episode("y2"), 0, "pending")
    start(ledger, "z")
    start(ledger, "v", purpose="value")
    ledger.drop("v", None, "x")
    assert ledger.redo(1) == [Slot(1, 7, failures=2)]
    assert ledger.slot("x1") == Slot(1, 7, failures=1)


def test_a_result_in_another_epoch_does_not_stand_for_this_one(ledger: Ledger) -> None:
    for draw, name in enumerate(("epoch1", "epoch2"), 1):
        ledger.dispatch(name, "train", "t", Slot(draw, 7), 0)
    finish(ledger, "epoch1")
    ledger.consume(1, ["epoch1"], 0)
    ledger.drop("epoch2", Termination.ABORTED, "stopped")
    assert ledger.redo(1) == [Slot(2, 7)]


def test_redo_names_the_members_that_are_missing(ledger: Ledger) -> None:
    """Of a draw of four: one waits, one was lost, two were never dispatched."""
    for member in (0, 1):
        ledger.dispatch(f"m{member}", "train", "t", Slot(5, 3, member), 0)
    finish(ledger, "m1")
    ledger.drop("m0", Termination.ENGINE_ERROR, "gone")
    assert ledger.redo(4) == [Slot(5, 3, 0, 1), Slot(5, 3, 2), Slot(5, 3, 3)]
    assert ledger.redo(2) == [Slot(5, 3, 0, 1)]


@pytest.mark.parametrize("termination", list(Termination))
def test_failures_are_episodes_that_never_completed(ledger: Ledger, termination: Termination) -> None:
    """An episode that grew too stale, or whose sibling was lost, is not a failed try of its slot; an abort neither."""
    start(ledger, "lost", "stale")
    finish(ledger, "stale")
    ledger.drop("stale", None, "too stale")
    ledger.drop("lost", termination, "x")
    assert {slot.draw: slot.failures for slot in ledger.redo(1)} == {
        sum(map(ord, "lost")): int(termination is not Termination.ABORTED),
        sum(map(ord, "stale")): 0,
    }


def test_the_cursor_of_draws_never_goes_back(ledger: Ledger) -> None:
    for name, purpose, draw in (("a", "train", 3), ("b", "train", 2), ("v", "value", 9)):
        ledger.dispatch(name, purpose, "t", Slot(draw, 0), 0)
    assert ledger.get("drawn") == 3


def test_done_names_tasks_with_a_verdict(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c", "d", purpose="value")
    finish(ledger, "a", "b")
    ledger.complete(episode("d"), 0, "evaluated")
    ledger.drop("c", None, "x")
    assert ledger.done("value") == {ord("a"), ord("b"), ord("d")}
    assert ledger.done("train") == set()


def test_accepted_counts_waiting_and_trained_not_dropped(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c", "d")
    finish(ledger, "a", "b", "c")
    ledger.consume(1, ["a"], 0)
    ledger.drop("b", None, "too stale")
    assert ledger.accepted() == 2


def test_facts_survive(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    assert book.get("x") is None
    assert book.get("x", 3) == 3
    book.put("x", {"a": [1, None]})
    book.put("x", {"a": [2, None]})
    book.close()
    assert Ledger(tmp_path).get("x") == {"a": [2, None]}


def test_means(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c")
    finish(ledger, "a", reward=1.0)
    finish(ledger, "b", "c", reward=0.0)
    ledger.consume(1, ["a", "b"], 0)
    facts = ledger.batch_facts(1)
    assert (facts["reward"], facts["success"], facts["tokens"]) == (0.5, 0.5, 12)


def test_a_file_that_is_no_ledger_is_the_user_s_to_correct(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("this is not a database, it is text " * 10)
    with pytest.raises(ConfigError, match="ledger"):
        Ledger(tmp_path)


def test_segments_have_files_of_their_own(ledger: Ledger) -> None:
    start(ledger, "a")
    ledger.complete(episode("a", segments=3), 0, "pending")
    (p,) = ledger.pending()
    assert len({ledger.path(p.id, s) for s in range(p.segments)}) == 3
