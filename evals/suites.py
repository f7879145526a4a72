"""What is asked: a suite by name, a configuration whose held-out tasks are asked, or a file of rows.

Flows in: what the user named. Flows out: a `Suite`: layers of configuration, runs per problem, and which split. The suites
that come with the package are `evals/suites/*.toml`: configuration as for `sao train`, with a table `[suite]`. Problems that a
licence or the network keeps away are loaded by name when they are asked.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.configfile import overlay
from harness.errors import ConfigError
from harness.registry import config_error, load_object, nearest
from harness.task import Split

SUITES = Path(__file__).parent / "suites"
ROWS = (".jsonl", ".json", ".csv", ".parquet")
BY_COLUMN = {"instance_id": "swe_verified", "problem": "aime_2025", "question": "aime_2025"}
"""A column that rows of a kind have -> the suite whose settings they are asked with."""


class SuiteTable(BaseModel):
    """The table `[suite]`."""

    model_config = ConfigDict(extra="forbid")

    base: Literal["mathematics"] | None = None
    """Configuration below this one, of `evals/suites/base`."""
    runs: int = Field(1, ge=1)
    """Samples of each problem; the score is their mean."""
    split: Split = "heldout"
    official: bool = False
    """Whether the environment's official judge is asked too (a method `official`)."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What is asked, and how."""

    name: str
    table: SuiteTable
    layers: dict[str, Any]
    """Configuration, below the model's and the user's."""


def suites() -> list[str]:
    """Names of the suites that come with the package."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(word: str) -> Suite:
    """A name, a TOML file, or a file of rows. Raises `ConfigError`."""
    path = Path(word)
    if word in suites():
        return _from_toml(word, SUITES / f"{word}.toml")
    if path.suffix == ".toml":
        return _from_toml(path.stem, path)
    if path.suffix in ROWS:
        return _from_rows(path)
    hint = f"{nearest(word, suites())}; or give a configuration (.toml), or rows ({', '.join(ROWS)})"
    raise ConfigError(f"suite {word!r} is not known", hint=hint)


def _from_toml(name: str, path: Path) -> Suite:
    try:
        layers = tomllib.loads(path.read_text())
        table = SuiteTable.model_validate(layers.pop("suite", {}))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", hint=nearest(name, suites())) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", hint="correct the file") from None
    except ValidationError as error:
        raise config_error(error, SuiteTable, prefix="suite") from None
    if table.base is not None:
        layers = overlay(tomllib.loads((SUITES / "base" / f"{table.base}.toml").read_text()), layers)
    return Suite(name, table, layers)


def _from_rows(path: Path) -> Suite:
    """Rows of mathematics or of SWE tasks, told apart by their columns; asked once each."""
    first = next(islice(load_object("environments.datasets:read")(str(path)), 1), None)
    if first is None:
        raise ConfigError(f"{path} has no rows", hint="give a file with at least one")
    columns = {name.strip().lower().replace(" ", "_") for name in first[1]}
    kind = next((suite for column, suite in BY_COLUMN.items() if column in columns), None)
    if kind is None:
        raise ConfigError(
            f"{path}: these are rows of no kind that is known; columns: {', '.join(sorted(columns))}",
            hint=f"rows need a column {' or '.join(BY_COLUMN)}; or write a configuration with an [environment] that reads them",
        )
    suite = _from_toml(kind, SUITES / f"{kind}.toml")
    environment = {k: v for k, v in suite.layers["environment"].items() if k != "split"} | {"dataset": str(path.resolve())}
    return Suite(path.stem, suite.table.model_copy(update={"runs": 1}), suite.layers | {"environment": environment})
