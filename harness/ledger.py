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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.episode import Episode
from harness.errors import ConfigError, InvariantError
from harness.task import Termination

SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, purpose TEXT NOT NULL, task_id TEXT NOT NULL, task_index INTEGER NOT NULL,
    draw INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL, termination TEXT, reason TEXT, reward REAL,
    submit_version INTEGER NOT NULL, complete_version INTEGER, min_version INTEGER, max_version INTEGER,
    batch INTEGER, position INTEGER, segments INTEGER, action_tokens INTEGER, tokens INTEGER, turns INTEGER,
    submitted_s REAL NOT NULL, completed_s REAL);
CREATE INDEX IF NOT EXISTS by_status ON episodes (purpose, status, position);
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, version INTEGER NOT NULL, finished INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_INFRA = ", ".join(f"'{t.value}'" for t in Termination if not t.policy_caused and t is not Termination.ABORTED)


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one judged episode: member `member` of the group of the `draw`-th drawn task."""

    draw: int
    index: int
    """Of the task."""
    member: int = 0
    failures: int = 0
    """Episodes that infrastructure has lost here."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A completed episode that waits to be trained."""

    id: str
    draw: int
    segments: int
    min_version: int
    submit_version: int
    complete_version: int


@dataclass(frozen=True, slots=True)
class Judged:
    """An episode with a verdict."""

    id: str
    purpose: str
    task_id: str
    task_index: int
    reward: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a slot has come to: its verdict, or the last episode that was lost."""

    task_id: str
    task_index: int
    member: int
    status: str
    reward: float | None
    termination: str | None
    reason: str | None
    turns: int | None
    tokens: int | None
    action_tokens: int | None
    seconds: float | None


class Ledger:
    """One run's book. Calls are short and synchronous; one process writes."""

    def __init__(self, folder: Path) -> None:
        self.trajectories, self.artifacts = folder / "trajectories", folder / "artifacts"
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

    def artifact(self, episode_id: str, name: str) -> Path:
        """Where a file of an episode's verdict is stored."""
        return self.artifacts / episode_id / name

    def dispatch(self, episode_id: str, purpose: str, task_id: str, slot: Slot, version: int) -> None:
        """An episode starts. A training episode also moves the cursor of drawn tasks, in the same transaction."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO episodes (id, purpose, task_id, task_index, draw, member, attempt, status, submit_version, "
                "submitted_s) VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?, ?)",
                (
                    *(episode_id, purpose, task_id, slot.index, slot.draw, slot.member, slot.failures + 1),
                    *(version, time.time()),
                ),
            )
            if purpose == "train":
                self.put("drawn", max(slot.draw, self.get("drawn", 0)))

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
            completed_s=time.time(),
            **asdict(episode.used),
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
            "SELECT id, draw, segments, min_version, submit_version, complete_version FROM episodes "
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

    def judged(self) -> list[Judged]:
        """Every episode that has a reward, in order of completion."""
        rows = self._db.execute(
            "SELECT id, purpose, task_id, task_index, reward FROM episodes WHERE reward IS NOT NULL ORDER BY position"
        )
        return [Judged(**dict(row)) for row in rows]

    def attempts(self, purpose: str) -> dict[tuple[int, int], Attempt]:
        """What each (task index, member) of a purpose has come to so far."""
        rows = self._db.execute(
            "SELECT task_id, task_index, member, status, reward, termination, reason, turns, tokens, action_tokens, "
            "completed_s - submitted_s AS seconds FROM episodes WHERE purpose = ? AND status != 'running' ORDER BY rowid",
            (purpose,),
        )
        found: dict[tuple[int, int], Attempt] = {}
        for row in rows:
            attempt = Attempt(**dict(row))
            place = (attempt.task_index, attempt.member)
            if place not in found or found[place].reward is None:
                found[place] = attempt
        return found

    def artifacts_of(self, purpose: str) -> dict[tuple[int, int], Path]:
        """Folders of the files that the judged episodes of a purpose have left, by (task index, member)."""
        rows = self._db.execute(
            "SELECT id, task_index, member FROM episodes WHERE purpose = ? AND reward IS NOT NULL", (purpose,)
        )
        return {(row["task_index"], row["member"]): self.artifacts / row["id"] for row in rows}

    def retire(self, purpose: str) -> None:
        """Mark all waiting episodes of a purpose trained (value pre-training consumes them all at once)."""
        self._db.execute(
            "UPDATE episodes SET status = 'trained', batch = 0 WHERE purpose = ? AND status = 'pending'", (purpose,)
        )

    def redo(self, group: int) -> list[Slot]:
        """Training slots of drawn tasks that hold no episode and that none is being played for, for a resumed scheduler."""
        rows = self._db.execute(
            "SELECT draw, member, task_index, SUM(status != 'dropped') AS alive, "
            "SUM(status = 'dropped' AND complete_version IS NULL AND termination != 'aborted') AS failures "
            "FROM episodes WHERE purpose = 'train' GROUP BY draw, member ORDER BY draw, member"
        ).fetchall()
        known = {(row["draw"], row["member"]) for row in rows}
        slots = [Slot(r["draw"], r["task_index"], r["member"], r["failures"]) for r in rows if not r["alive"]]
        tasks = {row["draw"]: row["task_index"] for row in rows}
        slots += [Slot(d, index, m) for d, index in tasks.items() for m in range(group) if (d, m) not in known]
        return sorted(slots, key=lambda slot: (slot.draw, slot.member))

    def slot(self, episode_id: str) -> Slot:
        """Where an episode belongs; its failures are those counted when it was dispatched."""
        row = self._db.execute("SELECT draw, task_index, member, attempt FROM episodes WHERE id = ?", (episode_id,)).fetchone()
        return Slot(row["draw"], row["task_index"], row["member"], row["attempt"] - 1)

    def done(self, purpose: str) -> set[int]:
        """Task indices of a purpose that already have a judged episode."""
        rows = self._db.execute(
            "SELECT task_index FROM episodes WHERE purpose = ? AND status IN ('pending', 'trained', 'evaluated')",
            (purpose,),
        )
        return {row["task_index"] for row in rows}

    def batch_facts(self, number: int) -> dict[str, float]:
        """One batch: episodes, total tokens and action tokens; means of reward, success, versions at submission and completion,
        time of completion, and of the number of earlier draws of the same task.
        """
        row = self._db.execute(
            "SELECT COUNT(*) AS episodes, AVG(reward) AS reward, AVG(reward > 0.5) AS success, SUM(tokens) AS tokens, "
            "SUM(action_tokens) AS action_tokens, AVG(submit_version) AS submit_version, "
            "AVG(complete_version) AS complete_version, AVG(completed_s) AS completed_s, "
            "AVG((SELECT COUNT(DISTINCT b.draw) FROM episodes b WHERE b.purpose = 'train' AND b.task_index = a.task_index "
            "AND b.draw < a.draw)) AS epoch FROM episodes a WHERE batch = ? AND purpose = 'train'",
            (number,),
        ).fetchone()
        return {key: float(row[key]) for key in row.keys()}  # noqa: SIM118 - sqlite3.Row iterates values

    def batch_sources(self, number: int) -> dict[str, tuple[int, float, float]]:
        """One batch of a mixture by source, which is how a task id begins: episodes, mean reward, success."""
        rows = self._db.execute(
            "SELECT substr(task_id, 1, instr(task_id, '/') - 1) AS source, COUNT(*) AS n, AVG(reward) AS reward, "
            "AVG(reward > 0.5) AS success FROM episodes WHERE batch = ? AND purpose = 'train' GROUP BY 1 ORDER BY 1",
            (number,),
        )
        return {row["source"]: (row["n"], row["reward"], row["success"]) for row in rows}

    def infra_failure_frac(self, last: int = 200) -> float:
        """Share of the last finished training episodes that infrastructure lost."""
        row = self._db.execute(
            f"SELECT AVG(termination IN ({_INFRA})) AS share FROM (SELECT termination FROM episodes "
            "WHERE purpose = 'train' AND termination IS NOT NULL AND termination != 'aborted' "
            "ORDER BY completed_s DESC LIMIT ?)",
            (last,),
        ).fetchone()
        return float(row["share"] or 0.0)

    def dropped(self) -> dict[str, int]:
        """Dropped training episodes by termination; `other`: too old, or of a group that cannot be completed."""
        rows = self._db.execute(
            "SELECT IIF(complete_version IS NULL, COALESCE(termination, 'other'), 'other') AS cause, COUNT(*) AS n "
            "FROM episodes WHERE purpose = 'train' AND status = 'dropped' GROUP BY 1"
        )
        return {row["cause"]: row["n"] for row in rows}

    def replayed(self) -> int:
        """Training episodes that were second or later tries."""
        row = self._db.execute("SELECT COUNT(*) FROM episodes WHERE purpose = 'train' AND attempt > 1").fetchone()
        return int(row[0])

    def length_bias(self, first: int, last: int) -> float | None:
        """Tokens per episode that batches first..last consumed, over those of all episodes dispatched in the same span."""
        span = self._db.execute(
            "SELECT MIN(rowid) AS a, MAX(rowid) AS b, AVG(tokens) AS tokens FROM episodes "
            "WHERE purpose = 'train' AND batch BETWEEN ? AND ?",
            (first, last),
        ).fetchone()
        if span["a"] is None:
            return None
        row = self._db.execute(
            "SELECT AVG(tokens) FROM episodes WHERE purpose = 'train' AND rowid BETWEEN ? AND ?", (span["a"], span["b"])
        ).fetchone()
        return float(span["tokens"]) / float(row[0])

    def reasons(self) -> list[tuple[str, str, int]]:
        """(termination, reason, count) of the dropped episodes, most frequent first."""
        rows = self._db.execute(
            "SELECT COALESCE(termination, '-') AS termination, COALESCE(reason, '-') AS reason, COUNT(*) AS n FROM episodes "
            "WHERE status = 'dropped' GROUP BY 1, 2 ORDER BY n DESC LIMIT 20"
        )
        return [(row["termination"], row["reason"], row["n"]) for row in rows]

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
