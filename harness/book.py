"""The ledger and the trajectory files as `sao verify` reads them: without writing, without the lock, at one moment.

Flows in: a run folder. Flows out: a `Book`, and what is wrong with it: by itself, and against the files.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.trajectory import Trajectory

Row = dict[str, Any]
Fault = tuple[int, str]
"""(number of the invariant, what is wrong and where)."""

_JUDGED = ("reward", "segments", "position")
NEEDED: dict[str, tuple[str, ...]] = {
    "running": (),
    "pending": _JUDGED,
    "trained": (*_JUDGED, "batch"),
    "evaluated": _JUDGED,
    "dropped": ("reason",),
}
"""The outcomes, and what an episode's row must then have."""


@dataclass(frozen=True, slots=True)
class Book:
    """The ledger at one moment."""

    episodes: dict[str, Row]
    """By id."""
    batches: dict[int, Row]
    """By number."""
    checkpoint: Row
    """Batches that it covers, and its policy version."""
    records: bool = False
    """Whether evaluated episodes have files too."""

    @property
    def version(self) -> int:
        """The newest policy version that can have been published."""
        return max([int(self.checkpoint["version"]), *(int(batch["version"]) + 1 for batch in self.batches.values())])

    def stored(self) -> list[Row]:
        """Episodes whose trajectories are kept, in order of completion: for training, and of an evaluation's own models."""
        kept = ("pending", "trained", "evaluated") if self.records else ("pending", "trained")
        rows = [row for row in self.episodes.values() if row["status"] in kept]
        return sorted(rows, key=lambda row: row["position"] or 0)

    def pass_rates(self) -> dict[str, float]:
        """Of each task that was judged, by id: the share of its episodes with a reward above 0.5."""
        rewards: dict[str, list[float]] = {}
        for row in self.episodes.values():
            if row["reward"] is not None:
                rewards.setdefault(row["task_id"], []).append(row["reward"])
        return {task: sum(reward > 0.5 for reward in seen) / len(seen) for task, seen in rewards.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """What the ledger also says about one trajectory, from its file."""

    tokens: int
    action_tokens: int
    turns: int
    min_version: int
    max_version: int

    @classmethod
    def of(cls, t: Trajectory) -> Stored:
        """Counts and versions, as `Ledger.complete` takes them."""
        sampled = t.policy_versions[t.loss_mask]
        return cls(len(t), t.n_actions, t.n_turns, int(sampled.min(initial=2**31 - 1)), int(sampled.max(initial=-1)))


def read_book(run: Path) -> Book:
    """The ledger in one read transaction. Raises `ConfigError` if there is none, or it is damaged."""
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise ConfigError(f"{run} is not a run folder: it has no ledger", hint="give the folder that the run printed")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if not Path(f"{path}-shm").is_file():  # nobody has it open, and a reader would leave a -shm and a -wal behind
                for part in run.glob("ledger.sqlite*"):
                    shutil.copy(part, folder)
                path = Path(folder) / path.name
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
                return _read(db)
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'ledger.sqlite'} cannot be read: {error!r}", hint="give a run folder") from error


def _read(db: sqlite3.Connection) -> Book:
    db.row_factory = sqlite3.Row
    db.execute("BEGIN")
    episodes = {row["id"]: dict(row) for row in db.execute("SELECT * FROM episodes")}
    batches = {row["number"]: dict(row) for row in db.execute("SELECT * FROM batches")}
    facts = {row["key"]: row["value"] for row in db.execute("SELECT * FROM facts WHERE key IN ('checkpoint', 'records')")}
    checkpoint = json.loads(facts.get("checkpoint", '{"batches": 0, "version": 0}'))
    book = Book(episodes, batches, checkpoint, bool(json.loads(facts.get("records", "false"))))
    for row in episodes.values():  # SQLite stores any type in any column
        numbers = {key: value for key, value in row.items() if key not in ("id", "purpose", "task_id", "status")}
        numbers = {key: value for key, value in numbers.items() if key not in ("termination", "reason") and value is not None}
        if not all(isinstance(value, int | float) for value in numbers.values()):
            raise ValueError(f"episode {row['id']} has text where a number belongs: {numbers}")
    _ = book.version, int(book.checkpoint["batches"])
    return book


