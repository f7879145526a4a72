"""`sao verify RUN`: invariants 1 to 6 (`docs/architecture.md`) of a run, proved from its files alone.

Flows in: a run folder; it may still be written, or its process may have been killed, and nothing in it is written or locked.
Flows out: one `Check` per invariant. 4 and 5 are proved by `trainer.verify` on a sample, where torch is installed.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import ValidationError

from harness.book import Book, Fault, Stored, book_faults, files_of, read_book, row_of, unlike_files, unlike_row
from harness.config import Config
from harness.errors import ConfigError, InvariantError
from harness.registry import config_error, find, load_object
from harness.trajectory import Trajectory

NAMES = {
    1: "tokens never re-made",
    2: "spans tile",
    3: "log-probs and versions",
    4: "observations have no influence",
    5: "layout changes nothing",
    6: "the book closes",
}
SHOWN = 20
"""Faults of one invariant that are printed; the rest are counted."""
SAMPLE, SAMPLE_TOKENS = 64, 200_000
"""Trajectories and tokens on which 4 and 5 are proved, at most."""

TRAINER_NEEDS = ("torch", "transformers", "safetensors")
"""Distributions of the extra `train`."""


@dataclass(slots=True)
class Check:
    """What became of one invariant."""

    invariant: int
    proved: str = ""
    """What was looked at; empty: nothing."""
    unproved: str = ""
    """What could not be proved, and why."""
    faults: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """`FAILED`, `ok` or `not checked`."""
        return "FAILED" if self.faults else "ok" if self.proved else "not checked"


def verify(run: Path) -> list[Check]:
    """Check every trajectory file and the ledger. Raises `ConfigError` if `run` is not a run folder; all else is a fault."""
    folder = run / "trajectories"
    listed = {path.name for path in folder.glob("*.parquet")}  # before the ledger: a file is younger than its episode's row
    config, book = _config(run), read_book(run)
    due = {name for row in book.stored() for name in files_of(row)}
    faults = [*book_faults(book, config.algorithm.batch)]
    stored: dict[str, Stored] = {}
    counts: Counter[str] = Counter()
    for name in sorted(listed | due):
        if not (folder / name).is_file():
            faults.append((6, f"{name}: the file is missing"))
            continue
        faults += _stranger(name, book, config)
        trajectory, found = read(folder / name)
        if trajectory is not None:
            found = [*remade(trajectory), *versions_back(trajectory)]
            strange = [*unlike_row(book, name, trajectory)]
            faults += strange
            if not strange:
                stored[name] = Stored.of(trajectory)
            counts.update(files=1, spans=len(trajectory.spans), actions=trajectory.n_actions)
            if trajectory.info.get("calls") is not None:
                counts.update(recorded=1, turns=trajectory.n_turns)
        faults += [(number, f"{name}: {what}") for number, what in found]
    faults += unlike_files(book, stored)
    checks = {number: Check(number, faults=[what for n, what in faults if n == number]) for number in NAMES}
    _say(checks, book, counts)
    _prove_objective(checks, config, folder, book, stored)
    return list(checks.values())


def _say(checks: dict[int, Check], book: Book, counts: Counter[str]) -> None:
    """What was looked at."""
    if counts["recorded"]:
        checks[1].proved = f"{counts['recorded']:,} trajectories, {counts['turns']:,} turns"
    if without := counts["files"] - counts["recorded"]:
        checks[1].unproved = f"{without:,} trajectories without a record of their calls are not provable"
    checks[2].proved = f"{counts['files']:,} trajectories, {counts['spans']:,} spans"
    checks[3].proved = f"{counts['actions']:,} action tokens"
    outcomes = Counter(row["status"] for row in book.episodes.values())
    each = ", ".join(f"{n:,} {status}" for status, n in sorted(outcomes.items()))
    checks[6].proved = f"{len(book.episodes):,} episodes ({each or 'none'}), {len(book.batches):,} batches"


def lines(checks: list[Check]) -> Iterator[str]:
    """For people: a line per invariant, its faults below it, the verdict at the end."""
    for check in checks:
        facts = "; ".join(filter(None, (check.proved, check.unproved)))
        yield f"{check.invariant} {NAMES[check.invariant]:<33}{facts}  {check.state}"
        yield from (f"    {fault}" for fault in check.faults[:SHOWN])
        if len(check.faults) > SHOWN:
            yield f"    and {len(check.faults) - SHOWN:,} more"
    failed = [str(check.invariant) for check in checks if check.faults]
    skipped = [str(check.invariant) for check in checks if check.state == "not checked"]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "ok"
    yield verdict + (f"; not checked: {', '.join(skipped)}" if skipped else "")


def as_json(run: Path, checks: list[Check]) -> dict[str, Any]:
    """For programs: the same with every fault."""
    rows = [asdict(check) | {"name": NAMES[check.invariant], "state": check.state} for check in checks]
    return {"run": str(run), "ok": not any(check.faults for check in checks), "checks": rows}


def _config(run: Path) -> Config:
    """The saved configuration. What it names outside the folder (a model, say) need not be on this machine."""
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} is not a run folder", hint="give the folder that the run printed")
    try:
        return Config(**tomllib.loads((run / "config.toml").read_text()))
    except ValidationError as error:
        raise config_error(error, Config) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} has no readable config.toml: {error}", hint="give the folder that the run printed") from None


def _stranger(name: str, book: Book, config: Config) -> Iterator[Fault]:
    """A file that no episode of the run wrote. Given conversations are demonstrations without an episode."""
    row = row_of(book, name)
    given = config.sft is not None and config.sft.conversations is not None and name.startswith("conversation-")
    if row is None and not given:
        yield 6, f"{name}: no episode of the ledger has this file"
    if row is not None and row["segments"] is not None and name not in files_of(row):
        yield 6, f"{name}: the episode has {row['segments']} segments"


# --- one file: invariants 1 to 3 -------------------------------------------------------------------------------------


def read(path: Path) -> tuple[Trajectory | None, list[Fault]]:
    """The trajectory in a file, or what is wrong with it, with the position where there is one."""
    try:
        trajectory = Trajectory.load(path)
    except InvariantError as error:
        return None, _broken(path) or [(2, error.message)]
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        return None, [(2, f"not readable: {type(error).__name__}: {error}")]
    for index, span in enumerate(span for span in trajectory.spans if span.kind == "action"):
        if span.turn != index:
            return None, [(2, f"position {span.start}: turn {span.turn} goes on behind an observation")]
    return trajectory, []


def _broken(path: Path) -> list[Fault]:
    """The rules of `Trajectory` that a readable file breaks, each with its first position."""
    try:
        table = pq.read_table(path, partitioning=None)
        turns, logprobs, versions = (table[n].to_numpy() for n in ("turn", "rollout_logprob", "policy_version"))
        action = turns >= 0
        jumps = np.zeros(len(turns), np.bool_)
        jumps[action] = ~np.isin(np.diff(turns[action], prepend=0), (0, 1))
        jumps[np.flatnonzero(action)[:1]] |= turns[action][:1] != 0
        rules = (
            (2, "an observation has a turn other than -1", turns < -1),
            (2, "turns do not count up from 0", jumps),
            (3, "an action has no finite log-prob", action & ~np.isfinite(logprobs)),
            (3, "a log-prob is above 0", action & (logprobs > 1e-4)),
            (3, "an action has no version", action & (versions < 0)),
            (3, "an observation has a log-prob", ~action & ~np.isnan(logprobs)),
            (3, "an observation has a version", ~action & (versions != -1)),
        )
    except (OSError, KeyError, TypeError, ValueError):  # not even columns of numbers: `Trajectory.load` has said so
        return []
    return [(number, f"position {int(broken.argmax())}: {what}") for number, what, broken in rules if broken.any()]


def remade(trajectory: Trajectory) -> Iterator[Fault]:
    """The first place where the tokens are not those that the engine was sent and answered, by the digests in
    `info["calls"]`: per turn [tokens of the prompt, its digest, the digest of prompt and answer].

    One running hash, so that the cost is linear in the tokens whatever the number of turns.
    """
    calls = trajectory.info.get("calls")
    if calls is None:
        return
    actions = [span for span in trajectory.spans if span.kind == "action"]
    if not isinstance(calls, list) or len(calls) != len(actions):
        yield 1, f"the record of calls does not have one entry for each of {len(actions)} turns"
        return
    data, digest, proved = trajectory.tokens.astype("<i4"), hashlib.sha256(), 0
    for span, call in zip(actions, calls, strict=True):
        digest.update(data[proved : span.start].tobytes())
        prompt = digest.hexdigest()[:16]
        digest.update(data[span.start : span.stop].tobytes())
        if not isinstance(call, list) or len(call) != 3:
            yield 1, f"turn {span.turn}: {call!r} is no record of a call"
        elif call[0] != span.start:
            yield 1, f"position {span.start}: the engine was sent {call[0]} tokens for turn {span.turn}"
        elif call[1] != prompt:
            yield 1, f"positions {proved} to {span.start}: not the tokens that the engine was sent for turn {span.turn}"
        elif call[2] != digest.hexdigest()[:16]:
            yield 1, f"positions {span.start} to {span.stop}: not the tokens that the engine sampled in turn {span.turn}"
        else:
            proved = span.stop
            continue
        return


def versions_back(trajectory: Trajectory) -> Iterator[Fault]:
    """The first place where the policy version falls: weights only move on while a conversation does."""
    where = np.flatnonzero(trajectory.loss_mask)
    back = np.flatnonzero(np.diff(trajectory.policy_versions[where]) < 0)
    if back.size:
        yield 3, f"position {where[back[0] + 1]}: the policy version falls"


# --- the objective: invariants 4 and 5 -------------------------------------------------------------------------------


def _prove_objective(checks: dict[int, Check], config: Config, folder: Path, book: Book, stored: dict[str, Stored]) -> None:
    """By the trainer's own code, on the first whole groups of a group arm, or else on the first episodes."""
    acted = {name for name, part in stored.items() if part.action_tokens}
    usable = [row for row in book.stored() if acted.issuperset(files_of(row))]
    training = [row for row in usable if row["purpose"] == "train"]
    draws: dict[int, list[str]] = {}
    for row in training:
        draws.setdefault(row["draw"], []).extend(files_of(row))
    members = Counter(row["draw"] for row in training)
    groups = [names for draw, names in draws.items() if members[draw] == config.algorithm.group > 1]
    names = _first(groups or map(files_of, training or usable), stored)
    if not names:
        checks[4].unproved = checks[5].unproved = "no stored trajectory to prove it on"
        return
    try:
        prove = load_object("trainer.verify:prove")
        estimator = bool(groups) or not getattr(find("advantage", config.advantage.id), "groups", False)
        proofs = prove([Trajectory.load(folder / name) for name in names], config, estimator=estimator)
    except ConfigError as error:
        missing = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name in TRAINER_NEEDS
        checks[4].unproved = checks[5].unproved = "needs torch and transformers" if missing else error.message
    except Exception as error:  # noqa: BLE001 - estimators and losses may be anybody's
        for number in (4, 5):
            checks[number].faults.append(f"the objective fails on stored trajectories: {type(error).__name__}: {error}")
    else:
        for number, proof in proofs.items():
            checks[number] = Check(number, *proof)


def _first(units: Iterable[list[str]], stored: dict[str, Stored]) -> list[str]:
    """Files of the first whole units within the bounds of the sample, at least of one unit."""
    names: list[str] = []
    for unit in units:
        more = names + unit
        if names and (len(more) > SAMPLE or sum(stored[name].tokens for name in more) > SAMPLE_TOKENS):
            break
        names = more
    return names
