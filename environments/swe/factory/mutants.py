"""Small bugs for one source file: text edits taken from the spans of its syntax tree.

Flows in: source bytes, the lines that the suite executes, a seed. Flows out: `Mutant`s; everything outside an edit stays
byte for byte, so the gold patch is the edit reversed. Removed statements leave no `pass` behind: one that is alone in its
block is never removed.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPERATORS: dict[str, dict[str, str]] = {
    "cmp": {
        "==": "!=",
        "!=": "==",
        "<": "<=",
        "<=": "<",
        ">": ">=",
        ">=": ">",
        "is": "is not",
        "is not": "is",
        "in": "not in",
        "not in": "in",
    },
    "binop": {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "&": "|", "|": "&", "<<": ">>", ">>": "<<"},
    "boolop": {"and": "or", "or": "and"},
}
_SKIPPED_TESTS = re.compile(rb"TYPE_CHECKING|__name__|sys\.version_info|sys\.platform")


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace bytes `start`:`end` of a file by `text`."""

    operator: str
    line: int
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        """The file with the bug."""
        return source[: self.start] + self.text + source[self.end :]


def mutants(source: bytes, covered: set[int], seed: str = "0") -> list[Mutant]:
    """At most one mutant per line that is executed, the kinds of bugs taking turns; the same list for the same seed."""
    found = sorted(candidates(source, covered), key=lambda m: (m.start, m.end, m.operator, m.text))
    chance = random.Random(seed)
    chance.shuffle(found)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.operator, []).append(mutant)
    ranked = [(n, kind, mutant) for kind, group in kinds.items() for n, mutant in enumerate(group)]
    turns = [mutant for _, _, mutant in sorted(ranked, key=lambda item: item[:2])]
    by_line: dict[int, Mutant] = {}
    for mutant in turns:
        if mutant.line not in by_line and _compiles(mutant.apply(source)):
            by_line[mutant.line] = mutant
    return list(by_line.values())


