"""Whether tools answer an episode with what another one did. Other processes, in which it is the only one, say what is right.

Flows in: the same plays, alone and among others. Flows out: what the check says. As `python -m harness.kit.replies SUBJECT`
(JSON), the same tasks are played one by one, and the replies printed.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.kit.elsewhere import elsewhere
from harness.kit.play import Played, Subject, subject
from harness.kit.verdicts import Broken, short
from harness.task import Limits

CLOCK = re.compile(r"\d+(?:\.\d+)?\s*(?:ms|s|sec|seconds?)\b|\d{1,2}:\d\d(?::\d\d)?")
"""What a busy machine changes."""
Replies = list[list[str]]
"""[tool, content] of each."""


async def answered_alike(subject: Subject, pairs: Sequence[tuple[Played, Played]]) -> str:
    """What is to be said of the replies of (alone, among others). Raises `Broken` for one that other episodes have changed.

    A reply that two other processes do not agree on varies by itself, and tells nothing.
    """
    changed = [
        (one, index, heard)
        for one, other in pairs
        for index, (own, heard) in enumerate(zip(_replies(one), _replies(other), strict=False))
        if own != heard
    ]
    if not changed:
        return ", and answered so"
    given = [subject.spec, subject.options, subject.sandbox, asdict(subject.limits)]
    try:
        right = [await elsewhere("replies", json.dumps(given), seed=seed, doing="play the tasks") for seed in "12"]
    except Broken as broken:
        return f"; replies were not compared: {broken.said}"
    for one, index, heard in changed:
        first, second = (each[one.task.id][index : index + 1] for each in right)
        if first and first == second and first != [heard]:
            raise Broken(
                f"`{heard[0]}` answers {one.task.id} with {short(first[0][1], 80)!r} in a process of its own, and with "
                f"{short(heard[1], 80)!r} among others",
                "keep an episode's state in its live task and its sandbox; draw chance from random.Random(task.id)",
            )
    tools = dict.fromkeys(f"`{heard[0]}`" for _, _, heard in changed)
    return f"; replies of {', '.join(tools)} vary even alone, and were not compared"


def _replies(played: Played) -> Replies:
    return [[name, CLOCK.sub("..", content)] for name, content in played.notes.replies]


async def _played(made: Subject) -> dict[str, Replies]:
    try:
        await made.sandboxes.start()
        return {task.id: _replies(await made.play(task, made.best(task))) for task in made.some()}
    finally:
        await made.sandboxes.close()


def _main(given: str) -> None:
    spec, options, sandbox, limits = json.loads(given)
    with tempfile.TemporaryDirectory(prefix="sao-model-") as folder:
        made = subject(spec, options, sandbox, Limits(**limits), Path(folder), Path(folder).name)
        print(json.dumps(asyncio.run(_played(made))))  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1])
