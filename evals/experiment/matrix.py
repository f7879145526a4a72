"""What an experiment runs: a TOML file of studies, each some arms x seeds, as `sao train` takes them.

    base = ["configs/corridor.toml"]
    seeds = [0, 1, 2]

    [arms]                          # laid over the base; an arm without an entry is the preset of its name, `sao` the base
    slow = ["trainer.optimizer.lr=1e-5"]

    [[study]]
    name = "stability"
    arms = ["sao", "grpo", "slow"]
    steps = 1000

Flows in: the file. Flows out: a `Matrix`, and its `Cell`s in the order in which they run: seed by seed, so that a matrix
that is stopped half way has whole comparisons. Every cell's configuration is validated before anything starts.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evals.evaluate import prepare
from evals.models import Model
from evals.suites import load_suite
from harness.configfile import load_config, presets
from harness.errors import ConfigError
from harness.registry import config_error, nearest

SAO = "sao"
"""The arm that the others are compared with: the base as it is."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class Study(BaseModel):
    """Arms under one question."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME)
    title: str = ""
    arms: list[str] = Field(min_length=1)
    steps: int = Field(ge=1)
    suites: list[str] = []
    """Suites of `sao eval` on which every final policy is judged, besides the run's own held-out tasks."""
    paper: Literal["main", "swe", "ablations", "step"] | None = None
    """The paper's table to which this study belongs."""


class Matrix(BaseModel):
    """The whole experiment."""

    model_config = ConfigDict(extra="forbid")

    title: str = "Experiment"
    setting: Literal["miniature", "paper"] = "miniature"
    """Whether models, data and scale are the paper's: only then do its numbers stand beside ours."""
    base: list[str] = Field(min_length=1)
    """Files and words of `sao train`, below every arm."""
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    seeded: list[str] = ["seed"]
    """Settings that take the seed."""
    arms: dict[Annotated[str, Field(pattern=NAME)], list[str]] = {}
    study: list[Study] = Field(min_length=1)

    def words(self, arm: str, seed: int, steps: int) -> list[str]:
        """The arguments of `sao train`."""
        above = self.arms.get(arm, [] if arm == SAO else [arm])
        return [*self.base, *above, *(f"{name}={seed}" for name in self.seeded), f"steps={steps}"]

    def cells(self) -> list[Cell]:
        """Every cell, seed by seed."""
        return [
            Cell(study.name, arm, seed, tuple(self.words(arm, seed, study.steps)), tuple(study.suites))
            for seed in self.seeds
            for study in self.study
            for arm in study.arms
        ]

    def check(self) -> None:
        """Raises `ConfigError` for what is named twice or not known, or that names the arm whose configuration cannot run."""
        self._names()
        for study in self.study:
            for suite in study.suites:
                load_suite(suite)
            for arm in study.arms:
                try:
                    config = load_config(self.words(arm, self.seeds[0], study.steps))
                    if config.model.path is not None:
                        asked = Model(arm, {"model": {"path": config.model.path, "stop": config.model.stop}})
                        for suite in study.suites:
                            prepare(load_suite(suite), asked, [], None, None)
                except ConfigError as error:
                    raise ConfigError(f"study {study.name!r}, arm {arm!r}: {error.message}", hint=error.hint) from error

    def _names(self) -> None:
        lists: dict[str, list[str]] = {"study": [s.name for s in self.study], "seeds": list(map(str, self.seeds))}
        for study in self.study:
            lists[f"study {study.name!r}: arms"] = study.arms
            lists[f"study {study.name!r}: suites, by the name of the file"] = [Path(word).stem for word in study.suites]
        for what, values in lists.items():
            if len(set(values)) < len(values):
                raise ConfigError(f"{what}: {values} names something twice", hint="name each of them once")
        for arm, words in self.arms.items():
            for word in words:
                if word.partition("=")[0].strip() in ("steps", *self.seeded):
                    raise ConfigError(
                        f"[arms] {arm}: {word!r} is the matrix's own", hint="steps are a study's; see `seeds`, `seeded`"
                    )
        known = [SAO, *self.arms, *presets()]
        for study in self.study:
            for arm in study.arms:
                if arm not in known:
                    raise ConfigError(
                        f"study {study.name!r}: arm {arm!r} is neither in [arms] nor a preset", hint=nearest(arm, known)
                    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    study: str
    arm: str
    seed: int
    words: tuple[str, ...]
    suites: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages, and its folder below the experiment's."""
        return f"{self.study}/{self.arm}-{self.seed}"


def load_matrix(path: Path) -> Matrix:
    """Raises `ConfigError` for whatever cannot be run."""
    try:
        matrix = Matrix(**tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", hint="give the path of a matrix file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", hint="correct the file") from None
    except ValidationError as error:
        raise config_error(error, Matrix, prefix=path.name) from None
    matrix.check()
    return matrix
