"""What an episode hands in: the difference between the base commit and the folder as the agent left it, and what may count.

Flows in: a sandbox in which the agent could change anything, git included. Flows out: bytes of a patch (`extract`), and the
part of it that is a change of the program (`filter_patch`): no tests, no configuration of the test runner, nothing that runs
at the start of an interpreter, nothing that is not text. The filter trusts the base SHA, which the host kept, and itself.
"""

from __future__ import annotations

import fnmatch
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from environments.swe.diff import FileDiff, parse
from environments.swe.prepare import isolated, whole
from environments.swe.rows import SweRow
from harness.protocols import Sandbox


class PatchLimits(BaseModel):
    """How big a patch may be, and how long it may take to make one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patch_bytes: int = Field(1_000_000, ge=1)
    patch_files: int = Field(50, ge=1)
    step_s: float = Field(120.0, gt=0)
    """Seconds of one step that runs no tests: making the patch, applying it."""


# --- extraction ------------------------------------------------------------------------------------------------------

_NOISE = "__pycache__/\n*.py[co]\n.pytest_cache/\n.mypy_cache/\n.ruff_cache/\n.hypothesis/\n*.egg-info/\n"
_IGNORED_BYTES = 16_384
# The repository of the agent only lends its objects: its configuration, hooks, attributes, replacements and index stay
# unread. Renames are told as removal and addition, so that each half is filtered by its own path.
_EXTRACT = r"""
set -euo pipefail
folder=$(mktemp -d /tmp/sao-XXXXXXXXXX)
cd -- {workdir}
export GIT_DIR="$folder/git" GIT_WORK_TREE={workdir}
git init -q --template=
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info"
printf '%s\n' {workdir}/.git/objects >"$GIT_DIR/objects/info/alternates"
printf %s {noise} >"$GIT_DIR/info/exclude"
cat {workdir}/.git/info/exclude >>"$GIT_DIR/info/exclude" 2>/dev/null || true
git cat-file -e {base}'^{{commit}}' 2>/dev/null || {{ echo {nonce} lost; exit 0; }}
git read-tree {base} 2>/dev/null || {{ echo {nonce} lost; exit 0; }}
added=0; git -c core.autocrlf=false add -A --ignore-errors . >/dev/null 2>&1 || added=$?
git -c core.autocrlf=false diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames \
    --src-prefix=a/ --dst-prefix=b/ --diff-algorithm=myers -U3 --inter-hunk-context=0 {base} >"$folder/patch"
files=$(git diff --cached --name-only --no-renames -z {base} | tr -cd '\0' | wc -c)
{{ git ls-files --others --ignored --exclude-standard --directory -z || true; }} | head -c {ignored} >"$folder/ignored" || true
echo {nonce} made "$folder" "$(wc -c <"$folder/patch")" "$files" "$added"
"""

Reason = Literal["", "too_large", "repository_lost", "timeout", "unreadable"]


@dataclass(frozen=True, slots=True)
class Extracted:
    """The patch, or the reason why there is none; all reasons are the agent's doing."""

    patch: bytes = b""
    reason: Reason = ""
    size: int = 0
    """Bytes, also of a patch that is too large to be taken."""
    files: int = 0
    ignored: tuple[str, ...] = ()
    """Paths that git ignores and the patch therefore lacks."""
    incomplete: bool = False
    """Git could not add every file (such as a repository inside the repository)."""


async def extract(sandbox: Sandbox, base: str, workdir: str, limits: PatchLimits) -> Extracted:
    """The agent's changes since `base`, committed or not. Ends every process in the sandbox first, and its shell."""
    if not await reset(sandbox):
        return Extracted(reason="unreadable")
    nonce = secrets.token_hex(16)
    folder = shlex.quote(workdir)
    script = _EXTRACT.format(
        workdir=folder, base=shlex.quote(base), nonce=nonce, noise=shlex.quote(_NOISE), ignored=_IGNORED_BYTES
    )
    result = await sandbox.exec(isolated(script), timeout_s=limits.step_s)
    if result.timed_out:
        return Extracted(reason="timeout")
    answer = result.output.rpartition(f"{nonce} ")[2].split()
    if answer[:1] == ["lost"]:
        return Extracted(reason="repository_lost")
    if answer[:1] != ["made"] or len(answer) != 5 or not re.fullmatch(r"/tmp/sao-\w{10}( \d+){3}", " ".join(answer[1:])):
        return Extracted(reason="unreadable")
    made, (size, files, added) = answer[1], map(int, answer[2:])
    if size > limits.patch_bytes or files > limits.patch_files:
        return Extracted(reason="too_large", size=size, files=files)
    try:
        patch, ignored = await sandbox.read(f"{made}/patch"), await sandbox.read(f"{made}/ignored")
    except OSError:
        return Extracted(reason="unreadable")
    if len(patch) > limits.patch_bytes:
        return Extracted(reason="too_large", size=len(patch), files=files)
    return Extracted(patch, "", len(patch), files, _ignored(ignored), incomplete=added != 0)


