"""Line endings of a file that an editor read with every ending made \\n: put back where the lines are still the old ones."""

from __future__ import annotations

import codecs
import itertools
import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


def keep_endings(before: bytes, after: bytes) -> bytes:
    """`after`, written with \\n, with the line endings of `before` on the lines that both begin and end with.

    Lines that are new get the most frequent ending of `before`. For encodings that are ASCII's relatives, and UTF-16.
    """
    if b"\0" in before:
        return _keep_in_utf16(before, after)
    if b"\r" not in before:
        return after
    old, new = with_newlines(before), with_newlines(after)
    if old == new:
        return before
    head = old.rfind(b"\n", 0, _common(old, new)) + 1
    tail = _common(old[head:][::-1], new[head:][::-1])
    if not (_begins_line(old, len(old) - tail) and _begins_line(new, len(new) - tail)):
        line_end = old.find(b"\n", len(old) - tail)
        tail = 0 if line_end < 0 else len(old) - line_end - 1
    middle = new[head : len(new) - tail].replace(b"\n", _usual(before))
    above = before[: _line_start(before, old.count(b"\n", 0, head))]
    below = before[_line_start(before, old.count(b"\n", 0, len(old) - tail)) :] if tail else b""
    # A lone \r and a \n that meet would be one line ending, and a line would be lost.
    if above.endswith(b"\r") and middle.startswith(b"\n"):
        middle = b"\r" + middle
    if (middle or above).endswith(b"\r") and below.startswith(b"\n"):
        middle += b"\n"
    return above + middle + below


def _keep_in_utf16(before: bytes, after: bytes) -> bytes:
    """The same for UTF-16 with a mark, which keeps its byte order; what is no such text is left alone."""
    order = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(before[:2])
    if order is None:
        return after
    try:
        old, new = before.decode("utf-16"), after.decode("utf-16")
    except UnicodeDecodeError:
        return after
    if "\0" in old:
        return after
    return before[:2] + keep_endings(old.encode(), new.encode()).decode().encode(order)


def with_newlines(text: bytes) -> bytes:
    """With every line ending made \\n."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _usual(text: bytes) -> bytes:
    """The most frequent line ending."""
    both = text.count(b"\r\n")
    counts = {b"\r\n": both, b"\n": text.count(b"\n") - both, b"\r": text.count(b"\r") - both}
    return max(counts, key=lambda end: counts[end])


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _begins_line(text: bytes, at: int) -> bool:
    return at == 0 or text[at - 1 : at] == b"\n"


def _line_start(text: bytes, n: int) -> int:
    """Where the line of that number, counted from 0, begins; the lines may end in any way."""
    return next((end.end() for end in itertools.islice(_LINE_END.finditer(text), n - 1, None)), len(text)) if n else 0
