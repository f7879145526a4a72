"""Digests of an environment's tasks, here or, as `python -m harness.kit.digest NAME OPTIONS`, in another process."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from harness.protocols import Environment
from harness.registry import environment
from harness.task import Split, Task

SPLITS: tuple[Split, ...] = ("train", "heldout")
REPEATED = 64
"""Tasks of each split that two processes must make the same."""


def digests(made: Environment) -> dict[str, Any]:
    """`sizes` of the splits, and by split a digest of each of the first tasks."""
    out: dict[str, Any] = {"sizes": {}}
    for split in SPLITS:
        tasks = made.tasks(split)
        out["sizes"][split] = len(tasks)
        out[split] = [_digest(tasks[i]) for i in range(min(REPEATED, len(tasks)))]
    return out


def _digest(task: Task) -> str:
    text = json.dumps([task.id, list(task.messages), task.data, task.image], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _main(spec: str, options: str) -> None:
    print(json.dumps(digests(environment({"id": spec, **json.loads(options)}))))  # noqa: T201


if __name__ == "__main__":
    _main(*sys.argv[1:3])