def candidates(source: bytes, covered: set[int]) -> Iterator[Mutant]:
    """Every mutant whose statement is executed by the suite."""
    yield from _Finder(source, covered).find()


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    """Walks the functions of one file."""

    def __init__(self, source: bytes, covered: set[int]) -> None:
        self._source, self._covered = source, covered
        self._starts = [0]
        for line in source.splitlines(keepends=True):  # of bytes: at the line ends that Python's tokenizer knows
            self._starts.append(self._starts[-1] + len(line))
        self._kinds: dict[type[ast.AST], Callable[..., Iterator[tuple[str, int, int, str]]]] = {
            ast.Compare: self._compare,
            ast.BinOp: self._binop,
            ast.BoolOp: self._boolop,
            ast.UnaryOp: self._not,
            ast.Constant: self._constant,
            ast.Call: self._swap,
            ast.Return: self._return,
            ast.If: self._if,
            ast.Break: self._jump,
            ast.Continue: self._jump,
            ast.FunctionDef: self._defaults,
            ast.AsyncFunctionDef: self._defaults,
        }

    def find(self) -> Iterator[Mutant]:
        """All of them."""
        for node in ast.parse(self._source).body:
            yield from self._walk(node, inside=False)

    def _walk(self, node: ast.AST, *, inside: bool, line: int = 0, alone: bool = True) -> Iterator[Mutant]:
        """`inside`: in a function; `line`: of the innermost statement; `alone`: in its block."""
        if isinstance(node, ast.If) and _SKIPPED_TESTS.search(self._text(node.test)):
            return
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.stmt):
            line = node.lineno
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (inside or function) and line in self._covered:
            for operator, start, end, text in self._edits(node):
                yield Mutant(operator, line, start, end, text.encode())
            if isinstance(node, ast.stmt) and inside and not alone:
                for operator, start, end, text in self._remove(node):
                    yield Mutant(operator, line, start, end, text.encode())
        for name, value in ast.iter_fields(node):
            if name in ("decorator_list", "annotation", "returns", "args", "type_params") and not isinstance(node, ast.Call):
                continue
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, inside=inside or function, line=line, alone=len(children) == 1)

    def _edits(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        if kind := self._kinds.get(type(node)):
            yield from kind(node)

    def _compare(self, node: ast.Compare) -> Iterator[tuple[str, int, int, str]]:
        if len(node.ops) == 1:
            yield from self._swap_operator("cmp", node.left, node.comparators[0])

    def _binop(self, node: ast.BinOp) -> Iterator[tuple[str, int, int, str]]:
        if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):  # "%" of a string: TypeError
            yield from self._swap_operator("binop", node.left, node.right)

    def _boolop(self, node: ast.BoolOp) -> Iterator[tuple[str, int, int, str]]:
        if len(node.values) == 2:
            yield from self._swap_operator("boolop", *node.values)

    def _swap_operator(self, kind: str, left: ast.expr, right: ast.expr) -> Iterator[tuple[str, int, int, str]]:
        start, gap = self._end(left), self._source[self._end(left) : self._start(right)].decode()
        match = re.fullmatch(r"([\s)\\]*)(not\s+in|is\s+not|[^\s()\\#]+)([\s(\\]*)", gap)
        if match and (new := OPERATORS[kind].get(" ".join(match[2].split()))):
            yield kind, start + match.start(2), start + match.end(2), new

    def _not(self, node: ast.UnaryOp) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node.op, ast.Not):
            match = re.match(rb"not\s*", self._source[self._start(node) : self._start(node.operand)])
            if match:
                yield "not", self._start(node), self._start(node) + match.end(), ""

    def _constant(self, node: ast.Constant) -> Iterator[tuple[str, int, int, str]]:
        if type(node.value) is int and self._text(node).isdigit():
            yield "off1", self._start(node), self._end(node), str(node.value + 1)

    def _swap(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        if len(node.args) < 2 or any(isinstance(a, ast.Starred | ast.GeneratorExp) for a in node.args[:2]):
            return
        a, b = node.args[:2]
        first, second = self._text(a), self._text(b)
        between = self._source[self._end(a) : self._start(b)]
        if first != second and not re.search(rb"[()#]", between):
            yield "swap_args", self._start(a), self._end(b), (second + between + first).decode()

    def _return(self, node: ast.Return) -> Iterator[tuple[str, int, int, str]]:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return_none", self._start(node), self._end(node), "return None"

    def _if(self, node: ast.If) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node.test, ast.UnaryOp) or b"\n" in self._text(node.test):
            return
        test = self._text(node.test).decode()
        simple = isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        yield "if_neg", self._start(node.test), self._end(node.test), f"not {test}" if simple else f"not ({test})"

    def _jump(self, node: ast.Break | ast.Continue) -> Iterator[tuple[str, int, int, str]]:
        new = "continue" if isinstance(node, ast.Break) else "break"
        yield "jump", self._start(node), self._end(node), new

    def _defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int, int, str]]:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            if isinstance(default, ast.Constant) and type(default.value) in (bool, int):
                new = not default.value if isinstance(default.value, bool) else int(str(default.value)) + 1
                yield "default", self._start(default), self._end(default), str(new)

    def _remove(self, node: ast.stmt) -> Iterator[tuple[str, int, int, str]]:
        """A whole statement that has its lines to itself."""
        if isinstance(node, ast.If) and not node.orelse and self._text(node).startswith(b"if"):
            kind = "rm_if"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            kind = "rm_assign"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            kind = "rm_call"
        else:
            return
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        before, after = self._source[first : self._start(node)], self._source[self._end(node) : last]
        if not before.strip() and (not after.strip() or after.strip().startswith(b"#")):
            yield kind, first, min(last, len(self._source)), ""

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> bytes:
        return self._source[self._start(node) : self._end(node)]
