"""The exactly-once book of a run: every dispatched episode, its one outcome, and which batch consumed it.

Flows in: dispatches, finished episodes, batches, checkpoints. Flows out: the next batch in order of completion, counts that
close. SQLite in WAL mode plus one parquet file per trajectory; a crash at any point leaves a book that `recover` can close.

    running ──▶ pending ──▶ trained      (in a batch that a checkpoint covers, or in the running process)
       │           └──────▶ dropped      too stale, or sampled with weights that a crash lost
       └─────────────────▶ dropped       infrastructure, abort, crash; the task is tried again
       └─────────────────▶ evaluated     held-out episodes never train
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.episode import Episode
from harness.errors import ConfigError, InvariantError
from harness.task import Termination

SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, purpose TEXT NOT NULL, task_id TEXT NOT NULL, task_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL, termination TEXT, reason TEXT, reward REAL,
    submit_version INTEGER NOT NULL, complete_version INTEGER, min_version INTEGER, max_version INTEGER,
    batch INTEGER, position INTEGER, segments INTEGER, action_tokens INTEGER, tokens INTEGER, turns INTEGER,
    submitted_s REAL NOT NULL, completed_s REAL);
CREATE INDEX IF NOT EXISTS by_status ON episodes (purpose, status, position);
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, version INTEGER NOT NULL, finished INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Pending:
    """A completed episode that waits to be trained."""

    id: str
    segments: int
    min_version: int
    submit_version: int
    complete_version: int


class Ledger:
    """One run's book. Calls are short and synchronous; one process writes."""

    def __init__(self, folder: Path) -> None:
        self.trajectories = folder / "trajectories"
        self.trajectories.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except sqlite3.OperationalError:  # a full or read-only disk, not a wrong file
            raise
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{folder / 'ledger.sqlite'} is not a ledger: {error}", hint="give a run folder") from error
        top = self._db.execute("SELECT COALESCE(MAX(position), 0) FROM episodes").fetchone()[0]
        self._position = int(top)
        self._watch = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def path(self, episode_id: str, segment: int = 0) -> Path:
        """Where a trajectory is stored."""
        return self.trajectories / f"{episode_id}.{segment}.parquet"

    def dispatch(self, episode_id: str, purpose: str, task_id: str, task_index: int, attempt: int, version: int) -> None:
        """An episode starts."""
        self._db.execute(
            "INSERT INTO episodes (id, purpose, task_id, task_index, attempt, status, submit_version, submitted_s) "
            "VALUES (?, ?, ?, ?, ?, 'running', ?, ?)",
            (episode_id, purpose, task_id, task_index, attempt, version, time.time()),
        )

    def complete(self, episode: Episode, version: int, status: str) -> None:
        """A judged episode; its trajectory files are already written. `status` is `pending` or `evaluated`."""
        self._position += 1
        versions = [int(v) for t in episode.trajectories for v in (t.policy_versions[t.loss_mask].min(initial=2**31 - 1),)]
        highest = [int(t.policy_versions.max(initial=-1)) for t in episode.trajectories]
        self._finish(
            episode.id,
            ("running",),
            status=status,
            termination=episode.termination.value,
            reward=episode.reward,
            complete_version=version,
            min_version=min(versions, default=version),
            max_version=max(highest, default=version),
            position=self._position,
            segments=len(episode.trajectories),
            action_tokens=sum(t.n_actions for t in episode.trajectories),
            tokens=sum(len(t) for t in episode.trajectories),
            turns=sum(t.n_turns for t in episode.trajectories),
            completed_s=time.time(),
        )

    def drop(self, episode_id: str, termination: Termination | None, reason: str) -> None:
        """An episode that will not be trained, and why."""
        fields: dict[str, Any] = {"status": "dropped", "reason": reason, "completed_s": time.time()}
        if termination is not None:
            fields["termination"] = termination.value
        self._finish(episode_id, ("running", "pending"), **fields)

    def _finish(self, episode_id: str, open_as: tuple[str, ...], **fields: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in fields)
        marks = ", ".join("?" for _ in open_as)
        done = self._db.execute(
            f"UPDATE episodes SET {names} WHERE id = ? AND status IN ({marks})", (*fields.values(), episode_id, *open_as)
        )
        if done.rowcount != 1:
            raise InvariantError(f"episode {episode_id} already has an outcome, or was never dispatched")

    def pending(self, purpose: str = "train") -> list[Pending]:
        """Episodes that wait, in order of completion."""
        rows = self._db.execute(
            "SELECT id, segments, min_version, submit_version, complete_version FROM episodes "
            "WHERE purpose = ? AND status = 'pending' ORDER BY position",
            (purpose,),
        )
        return [Pending(**dict(row)) for row in rows]

    def consume(self, number: int, episodes: list[str], version: int) -> None:
        """Give episodes to batch `number`, atomically; each exactly once."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("INSERT INTO batches VALUES (?, ?, 0)", (number, version))
            for episode_id in episodes:
                done = self._db.execute(
                    "UPDATE episodes SET status = 'trained', batch = ? WHERE id = ? AND status = 'pending'",
                    (number, episode_id),
                )
                if done.rowcount != 1:
                    raise InvariantError(f"episode {episode_id} is not pending and cannot be trained")

    def finish_batch(self, number: int) -> None:
        """The trainer finished batch `number`."""
        self._db.execute("UPDATE batches SET finished = 1 WHERE number = ?", (number,))

    def recover(self, batches: int, version: int) -> dict[str, int]:
        """Close the book after a stop or crash, at a checkpoint of `batches` consumed batches and policy `version`.

        Running episodes are dropped; batches beyond the checkpoint are given back; of what waits, episodes sampled with weights
        that no longer exist are dropped.
        """
        with self._db:
            self._db.execute("BEGIN")
            now = time.time()
            lost = self._db.execute(
                "UPDATE episodes SET status = 'dropped', termination = 'aborted', reason = 'the harness stopped', "
                "completed_s = ? WHERE status = 'running'",
                (now,),
            ).rowcount
            back = self._db.execute(
                "UPDATE episodes SET status = 'pending', batch = NULL "
                "WHERE status = 'trained' AND purpose = 'train' AND batch > ?",
                (batches,),
            ).rowcount
            self._db.execute("DELETE FROM batches WHERE number > ?", (batches,))
            future = self._db.execute(
                "UPDATE episodes SET status = 'dropped', reason = 'sampled with weights that were lost' "
                "WHERE status = 'pending' AND max_version > ?",
                (version,),
            ).rowcount
        return {"aborted": lost, "given_back": back, "lost_weights": future}

    def retire(self, purpose: str) -> None:
        """Mark all waiting episodes of a purpose trained (value pre-training consumes them all at once)."""
        self._db.execute(
            "UPDATE episodes SET status = 'trained', batch = 0 WHERE purpose = ? AND status = 'pending'", (purpose,)
        )

    def redo(self, purpose: str) -> list[tuple[int, int]]:
        """(task index, attempts) of tasks whose every try was dropped, for a resumed scheduler."""
        rows = self._db.execute(
            "SELECT task_index, MAX(attempt) AS attempt FROM episodes WHERE purpose = ? GROUP BY task_id, task_index "
            "HAVING SUM(status != 'dropped') = 0",
            (purpose,),
        )
        return [(row["task_index"], row["attempt"]) for row in rows]

    def done(self, purpose: str) -> set[int]:
        """Task indices of a purpose that already have a judged episode."""
        rows = self._db.execute(
            "SELECT task_index FROM episodes WHERE purpose = ? AND status IN ('pending', 'trained', 'evaluated')",
            (purpose,),
        )
        return {row["task_index"] for row in rows}

    def batch_facts(self, number: int) -> dict[str, float]:
        """Means over one batch's episodes: reward, success, turns, action tokens; and its total tokens."""
        row = self._db.execute(
            "SELECT AVG(reward) AS reward, AVG(reward > 0.5) AS success, AVG(turns) AS turns, "
            "AVG(action_tokens) AS action_tokens, SUM(tokens) AS tokens FROM episodes WHERE batch = ? AND purpose = 'train'",
            (number,),
        ).fetchone()
        return {key: float(row[key]) for key in row.keys()}  # noqa: SIM118 - sqlite3.Row iterates values

    def reasons(self) -> list[tuple[str, str, int]]:
        """(termination, reason, count) of the dropped episodes, most frequent first."""
        rows = self._db.execute(
            "SELECT COALESCE(termination, '-') AS termination, COALESCE(reason, '-') AS reason, COUNT(*) AS n FROM episodes "
            "WHERE status = 'dropped' GROUP BY 1, 2 ORDER BY n DESC LIMIT 20"
        )
        return [(row["termination"], row["reason"], row["n"]) for row in rows]

    def task_index(self, episode_id: str) -> tuple[int, int]:
        """(task index, attempt) of an episode."""
        row = self._db.execute("SELECT task_index, attempt FROM episodes WHERE id = ?", (episode_id,)).fetchone()
        return int(row["task_index"]), int(row["attempt"])

    def counts(self, purpose: str | None = None) -> dict[str, int]:
        """Episodes by outcome; the sum is the number dispatched."""
        where, args = ("WHERE purpose = ?", (purpose,)) if purpose else ("", ())
        rows = self._db.execute(f"SELECT status, COUNT(*) AS n FROM episodes {where} GROUP BY status", args)
        return {row["status"]: row["n"] for row in rows}

    def accepted(self) -> int:
        """Training episodes that were ever completed and not dropped: the `accepted_total` of admission control."""
        row = self._db.execute(
            "SELECT COUNT(*) FROM episodes WHERE purpose = 'train' AND status IN ('pending', 'trained')"
        ).fetchone()
        return int(row[0])

    def mean_reward(self, purpose: str) -> float:
        """Mean reward of the completed episodes of a purpose."""
        row = self._db.execute(
            "SELECT AVG(reward) FROM episodes WHERE purpose = ? AND reward IS NOT NULL", (purpose,)
        ).fetchone()
        return float(row[0] or 0.0)

    @contextmanager
    def stopwatch(self) -> Iterator[None]:
        """Add the time of the block to the run's `wall_s`, over all resumes."""
        self._watch = time.monotonic()
        try:
            yield
        finally:
            self.put("wall_s", self.wall_s())

    def wall_s(self) -> float:
        """Seconds that the run has been at work, this process included."""
        return float(self.get("wall_s", 0.0)) + time.monotonic() - self._watch

    def get(self, key: str, default: Any = None) -> Any:
        """A stored fact."""
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row["value"])

    def put(self, key: str, value: Any) -> None:
        """Store a fact."""
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))
