"""Line endings through an edit: what is outside of it keeps every byte, and no text is lost whatever the endings are."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agents.openhands_worker.endings import keep_endings

ENDS = ("\n", "\r\n", "\r")
LINE = st.text(alphabet="ab é\x0c\u2028", max_size=3)
ends = st.sampled_from([("\n",), ("\r\n",), ("\r",), ("\r\n", "\n"), ("\r\n", "\r\n", "\r\n", "\n", "\r"), ENDS])


@st.composite
def files(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Lines and their endings; the last line has none, and may be empty."""
    allowed = st.sampled_from(draw(ends))
    lines = [(draw(LINE), draw(allowed)) for _ in range(draw(st.integers(0, 8)))]
    # A lone \r before an empty line that ends with \n would be one ending.
    joined = "".join(map("".join, lines)) + draw(LINE)
    parts = re.split(r"(\r\n|\n|\r)", joined)
    return [*zip(parts[::2], [*parts[1::2], ""], strict=True)]


def text(lines: list[tuple[str, str]]) -> str:
    return "".join(map("".join, lines))


def plain(data: str) -> str:
    return data.replace("\r\n", "\n").replace("\r", "\n")


def begins_at(before: str, after: str) -> int:
    """How many lines both begin with, or more: a last line is taken for one that ends."""
    pairs = zip(plain(before).split("\n"), after.split("\n"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def kept(before: str, after: str) -> str:
    return keep_endings(before.encode(), after.encode()).decode()


@given(files())
def test_no_edit_changes_no_byte(lines: list[tuple[str, str]]) -> None:
    assert kept(text(lines), plain(text(lines))) == text(lines)


@given(files(), st.integers(0, 8), st.integers(0, 8), st.lists(LINE, max_size=4))
@example([("a", "\r"), ("b", "\n"), ("", "")], 1, 1, [""])  # an empty \n line after a lone \r
@example([("a", "\r"), ("x", "\n"), ("", "\n"), ("b", "")], 1, 2, [])  # the two meet when what is between goes
@example([("", "\r"), ("x", "\r"), ("y", "\n"), ("", "\n"), ("b", "\r"), ("", "")], 1, 3, ["new"])
def test_lines_are_replaced(lines: list[tuple[str, str]], a: int, b: int, new: list[str]) -> None:
    """Covers insertion (nothing replaced) and deletion (nothing new)."""
    a, b = sorted((min(a, len(lines) - 1), min(b, len(lines) - 1)))
    before, above, below = text(lines), lines[:a], lines[b:]
    after = plain(text(above)) + "".join(line + "\n" for line in new) + plain(text(below))
    result = kept(before, after)
    assert plain(result) == after, "nothing is lost, nothing is added"
    if "\r" not in before:
        assert result == after
        return
    head, tail = text(above), text(below)
    if begins_at(before, after) > a:  # as if the edit were further down: new or deleted lines are like old ones
        return
    assert result.endswith(tail)
    squeezed = head.endswith("\r") and not new and tail.startswith("\n")  # one of them has to give
    assert result.startswith(head)
    counts = Counter(end for _, end in lines if end)
    usual = {end for end, n in counts.items() if n == max(counts.values())}
    middle = result[len(head) : len(result) - len(tail)]
    meets = {"\r\n"} if "\r" in counts else set()
    if len(set(line for line, _ in lines) & set(new)) == 0:  # else a new line may pass for an old one
        assert set(re.findall(r"\r\n|\n|\r", middle)) <= usual | meets | ({"\n"} if squeezed else set())


@given(files(), st.integers(0, 30), st.integers(0, 30), st.text(alphabet="ab\n", max_size=6))
def test_any_region_is_replaced(lines: list[tuple[str, str]], a: int, b: int, new: str) -> None:
    before = text(lines)
    old = plain(before)
    a, b = sorted((min(a, len(old)), min(b, len(old))))
    after = old[:a] + new + old[b:]
    result = kept(before, after)
    assert plain(result) == after
    untouched = old.count("\n", 0, a)
    assert result.startswith(text(lines[:untouched]))
    below = old.count("\n", 0, b) + 1
    if begins_at(before, after) == untouched:
        assert result.endswith(text(lines[below:]))


@given(st.text(alphabet="ab\r\n", max_size=20), st.text(alphabet="ab\r\n", max_size=20))
def test_never_loses_text(before: str, after: str) -> None:
    assert plain(kept(before, after)) == plain(after)


@pytest.mark.parametrize(
    ("before", "after", "result"),
    [
        ("", "a\n", "a\n"),
        ("a\r\nb", "a\nc", "a\r\nc"),
        ("a\r\nb", "", ""),
        ("a\r\nb\r\n", "a\nx\ny\nb\n", "a\r\nx\r\ny\r\nb\r\n"),
        ("a\r\nb\nc\r\n", "a\nb\nC\n", "a\r\nb\nC\r\n"),
        ("a\rb\r", "a\nx\nb\n", "a\rx\rb\r"),
        ("a\r\nb\r\n", "a\r\nb\r\nc\r\n", "a\r\nb\r\nc\r\n"),
        ("a\nb\n", "a\r\nb\n", "a\r\nb\n"),
    ],
)
def test_examples(before: str, after: str, result: str) -> None:
    assert kept(before, after) == result


@given(files(), st.sampled_from(["utf-16-le", "utf-16-be"]))
def test_utf16_keeps_its_endings_and_its_byte_order(lines: list[tuple[str, str]], order: str) -> None:
    before = ("\ufeff" + text(lines) + "x").encode(order)
    after = plain(text(lines)) + "y"
    result = keep_endings(before, after.encode("utf-16"))
    assert result == ("\ufeff" + kept(text(lines) + "x", after)).encode(order)


@pytest.mark.parametrize("before", [b"\xff\xfe\0", b"\xff\xfe\0\xd8a\0", b"\0\r\n", b"\xff\xfe\0\0\r\0"])
def test_what_is_no_text_is_left_alone(before: bytes) -> None:
    assert keep_endings(before, b"a\nb") == b"a\nb"


@pytest.mark.parametrize("line", [b"\r\n", b"\n\r\n", b"a\r\n", b"x" * 1000 + b"\r\n"], ids=["empty", "mixed", "short", "long"])
def test_ten_megabytes(line: bytes) -> None:
    """Quadratic cost would not come back."""
    before = line * (10_000_000 // len(line))
    old = before.replace(b"\r\n", b"\n")
    middle = old.index(b"\n", len(old) // 2) + 1
    result = keep_endings(before, old[:middle] + b"new\n" + old[middle:])
    assert len(result) == len(before) + len(b"new\r\n")
    assert result.replace(b"\r\n", b"\n") == old[:middle] + b"new\n" + old[middle:]