def files_of(row: Row) -> list[str]:
    """The trajectory files of a completed episode, by segment."""
    return [f"{row['id']}.{segment}.parquet" for segment in range(row["segments"] or 0)]


def row_of(book: Book, file: str) -> Row | None:
    """The episode that a file belongs to by its name."""
    return book.episodes.get(file.rsplit(".", 2)[0])


def unlike_row(book: Book, file: str, trajectory: Trajectory) -> Iterator[Fault]:
    """Where one file differs from its episode's row."""
    row = row_of(book, file)
    if row is None:
        return
    t = trajectory
    if file != f"{t.episode_id}.{t.segment}.parquet":
        yield 6, f"{file}: holds segment {t.segment} of episode {t.episode_id}"
    elif t.task_id != row["task_id"]:
        yield 6, f"{file}: is of task {t.task_id}, in the ledger {row['task_id']}"
    elif row["segments"] is not None and t.reward != row["reward"]:
        yield 6, f"{file}: reward {t.reward}, in the ledger {row['reward']}"


def unlike_files(book: Book, stored: dict[str, Stored]) -> Iterator[Fault]:
    """Where the files of an episode together differ from its row; of episodes whose files could all be read."""
    for row in book.episodes.values():
        names = files_of(row)
        parts = [stored[name] for name in names if name in stored]
        if not parts or len(parts) < len(names):
            continue
        for what in ("tokens", "action_tokens", "turns"):
            total = sum(getattr(part, what) for part in parts)
            if total != row[what]:
                yield 6, f"{names[0]}: {total} {what.replace('_', ' ')}, in the ledger {row[what]}"
        low, high = min(part.min_version for part in parts), max(part.max_version for part in parts)
        if (low, high) != (row["min_version"], row["max_version"]):
            yield 3, f"{names[0]}: versions {low} to {high}, in the ledger {row['min_version']} to {row['max_version']}"
        batch = book.batches.get(row["batch"]) if (row["purpose"], row["status"]) == ("train", "trained") else None
        newest = book.version if batch is None else batch["version"]
        if row["status"] in ("pending", "trained") and high > newest:
            yield 3, f"{names[0]}: sampled by version {high}, when {newest} was the newest"


def book_faults(book: Book, size: int) -> Iterator[Fault]:
    """The ledger by itself: one known outcome per episode, each slot filled once, batches of `size` without gaps."""
    slots: dict[tuple[int, int], str] = {}
    for name, row in book.episodes.items():
        yield from ((6, f"episode {name} {what}") for what in _row_faults(row, book))
        if row["purpose"] == "train" and row["status"] != "dropped":
            other = slots.setdefault((row["draw"], row["member"]), name)
            if other != name:
                yield 6, f"episodes {other} and {name} are both member {row['member']} of draw {row['draw']}"
    members = Counter(r["batch"] for r in book.episodes.values() if (r["purpose"], r["status"]) == ("train", "trained"))
    version = 0
    for expected, (number, batch) in enumerate(sorted(book.batches.items()), 1):
        if number != expected:
            yield 6, f"batch {expected} is missing"
            break
        if members[number] != size:
            yield 6, f"batch {number} has {members[number]} episodes, not {size}"
        if batch["version"] < version:
            yield 6, f"batch {number} was consumed at version {batch['version']}, after one at version {version}"
        if not batch["finished"] and number < max(book.batches):
            yield 6, f"batch {number} was not finished when the next began"
        version = batch["version"]
    if book.checkpoint["batches"] > len(book.batches):
        yield 6, f"the checkpoint covers {book.checkpoint['batches']} batches, and the ledger has {len(book.batches)}"


def _row_faults(row: Row, book: Book) -> Iterator[str]:
    status, batch = row["status"], row["batch"]
    if status not in NEEDED:
        yield f"has the outcome {status!r}"
        return
    yield from (f"is {status} and has no {column}" for column in NEEDED[status] if row[column] is None)
    if row["segments"] == 0 and status != "evaluated":
        yield "is completed without a trajectory"
    if status != "trained" and batch is not None:
        yield f"is {status}, but in batch {batch}"
    if status == "trained" and row["purpose"] == "train" and batch is not None and batch not in book.batches:
        yield f"was trained in batch {batch}, which the ledger does not have"
