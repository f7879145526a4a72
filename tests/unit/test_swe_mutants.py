"""Mutants as text edits, and tests cut out of a tree: pure, no container."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.swe.factory.hiding import cut_functions, hide
from environments.swe.factory.mutants import Mutant, candidates, mutants

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "harness").glob("*.py"), *(ROOT / "environments").rglob("*.py")])


def everywhere(source: bytes) -> set[int]:
    return set(range(1, source.count(b"\n") + 2))


def edits(body: str, operator: str) -> list[str]:
    """What an operator makes of a function with this body; the functions that result, without the head."""
    source = ("def f(a, b, c):\n" + "".join(f"    {line}\n" for line in body.splitlines())).encode()
    made = [m.apply(source).decode() for m in candidates(source, everywhere(source)) if m.operator == operator]
    head = "def f(a, b, c):\n"
    assert all(text.startswith(head) for text in made)
    return ["\n".join(line[4:] for line in text.removeprefix(head).splitlines()) for text in made]


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("cmp", "return a == b", ["return a != b"]),
        ("cmp", "return a<b", ["return a<=b"]),
        ("cmp", "return (a) is  not (b)", ["return (a) is (b)"]),
        ("cmp", "return a in b", ["return a not in b"]),
        ("cmp", "return a < b < c", []),
        ("binop", "return a + (b)", ["return a - (b)"]),
        ("binop", "return 'x' % b", []),
        ("boolop", "return a and b", ["return a or b"]),
        ("boolop", "return a or b or c", []),
        ("not", "return not a", ["return a"]),
        ("not", "return not(a)", ["return (a)"]),
        ("off1", "return a[10]", ["return a[11]"]),
        ("off1", "return 0x10", []),
        ("off1", "return f'{a:10}'", []),
        ("return_none", "return a", ["return None"]),
        ("return_none", "return None", []),
        ("if_neg", "if a:\n    return b", ["if not a:\n    return b"]),
        ("if_neg", "if a == b:\n    return b", ["if not (a == b):\n    return b"]),
        ("rm_if", "if a:\n    return b\nreturn c", ["return c"]),
        ("rm_if", "if a:\n    return b", []),
        ("rm_if", "if a:\n    return b\nelse:\n    b = c\nreturn c", []),
        ("rm_assign", "a = b  # why\nreturn a", ["return a"]),
        ("rm_assign", "a = b; b = c\nreturn a", []),
        ("rm_assign", "a = [\n    b,\n]\nreturn a", ["return a"]),
        ("rm_call", "a.sort()\nreturn a", ["return a"]),
        ("swap_args", "return a(b, c)", ["return a(c, b)"]),
        ("swap_args", "return a(b, b)", []),
        ("swap_args", "return a(*b, c)", []),
        ("jump", "for x in a:\n    if b:\n        break", ["for x in a:\n    if b:\n        continue"]),
        ("jump", "for x in a:\n    if b:\n        continue", ["for x in a:\n    if b:\n        break"]),
    ],
)
def test_operators(operator: str, before: str, after: list[str]) -> None:
    assert edits(before, operator) == after


def test_defaults() -> None:
    source = b"def f(a, b=True, *, c=3, d=None):\n    return a\n"
    made = [m.apply(source).decode().splitlines()[0] for m in candidates(source, {1, 2}) if m.operator == "default"]
    assert made == ["def f(a, b=False, *, c=3, d=None):", "def f(a, b=True, *, c=4, d=None):"]


def test_only_functions_and_no_version_switches() -> None:
    source = b"X = 1 + 2\nif TYPE_CHECKING:\n    def g(a):\n        return a + 1\nraise ValueError(1 + 1)\n"
    assert list(candidates(source, everywhere(source))) == []


def test_only_covered_lines() -> None:
    source = b"def f(a):\n    if a == 1:\n        return a + 2\n    return a\n"
    assert {m.line for m in candidates(source, {1, 2, 4})} == {2, 4}
    assert list(candidates(source, set())) == []
    assert {m.line for m in candidates(source, {3})} == {3}


def test_spans_are_bytes_not_characters() -> None:
    source = "def f(a):\r\n    x = 'äöü🎉'; return 'é' == a\r\n".encode()
    made = [m.apply(source).decode() for m in candidates(source, {1, 2}) if m.operator == "cmp"]
    assert made == ["def f(a):\r\n    x = 'äöü🎉'; return 'é' != a\r\n"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_real_files(path: Path) -> None:
    """Every mutant compiles, differs as a program, changes nothing outside its span and can be taken back."""
    source = path.read_bytes()
    made = mutants(source, everywhere(source))
    original = ast.dump(ast.parse(source))
    for mutant in made:
        broken = mutant.apply(source)
        assert ast.dump(ast.parse(broken)) != original, mutant
        back = Mutant("", 0, mutant.start, mutant.start + len(mutant.text), source[mutant.start : mutant.end])
        assert back.apply(broken) == source
    assert len({mutant.line for mutant in made}) == len(made)


@settings(deadline=None, max_examples=10)
@given(st.text(max_size=8))
def test_the_same_for_the_same_seed(seed: str) -> None:
    source = (ROOT / "harness" / "chat.py").read_bytes()
    first, second = mutants(source, everywhere(source), seed), mutants(source, everywhere(source), seed)
    assert first == second
    assert first != mutants(source, everywhere(source), seed + "x")


def test_kinds_take_turns() -> None:
    source = (ROOT / "harness" / "cli.py").read_bytes()
    first = [mutant.operator for mutant in mutants(source, everywhere(source))[:6]]
    assert len(set(first)) == 6


SUITE = b"""\
import pytest


@pytest.fixture
def shop():
    return {}


@pytest.mark.parametrize("a", [1, 2])
def test_one(a):
    assert a


class TestTwo:
    def test_two(self):
        pass

    def test_three(self):
        pass
"""


def test_cut() -> None:
    cut = cut_functions(SUITE, {9, 15})
    assert cut is not None
    assert b"test_one" not in cut and b"parametrize" not in cut and b"test_two" not in cut
    assert b"test_three" in cut and b"def shop" in cut
    ast.parse(cut)


def test_an_emptied_class_goes() -> None:
    cut = cut_functions(SUITE, {15, 18})
    assert cut is not None and b"TestTwo" not in cut and b"test_one" in cut


def test_a_file_without_functions_goes() -> None:
    source = b"X = 1\n\n\ndef test_a():\n    pass\n"
    assert cut_functions(source, {4}) is None
    assert hide({"tests/test_a.py": source, "a.py": b""}, {("tests/test_a.py", 4)}) == {"a.py": b""}


def test_what_cannot_be_cut_takes_its_file() -> None:
    source = b"def make():\n    def test_a():\n        pass\n    return test_a\n\n\ndef test_b():\n    pass\n"
    assert cut_functions(source, {2}) is None
