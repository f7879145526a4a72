"""Judge stored episodes again: the same artifacts, a fresh sandbox, the grader as it is now.

Flows in: a run folder. Flows out: `regrade.jsonl` beside the ledger, a line per episode with both verdicts. What was trained is
not changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.config import Config
from harness.episode import boundary
from harness.errors import ConfigError, InfrastructureError, VerifierFault
from harness.ledger import Judged, Ledger
from harness.protocols import SandboxProvider
from harness.registry import environment as made
from harness.registry import plugin_config
from harness.rundir import RunDir
from harness.task import Score, Split, Task


@dataclass(frozen=True, slots=True)
class Verdict:
    """One episode's two rewards; None: infrastructure kept it from being judged."""

    episode: str
    task: str
    before: float | None
    after: float | None
    info: dict[str, Any]

    @property
    def same(self) -> bool:
        """Whether both rewards agree."""
        return self.before == self.after


async def regrade(path: Path, *, concurrency: int, limit: int | None = None) -> list[Verdict]:
    """Judge every episode that has artifacts. Raises `ConfigError` if the environment cannot judge again, or has nothing to."""
    folder, config = RunDir.resume(path)
    ledger = Ledger(folder.path)
    try:
        return await _regrade(folder, config, ledger, concurrency, limit)
    finally:
        ledger.close()
        folder.close()


async def _regrade(folder: RunDir, config: Config, ledger: Ledger, concurrency: int, limit: int | None) -> list[Verdict]:
    environment = made(config.environment.table())
    if not hasattr(environment, "regrade"):
        raise ConfigError(
            f"`environment.id` = {config.environment.id!r} cannot judge stored artifacts",
            hint="only environments with a `regrade` method can",
        )
    chosen = [judged for judged in ledger.judged() if (ledger.artifacts / judged.id).is_dir()][:limit]
    if not chosen:
        raise ConfigError(f"{folder.path} has no artifacts to judge", hint="give the folder of a run of such an environment")
    provider_class, sandbox_options = plugin_config("sandbox", config.sandbox.table())
    sandboxes = provider_class(sandbox_options, f"{folder.id}-regrade")
    gate = asyncio.Semaphore(concurrency)
    splits: dict[Split, Sequence[Task]] = {split: environment.tasks(split) for split in ("train", "heldout")}

    async def one(judged: Judged) -> Verdict:
        split: Split = "heldout" if judged.purpose.startswith("eval-") else "train"
        task = next(iter(splits[split][judged.task_index : judged.task_index + 1]), None)
        if task is None or task.id != judged.task_id:
            now = "missing" if task is None else repr(task.id)
            raise ConfigError(
                f"task {judged.task_index} of the dataset is now {now}, not {judged.task_id!r}",
                hint="regrade with the dataset that the run had",
            )
        artifacts = {p.name: p.read_bytes() for p in sorted((ledger.artifacts / judged.id).iterdir())}
        async with gate:
            return await _verdict(environment, task, judged, artifacts, sandboxes)

    await sandboxes.start()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(judged)) for judged in chosen]
    finally:
        await sandboxes.close()
    verdicts = [task.result() for task in tasks]
    lines = "".join(json.dumps(asdict(v)) + "\n" for v in verdicts)
    (folder.path / "regrade.jsonl").write_text(lines)
    return verdicts


async def _verdict(
    environment: Any, task: Task, judged: Judged, artifacts: dict[str, bytes], sandboxes: SandboxProvider
) -> Verdict:
    try:
        with boundary(VerifierFault, f"{task.id}: regrade"):
            score: Score = await environment.regrade(task, artifacts, sandboxes)
    except InfrastructureError as error:
        return Verdict(judged.id, task.id, judged.reward, None, {"error": str(error)})
    return Verdict(judged.id, task.id, judged.reward, score.reward, score.info)
