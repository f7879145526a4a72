"""The swe environment: an issue, a container with the repository, and hidden tests that judge the patch in another container.

Flows in: rows of a dataset. Flows out: tasks, and scores with the patch that was judged. The tools serve agents that have none
of their own; the hidden tests and the gold patch never enter the agent's container.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from environments.datasets import split_of
from environments.swe import official
from environments.swe.grading import Grade, GradingLimits, Outcome, grade, screen
from environments.swe.patch import Extracted, Reason, extract
from environments.swe.prepare import prepare
from environments.swe.rows import SweRow
from environments.swe.tools import shell_tools
from harness.errors import VerifierFault
from harness.protocols import LiveTask, Sandbox, SandboxProvider, Tool
from harness.task import Score, Split, Task

log = logging.getLogger("sao")
PATCH, GRADE, FACTS = "patch.diff", "grade.json", "extracted.json"
QUEUE_FACTOR = 4
"""Gradings that may stand before one in the queue, in the worst case."""
_REASONS: dict[Reason, Outcome] = {
    "too_large": "too_large",
    "timeout": "timeout",
    "repository_lost": "failed",
    "unreadable": "failed",
}
PROMPT = """\
The repository in {workdir} has a problem. Change its source code so that the problem is solved.

{problem_statement}

Hidden tests will judge your changes. Changes of tests, of the test configuration and of files that git ignores do not count.
Submit when you are done.
"""


class SweConfig(BaseModel):
    """Options of swe."""

    model_config = ConfigDict(extra="forbid")

    dataset: str
    """A file (.jsonl, .json, .parquet) or the name of a dataset on the hub."""
    split: str | None = None
    """Of a hub dataset; None takes the adapter's usual one."""
    revision: str | None = None
    """Commit, tag or branch of a hub dataset: what makes a run repeatable."""
    adapter: str | None = None
    """How to read the dataset's columns; None goes by its name."""
    invalid: Literal["error", "skip"] = "error"
    """What a row does that cannot be judged: stop the start, or be left out and counted."""
    heldout: float | str = 0.05
    """Share of the dataset that is held out, by a hash of the ids; or another dataset."""
    prompt: str = PROMPT
    """Opening message; {workdir} and {problem_statement} are filled in."""
    command_s: float = Field(180.0, gt=0)
    """Seconds of one command of the bash tool."""
    output_chars: int = Field(16_000, ge=1000)
    """Characters of a command's output that the model sees."""
    grading: GradingLimits = GradingLimits()


