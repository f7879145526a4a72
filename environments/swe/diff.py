"""The grammar of git's patches, read exactly: what it accepts is what `git apply` does, anything else is refused.

Flows in: the bytes of a patch that somebody else wrote. Flows out: one `FileDiff` per file; their texts joined are the patch.
A filter that reads a patch more loosely than git does lets files through, so hunks are counted, names must agree wherever
they occur, and nothing may stand between two files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_LINE = re.compile(rb"[^\n]*\n|[^\n]+\Z")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@[^\n]*\n")
_EXTENDED = re.compile(
    rb"(old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to|"
    rb"similarity index|dissimilarity index|index) ([^\n]+)\n"
)
_MODE = re.compile(rb"[0-7]{6}")
_INDEX = re.compile(rb"[0-9a-f]+\.\.[0-9a-f]+(?: ([0-7]{6}))?")
_BASE85 = re.compile(rb"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+\n")
_QUOTED = re.compile(rb'"((?:[^"\\\n]|\\[abtnvfr"\\]|\\[0-3][0-7]{2})*)"')
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)")
_LETTERS = dict(zip(b"abtnvfr", b"\a\b\t\n\v\f\r", strict=True))


class DiffError(ValueError):
    """The bytes are no patch that git writes."""


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a patch does to one file."""

    text: bytes
    """Its part of the patch, byte for byte."""
    old: bytes | None
    """Its path before; None for a new file."""
    new: bytes | None
    """Its path afterwards; None for a deleted file."""
    modes: frozenset[bytes]
    """Every mode that is named, such as 120000 of a symbolic link."""
    binary: bool
    added: tuple[bytes, ...]
    """Lines that it adds, without the `+`."""

    @property
    def paths(self) -> tuple[bytes, ...]:
        """The path, or both paths of a rename."""
        return tuple(dict.fromkeys(path for path in (self.new, self.old) if path is not None))


def parse(patch: bytes) -> list[FileDiff]:
    """The files of a patch, in order. Raises `DiffError`."""
    lines = _Lines(_LINE.findall(patch))
    files = []
    while lines.peek() is not None:
        files.append(_file(lines))
    return files


def touched(patch: bytes) -> tuple[list[str], list[str]]:
    """Paths that a patch expects, and paths that it makes. Raises `DiffError`, also if one leads out of the repository."""
    files = parse(patch) if patch.strip() else []
    before = [file.old for file in files if file.old is not None]
    made = [file.new for file in files if file.new is not None and file.new not in before]
    paths = [path.decode() for path in (*before, *made)]
    for path in paths:
        if PurePosixPath(path).is_absolute() or ".." in path.split("/"):
            raise DiffError(f"a path leads out: {path}")
    return paths[: len(before)], paths[len(before) :]


def unquote(name: bytes) -> bytes:
    """A path as git prints it: plain, or C-quoted. Raises `DiffError`."""
    if not name.startswith(b'"'):
        return name
    match = _QUOTED.fullmatch(name)
    if match is None:
        raise DiffError(f"a quoted name is malformed: {name!r}")
    return _ESCAPE.sub(_escaped, match[1])


def _escaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 3:
        return bytes([int(code, 8)])
    return bytes([_LETTERS.get(code[0], code[0])])


