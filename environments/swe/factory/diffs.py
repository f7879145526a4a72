"""Diffs between trees, and git's object ids, in pure Python: the same bytes on every machine.

Flows in: two trees. Flows out: a patch for `git apply`; the id of the one commit that a tree makes.
"""

from __future__ import annotations

from environments.swe import patches
from environments.swe.factory.sources import Tree
from environments.swe.patches import object_id

COMMIT_TIME = 1577836800
"""2020-01-01: every commit of the factory."""
AUTHOR = "factory <factory@localhost>"
MESSAGE = "base"


def tree_diff(old: Tree, new: Tree) -> str:
    """A git patch from `old` to `new`; raises ValueError for a binary change."""
    return "".join(patches.write(path, old.get(path), new.get(path)) for path in sorted(old.keys() | new.keys()))


def changed_lines(patch: str) -> int:
    """Added and removed lines of a patch."""
    hunks = (block.partition("\n@@")[2] for block in patch.split("\ndiff --git "))
    return sum(line[:1] in ("+", "-") for hunk in hunks for line in hunk.split("\n")[1:])


def commit_id(tree: Tree) -> str:
    """The id of a parentless commit of `tree`, with the factory's author, time and message."""
    text = f"tree {_tree_id(tree)}\nauthor {AUTHOR} {COMMIT_TIME} +0000\ncommitter {AUTHOR} {COMMIT_TIME} +0000\n\n{MESSAGE}\n"
    return object_id("commit", text.encode())


def _tree_id(tree: Tree) -> str:
    """Git sorts entries as if the names of folders ended in a slash."""
    files, folders = {}, dict[str, Tree]()
    for path, data in tree.items():
        name, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(name, {})[rest] = data
        else:
            files[name] = data
    entries = [(name, "100644", object_id("blob", data)) for name, data in files.items()]
    entries += [(name + "/", "40000", _tree_id(inner)) for name, inner in folders.items()]
    body = b"".join(
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(digest)
        for name, mode, digest in sorted(entries, key=lambda entry: entry[0].encode())
    )
    return object_id("tree", body)