# Functions, options and a lost PATH of the agent's shell must not end it; one that ends the shell finds another in its place.
_ENDLESS = "while [[ 1 ]]; do (sleep 1) || [[ 1 ]]; done 2>/dev/null"


async def reset(sandbox: Sandbox) -> bool:
    """End every process and the shell of a sandbox: a command without any time is a timeout, which kills them all. False if
    what the agent has left running in it, or has made of its shell, ends each such command first.
    """
    for _ in range(2):
        result = await sandbox.exec(_ENDLESS, timeout_s=0.0)
        if result.timed_out or result.killed_by == "disk":  # everything was killed
            return True
    return False


def _ignored(listed: bytes) -> tuple[str, ...]:
    names = [show(name) for name in listed.split(b"\0")[:-1]]
    noise = re.compile(r"(^|/)(__pycache__|\.\w+_cache|\.hypothesis|[^/]*\.egg-info)/|\.py[co]$")
    return tuple(name for name in names if not noise.search(name))


def show(path: bytes) -> str:
    """A path as text that JSON can hold."""
    return path.decode(errors="backslashreplace")


# --- the filter ------------------------------------------------------------------------------------------------------

AUDIT = re.compile(
    rb"_pytest|os\._exit|/proc/self|sys\.modules.*pytest|PYTEST_|gc\.get_objects|sys\.settrace|atexit|"
    rb"(?:import|from)\s+(?:pytest|pluggy)|_getframe|f_back"
)
"""What added lines of a program rarely need; a flag, not a verdict."""

_CONFIG = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"}
_STARTUP = re.compile(r"(^|/)(site|user)customize(\.py|/)|\.pth$")
_TEST = re.compile(r"(^|/)(tests/|test_[^/]*\.py$|[^/]*_test\.py$|tests\.py$)|^(test|testing)/")


@dataclass(frozen=True, slots=True)
class Filtered:
    """What is left of a patch."""

    patch: bytes
    dropped: list[str]
    """`path: why` of each file that was left out."""
    flags: list[str]
    """Sorted: what somebody may want to look at."""
    paths: list[bytes]
    """Files that the rest touches."""


def filter_patch(patch: bytes, row: SweRow) -> Filtered:
    """The files of a patch that may count, byte for byte. Raises `DiffError` if it is no patch."""
    if patch and not patch.endswith(b"\n"):
        patch += b"\n"  # some datasets strip it, and git refuses a cut last line
    hidden = frozenset(show(path) for file in parse(whole(row.test_patch)) for path in file.paths)
    kept: list[FileDiff] = []
    dropped: list[str] = []
    flags: set[str] = set()
    for file in parse(patch):
        refused = [(path, found) for path in map(show, file.paths) for found in [_refusal(file, path, hidden, row)] if found]
        for path, (why, flag) in refused:
            dropped.append(f"{path}: {why}")
            flags.add(flag)
        if not refused:
            kept.append(file)
            flags.update(_audit(file))
    text = b"".join(file.text for file in kept)
    paths = [path for file in kept for path in [file.new or file.old] if path is not None]
    return Filtered(text, dropped, sorted(flags - {""}), paths)


def _refusal(file: FileDiff, path: str, hidden: frozenset[str], row: SweRow) -> tuple[str, str] | None:
    """Why a file is left out, and the flag for it (none for new tests, which agents are right to write)."""
    parts = path.split("/")
    name = parts[-1]
    if not all(parts) or {".", ".."} & set(parts) or "\\" in path or any(ord(char) < 32 for char in path):
        return "no plain path", "unsafe_path"
    if any(part.lower().startswith(".git") for part in parts):
        return "read by git", "git_file"
    if b"120000" in file.modes:
        return "symbolic link", "symlink"
    if b"160000" in file.modes:
        return "submodule", "submodule"
    if file.binary:
        return "binary", "binary"
    if matches(path, row.protected):
        return "protected in this task", "protected"
    if any(path == test or path.startswith(f"{test}/") or test.startswith(f"{path}/") for test in hidden):
        return "a path of the hidden tests", "hidden_test_path"
    if _STARTUP.search(path):
        return "runs at the start of the interpreter", "startup_hook"
    if matches(path, row.allowed):
        return None
    if name == "conftest.py":
        return "configures the tests", "conftest"
    if name in _CONFIG:
        return "configures the tests", "test_config"
    if _TEST.search(path):
        return "a test", "" if file.old is None else "tests_changed"
    return None


def matches(path: str, globs: list[str]) -> bool:
    """Whether a path is one of these, or lies in one of these folders; `*` also matches `/`."""
    return any(fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"{glob.rstrip('/')}/*") for glob in globs)


def _audit(file: FileDiff) -> Iterator[str]:
    for line in file.added:
        for found in AUDIT.findall(line):
            yield f"audit:{show(found)[:40]}"