class _Lines:
    """Lines with a cursor, and the offset where the current file began."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines, self.at = lines, 0

    def peek(self) -> bytes | None:
        return self._lines[self.at] if self.at < len(self._lines) else None

    def take(self) -> bytes:
        line = self.peek()
        if line is None:
            raise DiffError("the patch ends early")
        self.at += 1
        return line

    def since(self, start: int) -> bytes:
        return b"".join(self._lines[start : self.at])


def _file(lines: _Lines) -> FileDiff:
    start = lines.at
    first = lines.take()
    if not first.startswith(b"diff --git ") or not first.endswith(b"\n"):
        raise DiffError(f"a file must begin with `diff --git`: {first[:80]!r}")
    extended = _extended(lines)
    added: list[bytes] = []
    before = after = None
    binary = False
    line = lines.peek() or b""
    if line.startswith(b"--- "):
        before, after = _named(lines.take(), b"--- ", b"a/"), _named(lines.take(), b"+++ ", b"b/")
        while (lines.peek() or b"").startswith(b"@@ "):
            added += _hunk(lines)
    elif line == b"GIT binary patch\n" or line.startswith(b"Binary files "):
        binary = True
        _binary(lines)
    old, new = _paths(first[len(b"diff --git ") : -1], extended, before, after)
    modes = [match for key in ("old mode", "new mode", "deleted file mode", "new file mode") if (match := extended.get(key))]
    index = _INDEX.fullmatch(extended.get("index", b"0..0"))
    if index is None or not all(_MODE.fullmatch(mode) for mode in modes):
        raise DiffError(f"a mode or an index is malformed: {extended}")
    return FileDiff(lines.since(start), old, new, frozenset([*modes, *filter(None, [index[1]])]), binary, tuple(added))


def _extended(lines: _Lines) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while match := _EXTENDED.fullmatch(lines.peek() or b""):
        key = match[1].decode()
        if key in found:
            raise DiffError(f"`{key}` stands twice")
        found[key] = match[2]
        lines.take()
    return found


def _named(line: bytes, mark: bytes, prefix: bytes) -> bytes:
    """The path of a `---` or `+++` line; empty for /dev/null."""
    if not line.startswith(mark) or not line.endswith(b"\n"):
        raise DiffError(f"`{mark.decode()}` is missing: {line[:80]!r}")
    name = line[len(mark) : -1].removesuffix(b"\t")  # git ends a name with spaces so
    if b"\t" in name:
        raise DiffError(f"a name holds a tab: {name!r}")
    name = unquote(name)
    if name == b"/dev/null":
        return b""
    if not name.startswith(prefix) or name == prefix:
        raise DiffError(f"a name must begin with {prefix.decode()}: {name!r}")
    return name[len(prefix) :]


def _hunk(lines: _Lines) -> Iterator[bytes]:
    match = _HUNK.fullmatch(lines.take())
    if match is None:
        raise DiffError("a hunk's head is malformed")
    old, new = (1 if count is None else int(count) for count in match.groups())
    while old > 0 or new > 0:
        line = lines.take()
        if not line.endswith(b"\n"):
            raise DiffError("the last line of the patch is cut")
        kind = line[:1]
        if kind == b"\\":
            continue
        if kind not in (b" ", b"\n", b"-", b"+"):
            raise DiffError(f"no line of a hunk: {line[:80]!r}")
        old -= kind != b"+"
        new -= kind != b"-"
        if kind == b"+":
            yield line[1:-1]
    if old or new:
        raise DiffError("a hunk's lines do not match its head")
    if (lines.peek() or b"").startswith(b"\\ "):
        lines.take()


def _binary(lines: _Lines) -> None:
    if lines.take().startswith(b"Binary files "):
        return
    for _ in range(2):  # forward, and mostly backward
        if not re.fullmatch(rb"(literal|delta) \d+\n", lines.peek() or b""):
            break
        lines.take()
        while _BASE85.fullmatch(lines.peek() or b""):
            lines.take()
        if lines.take() != b"\n":
            raise DiffError("a binary patch is malformed")


def _paths(
    head: bytes, extended: dict[str, bytes], before: bytes | None, after: bytes | None
) -> tuple[bytes | None, bytes | None]:
    """The path before and after, where every mention must agree (`before`, `after`: of `---` and `+++`)."""
    pairs = [(a[2:], b[2:]) for a, b in _splits(head) if a[:2] == b"a/" and b[:2] == b"b/" and a[2:] and b[2:]]
    moved = [(f"{verb} from", f"{verb} to") for verb in ("rename", "copy") if f"{verb} from" in extended]
    if len(moved) > 1 or any(f"{verb} to" in extended and f"{verb} from" not in extended for verb in ("rename", "copy")):
        raise DiffError("renames and copies are mixed up")
    if moved:
        source, target = (unquote(extended.get(key, b"")) for key in moved[0])
        pairs = [pair for pair in pairs if pair == (source, target)]
    else:
        pairs = [pair for pair in pairs if pair[0] == pair[1]]
    if len(pairs) != 1:
        raise DiffError(f"the names do not agree: {head!r}")
    created, deleted = "new file mode" in extended, "deleted file mode" in extended
    if created and deleted or (moved and (created or deleted)):
        raise DiffError(f"created and removed at once: {head!r}")
    old, new = pairs[0]
    if before not in (None, b"" if created else old) or after not in (None, b"" if deleted else new):
        raise DiffError(f"`---` or `+++` names another file than {head!r}")
    return (None if created else old), (None if deleted else new)


def _splits(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every way to read `<old> <new>`, either of them quoted or not."""
    for at in (match.start() for match in re.finditer(rb" ", head)):
        left, right = head[:at], head[at + 1 :]
        try:
            yield unquote(left), unquote(right)
        except DiffError:
            continue
