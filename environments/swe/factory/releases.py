"""Release pairs: the state is version N, the gold patch its sources' way to N+1, the hidden tests those of N+1.

Flows in: two released trees. Flows out: a `Pair`, or why there is no task in it. Only sources and tests move: packaging,
documents and the version number stay at N.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from environments.swe.factory.diffs import changed_lines, tree_diff
from environments.swe.factory.recipes import Recipe
from environments.swe.factory.sources import Tree, under
from environments.swe.patches import is_text

MAX_LINES = 200
"""Changed source lines; a bigger release is several tasks in one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The trees of a candidate."""

    base: Tree
    fixed: Tree
    judged: Tree
    lines: int
    """Changed source lines."""


def pair(recipe: Recipe, old: Tree, new: Tree, versions: tuple[str, str]) -> Pair | str:
    """The candidate, or the reason to reject it."""
    tests = recipe.tests
    sources = {path for path in old.keys() | new.keys() if under(path, recipe.sources) and not under(path, tests)}
    suite = {path for path in old.keys() | new.keys() if under(path, tests)}
    if not any(under(path, recipe.sources) for path in new) or not any(under(path, tests) for path in old):
        return "layout"
    unversioned = {path: keep_version(old.get(path, b""), data, *versions) for path, data in new.items() if path in sources}
    fixed = _moved(old, unversioned, sources)
    judged = _moved(old, new, suite)
    if any(old.get(path) != fixed.get(path) and not _textual(path, old, fixed) for path in sources):
        return "binary"
    if any(old.get(path) != judged.get(path) and not _textual(path, old, judged) for path in suite):
        return "binary"
    if fixed == old:
        return "version_only"
    if judged == old:
        return "no_test_change"
    lines = changed_lines(tree_diff(old, fixed))
    if lines > MAX_LINES:
        return "too_long"
    return Pair(old, fixed, judged, lines)


def keep_version(old: bytes, new: bytes, base: str, following: str) -> bytes:
    """`new` with the lines restored that differ from a line of `old` in nothing but the version."""
    known = set(old.splitlines())
    kept = []
    for line in new.splitlines(keepends=True):
        back = re.sub(rb"(?<![\d.])" + re.escape(following.encode()) + rb"(?![\d.]*\d)", base.encode(), line)
        back = back.replace(_parts(following), _parts(base))
        kept.append(back if back.strip(b"\r\n") in known else line)
    return b"".join(kept)


def _parts(version: str) -> bytes:
    """The version as a tuple in source text."""
    return ", ".join(version.split(".")).encode()


def _moved(old: Tree, new: Tree, paths: set[str]) -> Tree:
    """`old` with these paths as they are in `new`."""
    return {path: data for path, data in old.items() if path not in paths} | {p: new[p] for p in paths if p in new}


def _textual(path: str, *trees: Tree) -> bool:
    return all(is_text(tree.get(path, b"")) for tree in trees)
