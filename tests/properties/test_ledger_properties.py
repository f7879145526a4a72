"""Invariant 6 as a state machine: in any order, with crashes, the counts close and nothing is trained twice."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.errors import InvariantError
from harness.ledger import Ledger, Slot
from harness.task import Termination
from tests.support import episode

PURPOSES = ("train", "value")


class Book(RuleBasedStateMachine):
    """The ledger beside a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-test-"))
        self.ledger = Ledger(self.folder)
        self.status: dict[str, str] = {}
        self.purpose: dict[str, str] = {}
        self.batch: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.queue: list[str] = []
        self.version = 0
        self.consumed = 0
        self.checkpoint = (0, 0)

    @initialize()
    def begin(self) -> None:
        self.ledger.put("checkpoint", [0, 0])

    def some(self, data: st.DataObject, *status: str, purpose: str | None = None) -> str | None:
        names = [n for n, s in self.status.items() if s in status and purpose in (None, self.purpose[n])]
        return data.draw(st.sampled_from(names)) if names else None

    @rule(purpose=st.sampled_from(PURPOSES))
    def dispatch(self, purpose: str) -> None:
        number = len(self.status)
        name = f"e{number}"
        self.ledger.dispatch(name, purpose, f"t{name}", Slot(number, number), self.version)
        self.status[name], self.purpose[name] = "running", purpose

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        name = self.some(data, "running")
        if name:
            sampled = data.draw(st.integers(0, self.version))
            self.ledger.complete(episode(name, version=sampled), self.version, "pending")
            self.status[name], self.highest[name] = "pending", sampled
            self.queue.append(name)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = self.some(data, "running", "pending")
        if name:
            self.ledger.drop(name, Termination.ABORTED, "test")
            self.status[name] = "dropped"

    @rule(data=st.data())
    def a_second_outcome_is_refused(self, data: st.DataObject) -> None:
        name = self.some(data, "dropped", "trained")
        if name:
            with pytest.raises(InvariantError):
                self.ledger.drop(name, None, "again")
            with pytest.raises(InvariantError):
                self.ledger.consume(self.consumed + 1, [name], self.version)
        name = self.some(data, "pending", "dropped", "trained")
        if name:
            with pytest.raises(InvariantError):
                self.ledger.complete(episode(name), self.version, "pending")

    @rule(data=st.data(), steps=st.booleans())
    def consume(self, data: st.DataObject, steps: bool) -> None:
        waiting = [n for n in self.queue if self.status[n] == "pending" and self.purpose[n] == "train"]
        if waiting:
            taken = waiting[: data.draw(st.integers(1, len(waiting)))]
            self.consumed += 1
            self.ledger.consume(self.consumed, taken, self.version)
            for name in taken:
                self.status[name], self.batch[name] = "trained", self.consumed
            self.version += steps
            self.ledger.finish_batch(self.consumed)

    @rule()
    def retire(self) -> None:
        self.ledger.retire("value")
        for name, status in self.status.items():
            if status == "pending" and self.purpose[name] == "value":
                self.status[name], self.batch[name] = "trained", 0

    @rule()
    def save_checkpoint(self) -> None:
        self.checkpoint = (self.consumed, self.version)
        self.ledger.put("checkpoint", list(self.checkpoint))

    @precondition(lambda self: self.status)
    @rule(clean=st.booleans())
    def die_and_recover(self, clean: bool) -> None:
        if clean:
            self.ledger.close()
        self.ledger = Ledger(self.folder)
        batches, version = self.ledger.get("checkpoint")
        self.ledger.recover(batches, version)
        self.consumed, self.version = batches, version
        for name, status in self.status.items():
            if status == "trained" and self.purpose[name] == "train" and self.batch[name] > batches:
                self.status[name] = "pending"
        for name, status in self.status.items():
            if status == "running" or (self.status[name] == "pending" and self.highest[name] > version):
                self.status[name] = "dropped"

    @invariant()
    def the_counts_close(self) -> None:
        for purpose in (None, *PURPOSES):
            mine = [s for n, s in self.status.items() if purpose in (None, self.purpose[n])]
            assert self.ledger.counts(purpose) == {s: mine.count(s) for s in set(mine)}
        assert sum(self.ledger.counts().values()) == len(self.status)

    @invariant()
    def the_queue_is_in_order_of_completion(self) -> None:
        for purpose in PURPOSES:
            expected = [n for n in self.queue if self.status[n] == "pending" and self.purpose[n] == purpose]
            assert [p.id for p in self.ledger.pending(purpose)] == expected

    @invariant()
    def admission_and_repetition_follow(self) -> None:
        train = {n: s for n, s in self.status.items() if self.purpose[n] == "train"}
        assert self.ledger.accepted() == sum(s in ("pending", "trained") for s in train.values())
        assert [slot.draw for slot in self.ledger.redo(1)] == sorted(int(n[1:]) for n, s in train.items() if s == "dropped")
        judged = {int(n[1:]) for n, s in train.items() if s in ("pending", "trained")}
        assert self.ledger.done("train") == judged

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)


TestBook: Any = Book.TestCase
TestBook.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