class Swe:
    """See the module docstring."""

    Config = SweConfig

    def __init__(self, config: SweConfig) -> None:
        self.config = config
        self._gate = asyncio.Semaphore(config.grading.concurrency)
        self._tasks: dict[Split, list[Task]] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, in the dataset's order."""
        if self._tasks is None:
            self._tasks = self._load()
        return self._tasks[split]

    def _load(self) -> dict[Split, list[Task]]:
        rows = self._rows(self.config.dataset)
        tasks: dict[Split, list[Task]] = {"train": [], "heldout": []}
        if isinstance(self.config.heldout, str):
            other = self._rows(self.config.heldout)
            known = {row.instance_id for row in other}
            tasks["heldout"] = [self.task(row) for row in other]
            tasks["train"] = [self.task(row) for row in rows if row.instance_id not in known]
        else:
            for row in rows:
                tasks[split_of(row.instance_id, self.config.heldout)].append(self.task(row))
        return tasks

    def _rows(self, source: str) -> list[SweRow]:
        from environments.swe.datasets import load

        config = self.config
        rows, refused = load(source, config.adapter, split=config.split, revision=config.revision, invalid=config.invalid)
        if refused:
            log.warning("%s: %d rows cannot be judged and are left out, for example: %s", source, len(refused), refused[0])
        return rows

    def task(self, row: SweRow) -> Task:
        """A row as a task."""
        text = self.config.prompt.replace("{workdir}", row.workdir).replace("{problem_statement}", row.problem_statement)
        return Task(row.instance_id, ({"role": "user", "content": text},), {"row": row.model_dump()}, row.image)

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Take everything out of git but the base commit; the host keeps its SHA."""
        row = SweRow.model_validate(task.data["row"])
        base = await prepare(sandbox, row)
        await sandbox.exec(f"cd -- {shlex.quote(row.workdir)}", timeout_s=self.config.command_s)
        return SweTask(self, row, sandbox, base)

    async def rejoin(self, task: Task, sandbox: Sandbox, state: dict[str, str]) -> LiveTask:
        """The same, of a sandbox that `begin` has prepared in an earlier process."""
        row = SweRow.model_validate(task.data["row"])
        await sandbox.exec(f"cd -- {shlex.quote(row.workdir)}", timeout_s=self.config.command_s)
        return SweTask(self, row, sandbox, state["base"])

    async def regrade(self, task: Task, artifacts: Mapping[str, bytes], sandboxes: SandboxProvider) -> Score:
        """Judge a stored patch again, in a fresh sandbox."""
        row = SweRow.model_validate(task.data["row"])
        facts = json.loads(artifacts.get(FACTS, b"{}"))
        extracted = Extracted(artifacts.get(PATCH, b""), **{**facts, "ignored": tuple(facts.get("ignored", ()))})

        async def acquire() -> Sandbox:
            return await sandboxes.acquire(task)

        return await self.judge(row, extracted, acquire)

    def official_ready(self) -> None:
        """Raises `ConfigError` if `swebench eval` is not installed."""
        official.program()

    async def official(self, tasks: Sequence[Task], artifacts: Mapping[str, Path], folder: Path) -> dict[str, list[str]]:
        """`swebench eval` on the patches that were judged here: instances that are resolved, and that it could not judge.

        `artifacts`: folders of an episode's files by task id; a task without one is not asked. Raises `VerifierFault`.
        """
        rows = [SweRow.model_validate(task.data["row"]) for task in tasks if task.id in artifacts]
        patches = {row.instance_id: (artifacts[row.instance_id] / PATCH).read_bytes().decode(errors="replace") for row in rows}
        jobs = self.config.grading.concurrency
        resolved, errors, _ = await asyncio.to_thread(official.evaluate, rows, patches, folder, "official", jobs=jobs)
        return {"resolved": sorted(resolved), "errors": sorted(errors)}

    async def judge(self, row: SweRow, extracted: Extracted, acquire: Any) -> Score:
        """The verdict on an extracted patch; `acquire` makes the fresh sandbox, if one is needed."""
        limits = self.config.grading
        if extracted.reason:
            made = Grade(_REASONS[extracted.reason], flags=(extracted.reason,), reason=extracted.reason)
        else:
            screened = screen(extracted.patch, row, limits)
            made = screened if isinstance(screened, Grade) else await self._grade(row, extracted.patch, acquire)
        if extracted.incomplete:
            made = replace(made, flags=(*made.flags, "extraction_incomplete"))
        if made.reward is None:
            raise VerifierFault(f"{row.instance_id}: {made.reason}: {made.log_tail[-500:]}")
        facts = {name: value for name, value in asdict(extracted).items() if name != "patch"}
        artifacts = {PATCH: extracted.patch, FACTS: _json(facts), GRADE: _json(asdict(made))}
        info = {**made.summary(), "patch_bytes": extracted.size, "ignored": list(extracted.ignored[:20])}
        return Score(made.reward, info=info, artifacts=artifacts)

    async def _grade(self, row: SweRow, patch: bytes, acquire: Any) -> Grade:
        async with self._gate:
            fresh = await acquire()
            try:
                return await grade(fresh, row, patch, self.config.grading)
            finally:
                await fresh.close()


class SweTask:
    """One repository under repair."""

    def __init__(self, environment: Swe, row: SweRow, sandbox: Sandbox, base: str) -> None:
        self._environment, self._row, self._sandbox, self._base = environment, row, sandbox, base
        # Not the episode's limit: other gradings may be before it in the queue.
        self.score_s = QUEUE_FACTOR * (environment.config.grading.timeout_s + environment.config.grading.step_s)
        config = environment.config
        self.tools: Sequence[Tool] = shell_tools(sandbox, command_s=config.command_s, output_chars=config.output_chars)

    def state(self) -> dict[str, str]:
        """What `Swe.rejoin` needs."""
        return {"base": self._base}

    async def score(self) -> Score:
        """Extract the patch, then judge it elsewhere."""
        config = self._environment.config
        extracted = await extract(self._sandbox, self._base, self._row.workdir, config.grading)
        return await self._environment.judge(self._row, extracted, self._sandbox.fresh)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
