"""Take tests out of a tree: what the agent may not see until it is judged.

Flows in: a tree, and where the test functions begin. Flows out: the tree without them; a file left without tests goes.
"""

from __future__ import annotations

import ast

from environments.swe.factory.sources import Tree

Function = ast.FunctionDef | ast.AsyncFunctionDef


def hide(tree: Tree, definitions: set[tuple[str, int]]) -> Tree:
    """Without the test functions at these (path, first line); a file where one cannot be cut out goes whole."""
    result = dict(tree)
    for path in sorted({path for path, _ in definitions}):
        cut = cut_functions(tree[path], {line for where, line in definitions if where == path})
        if cut is None:
            del result[path]
        else:
            result[path] = cut
    return result


def cut_functions(source: bytes, lines: set[int]) -> bytes | None:
    """The module without the functions that begin there (decorators included), or None if nothing should be left of it."""
    module = ast.parse(source)
    found: list[tuple[int, int]] = []
    missing = set(lines)
    _cut_block(module.body, missing, found)
    if missing or not _has_tests(module, found):
        return None
    kept = source.splitlines(keepends=True)
    for first, last in sorted(found, reverse=True):
        while first > 1 and not kept[first - 2].strip():
            first -= 1
        del kept[first - 1 : last]
    text = b"".join(kept)
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text


def _first_line(node: Function | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _cut_block(body: list[ast.stmt], missing: set[int], found: list[tuple[int, int]]) -> bool:
    """Note the spans to cut in this body; True if nothing of it would stay."""
    stays = False
    for node in body:
        if isinstance(node, Function) and {_first_line(node), node.lineno} & missing:
            missing -= {_first_line(node), node.lineno}
            found.append((_first_line(node), node.end_lineno or node.lineno))
        elif isinstance(node, ast.ClassDef):
            inner: list[tuple[int, int]] = []
            if _cut_block(node.body, missing, inner):
                inner = [(_first_line(node), node.end_lineno or node.lineno)]
            found.extend(inner)
            stays = stays or inner[:1] != [(_first_line(node), node.end_lineno or node.lineno)]
        else:
            stays = True
    return not stays


def _has_tests(module: ast.Module, cut: list[tuple[int, int]]) -> bool:
    """Whether a function or class is left."""
    nodes = [node for node in ast.walk(module) if isinstance(node, Function)]
    return any(not any(first <= node.lineno <= last for first, last in cut) for node in nodes)
