"""The image of a task folder: the one that task.toml names, or one that is built from environment/ under a name of its own.

Nothing is built here. A sandbox whose image is missing says so; `build_command` is what makes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex

from environments.swe.folders import FolderTask


def image_name(task: FolderTask) -> str:
    """The image that task.toml names; else the name under which `build_command` builds it: any change gives another name."""
    if task.dockerfile is None:
        return str(task.image)
    digest, root = hashlib.sha256(), task.dockerfile.parent
    for path in sorted(root.rglob("*")):
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        facts = (path.relative_to(root).as_posix(), path.is_symlink(), path.is_dir(), path.lstat().st_mode & 0o111, len(data))
        digest.update(repr(facts).encode() + data)
    name = task.id
    if not re.fullmatch(r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*", name):  # what an image may be called
        name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return f"localhost/sao-task/{name}:{digest.hexdigest()[:12]}"


def build_command(task: FolderTask) -> str | None:
    """The command that makes the image; None if the task names a ready one."""
    if task.dockerfile is None:
        return None
    return shlex.join(["docker", "build", "--tag", image_name(task), str(task.dockerfile.parent.resolve())])
