"""What the agent is told: a changelog entry, or the behaviour that is wrong, never a test or a line of the source.

Flows in: crash messages of the failing tests, a release's files. Flows out: text.
"""

from __future__ import annotations

import re

from environments.swe.factory.sources import Tree

MESSAGES = 8
MESSAGE_CHARS = 300
ENTRY_CHARS = 4000
_LOG = re.compile(r"(^|/)(changes|changelog|history|news|release[-_ ]?notes)(\.(md|rst|txt))?$", re.IGNORECASE)
_VERSION = r"(?<![\d.])v?{}(?![\d.]*\d)"
_PLACES = re.compile(r"(?<![\w./-])[\w./-]*\.py\b(:\d+)?:?|\bline \d+\b|0x[0-9a-f]{6,}")


def behaviours(messages: dict[str, str]) -> list[str]:
    """One line per distinct failure: the subject out of the test's name, and what it saw."""
    found: dict[str, str] = {}
    for test, message in sorted(messages.items()):
        lines = [line.strip() for line in _PLACES.sub("", message).splitlines() if line.strip()]
        text = " ".join(lines[:3])[:MESSAGE_CHARS] or "fails"
        name = test.rpartition("::")[2].partition("[")[0]
        subject = re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", re.sub(r"^test_?", "", name)).strip().lower()
        found.setdefault(text, f"{subject}: {text}" if subject else text)
    return list(found.values())[:MESSAGES]


def bug_report(project: str, messages: dict[str, str]) -> str:
    """For a mutant."""
    return (
        f"A recent change broke {project}. What users observe:\n\n{_listed(messages)}\n\n"
        "Find the cause in the source code and repair it, without changing any other behaviour.\n"
    )


def release_request(project: str, version: str, entry: str, messages: dict[str, str]) -> str:
    """For a release pair: its changelog entry if there is one."""
    if entry:
        return f"Make {project} behave as its next release does. The changelog of {version} says:\n\n{entry}\n"
    return f"The behaviour of {project} has to change. What is observed today and wrong:\n\n{_listed(messages)}\n"


def changelog_entry(tree: Tree, version: str) -> str:
    """The section of a release in the changelog of its sdist, or nothing."""
    for path in sorted(tree, key=lambda path: (path.count("/"), path)):
        if _LOG.search(path):
            entry = section(tree[path].decode(errors="replace"), version)
            if entry:
                return entry
    return ""


def section(text: str, version: str) -> str:
    """The lines between the heading of `version` and the heading of any other version."""
    lines = text.splitlines()
    heading = re.compile(_VERSION.format(re.escape(version)))
    other = re.compile(r"^\W*(version\s+|release\s+|v)?\d+(\.\d+)+", re.IGNORECASE)
    for at, line in enumerate(lines):
        if other.match(line) and heading.search(line):
            rest = lines[at + 1 :]
            end = next((n for n, later in enumerate(rest) if other.match(later) and not heading.search(later)), len(rest))
            body = [line for line in rest[:end] if not re.fullmatch(r"[\s=~^*#-]*", line)]
            return "\n".join(body).strip()[:ENTRY_CHARS]
    return ""


def _listed(messages: dict[str, str]) -> str:
    return "\n".join(f"- {line}" for line in behaviours(messages))
