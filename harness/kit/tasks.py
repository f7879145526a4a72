"""Checks of what is there before any episode: the options, and the tasks as plain, repeatable data."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import BaseModel, ValidationError

from harness.kit.digest import REPEATED, SPLITS, digests
from harness.kit.elsewhere import elsewhere
from harness.kit.play import Subject
from harness.kit.verdicts import Broken, Check, short
from harness.task import Task

COMPARED = 1000
"""Tasks of each split whose ids and contents are compared."""
NOBODY = "no_environment_has_this_option"


async def config(subject: Subject) -> str:
    """The options are a pydantic model that refuses unknown names and can be stored with a run."""
    cls = type(subject.environment)
    model = cls.Config
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise Broken(f"`Config` is no pydantic model but {model!r}", "derive it from pydantic.BaseModel")
    for method in ("tasks", "begin"):
        if not callable(getattr(subject.environment, method, None)):
            raise Broken(f"`{cls.__name__}` has no method `{method}`", "see harness/protocols.py, `Environment`")
    made = model(**subject.options)
    try:
        model(**subject.options, **{NOBODY: 1})
    except ValidationError:
        pass
    else:
        raise Broken("an unknown option is ignored", 'give `Config` model_config = ConfigDict(extra="forbid")')
    again = model(**json.loads(json.dumps(made.model_dump(mode="json"))))
    if again != made:
        raise Broken("the options differ after they were stored and read", "use types that JSON can hold")
    return "unknown options are refused, known ones can be stored"


async def plain_tasks(subject: Subject) -> str:
    """Both splits have tasks, each a `Task` of JSON data with messages."""
    for split in SPLITS:
        tasks = subject.tasks(split, REPEATED)
        if not tasks:
            raise Broken(f"split `{split}` has no task", "return at least one task for each split")
        for task in tasks:
            if not isinstance(task, Task):
                raise Broken(f"split `{split}` holds {short(repr(task), 80)}, which is no Task", "return harness.task.Task")
            if not task.messages or not all({"role", "content"} <= message.keys() for message in task.messages):
                raise Broken(f"task {task.id}: its messages are not a conversation", 'open with {"role": .., "content": ..}')
            wrong = _no_json([list(task.messages), task.data])
            if wrong:
                raise Broken(f"task {task.id} is no JSON: {wrong}", "keep to text, numbers, lists, dictionaries and None")
    return f"{', '.join(f'{len(subject.environment.tasks(s))} {s}' for s in SPLITS)} tasks of plain data"


async def repeatable_tasks(subject: Subject) -> str:
    """Another process, with other hashes, makes the same tasks."""
    here = digests(subject.environment)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = await elsewhere("digest", subject.spec, json.dumps(subject.options), seed=seed, doing="make the tasks")
    for split in SPLITS:
        pairs = list(zip(here[split], there[split], strict=False))
        if here["sizes"] != there["sizes"]:
            raise Broken(f"another process has {there['sizes']} tasks, not {here['sizes']}", _SEEDED)
        wrong = [index for index, (one, other) in enumerate(pairs) if one != other]
        if wrong:
            raise Broken(f"another process makes task {wrong[0]} of `{split}` another way", _SEEDED)
    return f"two processes make the same {sum(len(here[s]) for s in SPLITS)} tasks"


async def unique_ids(subject: Subject) -> str:
    """No two tasks have one id."""
    seen: dict[str, str] = {}
    for split in SPLITS:
        for index, task in enumerate(subject.tasks(split, COMPARED)):
            where = f"{split} {index}"
            if task.id in seen:
                raise Broken(f"{seen[task.id]} and {where} have one id: {task.id}", "make the id of split, seed and index")
            seen[task.id] = where
    return f"{len(seen)} ids, all different"


async def disjoint_splits(subject: Subject) -> str:
    """Nothing that evaluation asks is ever trained."""
    trained = {_content(task): task.id for task in subject.tasks("train", COMPARED)}
    for task in subject.tasks("heldout", COMPARED):
        if _content(task) in trained:
            raise Broken(
                f"{trained[_content(task)]} and {task.id} are one problem", "let a hash of the problem decide its split"
            )
    return "the splits share no problem"


_SEEDED = "draw from random.Random(f'{split}/{seed}/{index}') only: no global random numbers, clock, set order or hash()"


def _content(task: Task) -> str:
    return json.dumps([list(task.messages), task.data, task.image], sort_keys=True, default=repr)


def _no_json(value: Any) -> str:
    """What JSON would lose, or nothing."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    return "" if json.loads(text) == _lists(value) else "it reads back differently (keys must be text)"


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


CHECKS = (
    Check("config", config),
    Check("plain_tasks", plain_tasks, ("config",)),
    Check("repeatable_tasks", repeatable_tasks, ("plain_tasks",)),
    Check("unique_ids", unique_ids, ("plain_tasks", "repeatable_tasks")),
    Check("disjoint_splits", disjoint_splits, ("plain_tasks", "repeatable_tasks")),
)
