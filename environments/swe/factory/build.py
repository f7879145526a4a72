"""`sao tasks build` and `sao tasks check`: from recipes to validated rows, resumable, with a report of what was rejected.

Flows in: recipes, a base image, an output folder. Flows out, in that folder: `tasks.jsonl` (one row a line), `dockerfiles/`
(the build context of every image), `journal.jsonl` (what was tried), `report.json` (the count of it).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from environments.swe.factory.candidates import Candidate, Project, mutant_candidates, release_candidates
from environments.swe.factory.images import Images
from environments.swe.factory.recipes import DEFAULT, Recipe, load_recipes
from environments.swe.factory.running import Limits
from environments.swe.factory.validate import Verdict, validate
from environments.swe.rows import SweRow
from harness.errors import ConfigError, SandboxError
from harness.protocols import SandboxProvider

log = logging.getLogger(__name__)


class BuildConfig(BaseModel):
    """What to build."""

    model_config = ConfigDict(extra="forbid")

    recipes: Path = DEFAULT
    projects: list[str] = []
    """Empty: all of the recipes."""
    kinds: list[str] = ["mutant", "release"]
    per_project: int = Field(25, ge=1)
    """Valid mutants of a project; release pairs come on top, as many as there are."""
    tries: int = Field(60, ge=1)
    """Mutants tried for a project at most."""
    seed: int = 0
    workers: int = Field(2, ge=1)
    base: str = "python:3.12-slim"
    """Image with Python under everything."""
    cache: Path = Path("~/.cache/sao/factory")
    hidden: bool = True
    """Whether the tests that a mutant breaks are taken out of what the agent sees."""


class Journal:
    """What was tried, one JSON line each; a second start goes on after it."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self.entries: dict[str, dict[str, Any]] = {}
        rows = {row.get("instance_id") for row in _json_lines(out / "tasks.jsonl")}
        for entry in _json_lines(out / "journal.jsonl"):
            machine = entry["reason"].startswith(("sandbox", "project"))  # says nothing about the task
            if entry["reason"] and not machine or entry["id"] in rows:
                self.entries[entry["id"]] = entry

    def add(self, candidate: Candidate, reason: str, seconds: float, row: SweRow | None) -> None:
        """Record an outcome. The row comes last: without it the entry is void, and the candidate is tried again."""
        entry = {
            "id": candidate.instance_id,
            "project": candidate.project,
            "kind": candidate.kind,
            "detail": candidate.detail,
            "reason": reason,
            "seconds": round(seconds, 1),
        }
        self.entries[candidate.instance_id] = entry
        with (self._out / "journal.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if row is not None:
            with (self._out / "tasks.jsonl").open("a") as file:
                file.write(json.dumps(row.model_dump(mode="json")) + "\n")
        log.info("%s %s (%.1f s)", candidate.instance_id, reason or "valid", seconds)

    def valid(self, project: str, kind: str) -> int:
        """How many valid tasks there are."""
        return sum(e["project"] == project and e["kind"] == kind and not e["reason"] for e in self.entries.values())

    def report(self) -> dict[str, Any]:
        """Tried, valid and reasons, for each project and kind."""
        groups: dict[str, Counter[str]] = {}
        for entry in self.entries.values():
            reason = entry["reason"].partition(":")[0] or "valid"
            groups.setdefault(f"{entry['project']} {entry['kind']}", Counter())[reason] += 1
        rows = {name: {"tried": counts.total(), **counts} for name, counts in sorted(groups.items())}
        everything = list(self.entries.values())
        return {
            "tried": len(everything),
            "valid": sum(not entry["reason"] for entry in everything),
            "worker_minutes": round(sum(entry["seconds"] for entry in everything) / 60, 1),
            "projects": rows,
        }


async def build(out: Path, config: BuildConfig, sandboxes: SandboxProvider, limits: Limits | None = None) -> dict[str, Any]:
    """Build until every project has its tasks; the report. `sandboxes` is started and stays the caller's."""
    recipes = load_recipes(config.recipes)
    unknown = set(config.projects) - set(recipes.projects)
    if unknown:
        raise ConfigError(f"no recipe for {sorted(unknown)}", hint=f"known: {', '.join(recipes.projects)}")
    journal = Journal(out)
    images = Images(recipes, config.base, config.cache.expanduser(), out / "dockerfiles")
    try:
        for name in config.projects or list(recipes.projects):
            await _build_project(recipes.projects[name], config, journal, images, sandboxes, limits or Limits())
            (out / "report.json").write_text(json.dumps(journal.report(), indent=1) + "\n")
    finally:
        images.close()
    return journal.report()


async def _build_project(
    recipe: Recipe, config: BuildConfig, journal: Journal, images: Images, sandboxes: SandboxProvider, limits: Limits
) -> None:
    project = Project(recipe, images, sandboxes, limits, config.cache.expanduser(), hidden=config.hidden)
    if "release" in config.kinds:
        await _try_all(release_candidates(project), len(recipe.pairs), journal, project, config.workers)
    if "mutant" in config.kinds and journal.valid(recipe.name, "mutant") < config.per_project:
        try:
            found = (await mutant_candidates(project, config.seed))[: config.tries]
        except SandboxError as error:  # this project does not build or run here; the others may
            candidate = Candidate(f"{recipe.name}__base", recipe.name, "mutant", recipe.mutate)
            journal.add(candidate, f"project: {error.message}", 0.0, None)
            return
        await _try_all(found, config.per_project, journal, project, config.workers)


async def _try_all(found: list[Candidate], wanted: int, journal: Journal, project: Project, workers: int) -> None:
    """Workers take candidates in order until enough are valid."""
    queue = [candidate for candidate in found if candidate.instance_id not in journal.entries]
    queue.reverse()

    async def worker() -> None:
        while queue and journal.valid(project.recipe.name, found[0].kind) < wanted:
            candidate, started = queue.pop(), time.monotonic()
            try:
                row, reason = await _try_one(candidate, project)
            except SandboxError as error:
                row, reason = None, f"sandbox: {error.message[-400:]}"
            journal.add(candidate, reason, time.monotonic() - started, row)

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())


