"""Reports: a result or a comparison for the terminal, as JSON, as Markdown, or as one HTML file with plots.

Flows in: a `Result` or a `Comparison`. Flows out: text, or a dictionary that JSON can hold. Names of suites, models, problems,
terminations and settings come from outside: each format escapes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from evals.compare import Comparison
from evals.plots import svg
from evals.result import Result
from evals.summary import summarize
from evals.tables import Table, content

WIDTH = 120
_MARKS = re.compile(r"([\\`*_\[\]<>#|~&$])")


def text(of: Result | Comparison) -> str:
    """Tables for a terminal, without colours, at most 120 wide."""
    page = content(of)
    out = StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False)
    for line in (page.heading, *page.sentences):
        console.print(Text(line))
    for table in page.tables:
        drawn = RichTable(box=SIMPLE_HEAD)
        for column, name in enumerate(table.head):
            drawn.add_column(Text(name), justify="right" if column else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        console.print(Text(f"\n{table.title}"), drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def markdown(of: Result | Comparison) -> str:
    """GitHub's flavour."""
    page = content(of)
    parts = [f"# {_marked(page.heading)}", *map(_marked, page.sentences), *map(_markdown_table, page.tables)]
    return "\n\n".join(parts) + "\n"


def html(of: Result | Comparison) -> str:
    """One page that needs nothing else. Raises `ConfigError` if matplotlib is missing."""
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("report.html.jinja").render(page=content(of), plots=svg(of))


def as_json(of: Result | Comparison) -> dict[str, Any]:
    """Every number, unrounded; null where there is none, and for an infinite smallest difference."""
    if isinstance(of, Result):
        named = {"suite": of.suite, "model": of.model, "settings": of.settings}
        return {"kind": "result", **named, **_plain(asdict(summarize(of)))}
    numbers = {name: getattr(of, name) for name in Comparison.__slots__ if name not in ("a", "b", "differences")}
    return {
        "kind": "comparison",
        "suite": of.a.suite,
        "verdict": of.verdict,
        "found": of.found,
        "a": as_json(of.a),
        "b": as_json(of.b),
        **_plain(numbers),
        "differences": _plain(dict(zip(of.a.problems, of.differences, strict=True))),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _marked(line: str) -> str:
    return _MARKS.sub(r"\\\1", line)


def _markdown_table(table: Table) -> str:
    rows = (table.head, ("---",) * len(table.head), *(tuple(map(_marked, row)) for row in table.rows))
    return "\n".join([f"## {_marked(table.title)}", "", *(f"| {' | '.join(row)} |" for row in rows)])
