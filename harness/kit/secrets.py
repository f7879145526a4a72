"""The check `secrets`: what `task.data` calls an answer is in no file that `begin` writes.

Flows in: tasks, and the files that `begin` wrote for each. Flows out: the check. A secret is all texts and numbers below a key
with a name of `NAMES`. It has leaked if every task has a file that gives it away; one task's file may hold it by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from harness.kit.episodes import begun
from harness.kit.play import Subject
from harness.kit.verdicts import Broken, Check

NAMES = ("answer", "solution", "gold", "target", "expected", "label")
"""Last word of a key, in the singular or plural: `answer`, `right_answers`."""
LONG = 6
"""Characters from which a text gives itself away wherever it stands."""
NAMED = rf"(?<![a-z])(?:{'|'.join(NAMES)})s?(?![a-z])"


async def secrets(subject: Subject) -> str:
    """What `task.data` calls an answer is in no file that the agent can read."""
    tasks = subject.some()
    kept = [dict(_secrets(task.data)) for task in tasks]
    names = [name for name in kept[0] if all(name in each for each in kept)]
    if not names:
        return f"nothing to look for: no key of `task.data` is called {', '.join(NAMES[:-1])} or {NAMES[-1]}"
    files: list[dict[str, str]] = []
    for task in tasks:
        written = (await begun(subject, task)).written
        files.append({path: written[path].decode(errors="replace") for path in sorted(written)})
    for name in names:
        leaks = [
            next((path for path, text in those.items() if gives_away(path, text, each[name])), "")
            for those, each in zip(files, kept, strict=True)
        ]
        if all(leaks):
            todo = "write what only the verdict needs when it is judged, or keep it outside"
            raise Broken(f"{leaks[0]} holds `{name}` of `task.data`", todo)
    short = any(len(leaf) < LONG for each in kept for name in names for leaf in each[name])
    how = f"; under {LONG} characters only where a file holds nothing else or calls it so" if short else ""
    return f"looked for {', '.join(f'`{name}`' for name in names)} in {sum(map(len, files))} files of {len(tasks)} tasks{how}"


def gives_away(path: str, text: str, secret: tuple[str, ...]) -> bool:
    """Whether a file tells the secret. Short values stand in many a text, so the file's name or a word before must say so."""
    if not all(leaf in text if len(leaf) >= LONG else re.search(_word(leaf), text) for leaf in secret):
        return False
    if any(len(leaf) >= LONG for leaf in secret) or text.strip() == secret[0]:
        return True
    called = re.search(rf"{NAMED}[\"']?\s*(?:[:=]|is)[\s\"'(\[{{]*{_word(secret[0])}", text, re.IGNORECASE)
    return called is not None or re.search(NAMED, path, re.IGNORECASE) is not None


def _word(leaf: str) -> str:
    return rf"(?<![\w.-]){re.escape(leaf)}(?![\w-]|\.\d)"


def _secrets(value: Any, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """(path, texts and numbers below it) of every key that is called an answer."""
    for key, below in _items(value):
        name = f"{path}.{key}" if path else str(key)
        if re.search(NAMED + r"\Z", str(key), re.IGNORECASE) is None:
            yield from _secrets(below, name)
        elif leaves := tuple(_leaves(below)):
            yield name, leaves


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        yield str(value).strip()
    for _, below in _items(value):
        yield from _leaves(below)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


SECRETS = Check("secrets", secrets, ("begin",))
