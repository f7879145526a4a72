"""Several environments in one run: each with a weight, a name in every task id, and a filter by recorded difficulty.

Flows in: the tables of the parts. Flows out: their tasks as one sequence whose ids begin with the part's name (`NAME/ID`),
drawn by weight (`harness/order.py`); everything else is the part's own.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.book import read_book
from harness.engines.scripted import Script
from harness.errors import ConfigError, SandboxError
from harness.order import Share
from harness.protocols import Environment, LiveTask, Sandbox
from harness.registry import environment, plugin_config
from harness.task import LazyTasks, Split, Task


class Part(BaseModel):
    """One environment of a mixture: its `id` and its own keys beside ours."""

    model_config = ConfigDict(extra="allow")

    id: str
    name: str = Field("", pattern=r"^[\w.-]*$")
    """In task ids and metrics; empty: the id."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Tasks are drawn in proportion to it."""
    pass_rates: str | None = None
    """A run folder. Training tasks of which it has episodes are kept only if their share of successes lies in `keep`."""
    keep: tuple[float, float] = (0.05, 0.95)

    @property
    def table(self) -> dict[str, Any]:
        """The environment's own."""
        return {"id": self.id, **(self.model_extra or {})}

    @field_validator("pass_rates")
    @classmethod
    def _a_run(cls, folder: str | None) -> str | None:
        if folder is not None and not (Path(folder) / "ledger.sqlite").is_file():
            raise ValueError("no run folder: it has no ledger")
        return folder

    @model_validator(mode="after")
    def _named(self) -> Part:
        self.name = self.name or self.id.rpartition(":")[2]
        if not self.keep[0] <= self.keep[1]:
            raise ValueError(f"keep = {list(self.keep)}: the lower bound comes first")
        return self


class MixtureConfig(BaseModel):
    """Options of a mixture."""

    model_config = ConfigDict(extra="forbid")

    parts: list[Part] = Field(min_length=1)

    @model_validator(mode="after")
    def _sound(self) -> MixtureConfig:
        for number, part in enumerate(self.parts):
            plugin_config("environment", part.table, f"environment.parts.{number}", beside=[*Part.model_fields])
        names = [part.name for part in self.parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two parts are called {twice[0]!r}: give one of them another `name`")
        return self


class Mixture:
    """See the module docstring."""

    Config = MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        self.config = config
        self._parts: dict[str, Environment] = {}
        for number, part in enumerate(config.parts):
            where = f"environment.parts.{number}"
            self._parts[part.name] = environment(part.table, prefix=where)
        if all(hasattr(made, "solver") for made in self._parts.values()):
            self.solver = self._solver

    def tasks(self, split: Split) -> Sequence[Task]:
        """The parts' tasks, one part after another."""
        return Mixed([(part, self._kept(part, split)) for part in self.config.parts])

    def _kept(self, part: Part, split: Split) -> Sequence[Task]:
        tasks = self._parts[part.name].tasks(split)
        if part.pass_rates is None or split == "heldout":
            return tasks
        rates, (low, high) = read_book(Path(part.pass_rates)).pass_rates(), part.keep
        known = [(task, rates.get(f"{part.name}/{task.id}", rates.get(task.id))) for task in tasks]
        kept = [task for task, rate in known if rate is None or low <= rate <= high]
        if not kept:
            raise ConfigError(
                f"part {part.name!r}: no training task has a pass rate from {low} to {high} in {part.pass_rates}",
                hint="widen `keep`",
            )
        return kept

    def part(self, task: Task) -> tuple[Environment, Task]:
        """Whose task it is, and the task as that environment knows it."""
        name, _, own = task.id.partition("/")
        return self._parts[name], replace(task, id=own)

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """As the part does."""
        made, own = self.part(task)
        return await made.begin(own, sandbox)

    def _solver(self, task: Task) -> Script:
        """As the part does."""
        made, own = self.part(task)
        script: Script = made.solver(own)  # type: ignore[attr-defined]
        return script

    async def rejoin(self, task: Task, sandbox: Sandbox, state: Any) -> LiveTask:
        """As the part does, if it can."""
        made, own = self.part(task)
        if (rejoin := getattr(made, "rejoin", None)) is None:
            raise SandboxError(f"{task.id}: its environment takes up no task that another process has begun")
        live: LiveTask = await rejoin(own, sandbox, state)
        return live


class Mixed(LazyTasks):
    """The tasks of several parts, one part after another; `shares` says how many are whose, and how often to draw them."""

    def __init__(self, parts: Iterable[tuple[Part, Sequence[Task]]]) -> None:
        self._parts = list(parts)
        self.shares = [Share(part.name, len(tasks), part.weight) for part, tasks in self._parts]
        self._ends = list(accumulate(share.size for share in self.shares))
        super().__init__(self._ends[-1])

    def make(self, index: int) -> Task:
        """See `LazyTasks`."""
        number = bisect(self._ends, index)
        part, tasks = self._parts[number]
        task = tasks[index - self._ends[number] + len(tasks)]
        return replace(task, id=f"{part.name}/{task.id}")
