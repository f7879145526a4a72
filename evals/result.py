"""The stored result of one evaluation: what every run of every problem came to.

Flows in: samples, as they were judged. Flows out: `result.json`, and the matrix of successes that the statistics work on. A
sample that was lost to infrastructure has no reward and is missing, never a failure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from evals.statistics import Floats
from harness.errors import ConfigError, InvariantError

VERSION = 1
NAME = "result.json"
ANEW = "`sao eval --resume FOLDER` writes it anew"
SUCCESS = 0.5
"""A reward above it is a success."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one problem."""

    problem: str
    run: int
    """Counted from 0."""
    reward: float | None
    """None: missing."""
    termination: str
    turns: int
    tokens: int
    """Prompts, actions and observations together."""
    action_tokens: int
    seconds: float
    error: str
    """Why it is missing; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of a suite. Raises `InvariantError` if they contradict each other."""

    suite: str
    model: str
    runs: int
    """Asked for per problem."""
    problems: tuple[str, ...]
    settings: dict[str, Any]
    """How it was asked, as JSON."""
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if len(set(self.problems)) != len(self.problems):
            raise InvariantError("a problem is listed twice")
        if self.runs < 1:
            raise InvariantError(f"runs = {self.runs}, must be at least 1")
        places = {(s.problem, s.run) for s in self.samples}
        if len(places) != len(self.samples):
            raise InvariantError("a run of a problem has two samples")
        known = set(self.problems)
        for s in self.samples:
            if s.problem not in known or not 0 <= s.run < self.runs:
                raise InvariantError(f"a sample is of problem {s.problem!r}, run {s.run}, which the result does not list")
            if not math.isfinite(s.seconds) or s.reward is not None and not math.isfinite(s.reward):
                raise InvariantError(f"a number of problem {s.problem!r}, run {s.run} is not finite")

    @property
    def successes(self) -> Floats:
        """[problems, runs]: 1 success, 0 failure, NaN missing."""
        rows = {problem: row for row, problem in enumerate(self.problems)}
        matrix = np.full((len(self.problems), self.runs), np.nan)
        for s in self.samples:
            if s.reward is not None:
                matrix[rows[s.problem], s.run] = s.reward > SUCCESS
        return matrix

    @property
    def judged(self) -> list[Sample]:
        """Those that are not missing."""
        return [s for s in self.samples if s.reward is not None]

    def only(self, problems: Sequence[str]) -> Result:
        """The same over some of its problems, in the order given."""
        kept = set(problems)
        samples = tuple(s for s in self.samples if s.problem in kept)
        return Result(self.suite, self.model, self.runs, tuple(problems), self.settings, samples)

    def save(self, path: Path) -> None:
        """Write atomically; half a surrogate pair, which JSON cannot hold, becomes `?`.

        path: a `.json` file, or the folder that shall hold `result.json`.
        """
        path = path if path.suffix == ".json" else path / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        stored = json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False, ensure_ascii=False)
        part.write_bytes(stored.encode("utf-8", "replace") + b"\n")
        os.replace(part, path)


@dataclass(frozen=True, slots=True)
class _Head:
    version: int


def load(path: Path) -> Result:
    """path: the file, or the folder that holds it. Raises `ConfigError` if it is none, damaged, or of another version."""
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_bytes()
    except OSError as error:
        hint = f"give the folder of an evaluation, or its {NAME}"
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    try:
        version = TypeAdapter(_Head).validate_json(text, strict=True).version
        if version != VERSION:
            raise ConfigError(
                f"{path} has version {version}, not {VERSION}", hint="read it with the sao that wrote it, or evaluate again"
            )
        return TypeAdapter(Result).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"{path} is no result of an evaluation: {what}", hint=ANEW) from error
    except InvariantError as error:
        raise ConfigError(f"{path} is damaged: {error.message}", hint=ANEW) from error
