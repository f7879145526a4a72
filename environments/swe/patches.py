"""Unified diffs as text: turning one round, writing one from two contents. Pure functions; `diff` reads them."""

from __future__ import annotations

import difflib
import hashlib
import re

HUNK = re.compile(r"^@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)$")
PAIRS = (("new file mode ", "deleted file mode "), ("rename from ", "rename to "), ("old mode ", "new mode "))


def reverse(patch: str) -> str:
    """The patch that undoes this one. Raises `ValueError` on a binary patch or a broken hunk."""
    if "GIT binary patch" in patch:
        raise ValueError("a binary patch cannot be turned round")
    lines, out, at = patch.split("\n"), list[str](), 0
    while at < len(lines):
        hunk = HUNK.match(lines[at])
        if hunk is None:
            start = at
            while at < len(lines) and not HUNK.match(lines[at]):
                at += 1
            out += _header(lines[start:at])
            continue
        end = _hunk_end(lines, at, int(hunk[2] or 1), int(hunk[4] or 1))
        out.append(f"@@ -{hunk[3]} +{hunk[1]} @@{hunk[5]}")
        out += _body(lines[at + 1 : end])
        at = end
    return "\n".join(out)


def _hunk_end(lines: list[str], at: int, old: int, new: int) -> int:
    """The index after a hunk of so many lines, with its remarks on missing newlines."""
    at += 1
    while old or new:
        if at >= len(lines) or (lines[at][:1] or " ") not in " +-\\" or old < 0 or new < 0:
            raise ValueError("a hunk is shorter than it says")
        sign = lines[at][:1] or " "
        old, new, at = old - (sign in " -"), new - (sign in " +"), at + 1
    while at < len(lines) and lines[at].startswith("\\"):
        at += 1
    return at


def _body(lines: list[str]) -> list[str]:
    """A hunk's lines turned round: what was added is removed, and stands first."""
    out, removed, added = list[str](), list[str](), list[str]()
    last = out
    for line in lines:
        if line.startswith("\\"):
            last.append(line)
        elif line.startswith("+"):
            removed.append("-" + line[1:])
            last = removed
        elif line.startswith("-"):
            added.append("+" + line[1:])
            last = added
        else:
            out += [*removed, *added, line]
            removed, added, last = [], [], out
    return [*out, *removed, *added]


def _header(lines: list[str]) -> list[str]:
    """A file's header lines turned round."""
    swap = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
    out = []
    for line in lines:
        key = next((k for k in swap if line.startswith(k)), None)
        names = re.fullmatch(r"diff --git a/(\S+) b/(\S+)", line)
        index = re.fullmatch(r"index ([0-9a-f]+)\.\.([0-9a-f]+)( \d+)?", line)
        if key:
            line = swap[key] + line.removeprefix(key)
        elif names:
            line = f"diff --git a/{names[2]} b/{names[1]}"
        elif index:
            line = f"index {index[2]}..{index[1]}{index[3] or ''}"
        out.append(line)
    for at in range(len(out) - 1):
        minus, plus = out[at], out[at + 1]
        if minus.startswith("--- ") and plus.startswith("+++ "):
            out[at], out[at + 1] = f"--- {_side(plus[4:], 'b/', 'a/')}", f"+++ {_side(minus[4:], 'a/', 'b/')}"
    return out


def _side(name: str, have: str, want: str) -> str:
    return want + name.removeprefix(have) if name.startswith(have) else name


def write(path: str, old: bytes | None, new: bytes | None) -> str:
    """The git patch that turns a file's old content into the new one, "" if they are equal; None is a file that is not there.

    Raises `ValueError` if either is binary.
    """
    if old == new:
        return ""
    if not is_text(old or b"") or not is_text(new or b""):
        raise ValueError(f"binary change: {path}")
    head = f"diff --git a/{path} b/{path}\n"
    head += "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    # Whole ids: without them git refuses the patch of an empty file.
    ids = (object_id("blob", data) if data is not None else "0" * 40 for data in (old, new))
    head += f"index {'..'.join(ids)}{' 100644' if old is not None and new is not None else ''}\n"
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    lines = difflib.unified_diff(_lines(old), _lines(new), *names)
    return head + "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def is_text(data: bytes) -> bool:
    """Whether a patch can carry it as text."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def object_id(kind: str, data: bytes) -> str:
    """git's id of an object."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _lines(data: bytes | None) -> list[str]:
    """Lines as git sees them: only a line feed ends one."""
    parts = (data or b"").decode().split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