async def _try_one(candidate: Candidate, project: Project) -> tuple[SweRow | None, str]:
    made = await candidate.make()
    if made.row is None:
        return None, made.reason
    verdict = await validate(made.row, project.sandboxes, project.limits, made.screened)
    if not verdict.valid:
        await asyncio.to_thread(project.images.remove, made.row.image)
        return None, verdict.reason
    return made.row, ""


async def check(
    file: Path,
    sandboxes: SandboxProvider,
    limits: Limits | None = None,
    workers: int = 2,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Validate every row of a JSON lines file again, here: the gate before training. `report` hears of each at once."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file", hint="give a JSON lines file of SWE rows")
    places = asyncio.Semaphore(workers)
    seen: Counter[str] = Counter()

    async def one(number: int, line: str) -> Verdict:
        try:
            row = SweRow.model_validate_json(line)
        except ValidationError as error:
            verdict = Verdict(f"line {number}", reason=f"row: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}")
        else:
            seen[row.instance_id] += 1
            if seen[row.instance_id] > 1:
                verdict = Verdict(row.instance_id, reason="row: a second one with that instance_id")
            else:
                async with places:
                    verdict = await validate(row, sandboxes, limits)
        report(verdict)
        return verdict

    lines = [(number, line) for number, line in enumerate(file.read_text().split("\n"), 1) if line.strip()]
    jobs: list[Coroutine[Any, Any, Verdict]] = [one(number, line) for number, line in lines]
    return list(await asyncio.gather(*jobs))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that a crash has cut is removed, so that the next does not continue it."""
    if not path.is_file():
        return []
    whole, _, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        os.truncate(path, len(whole) + 1 if whole else 0)
    return [json.loads(line) for line in whole.split(b"\n") if line]
