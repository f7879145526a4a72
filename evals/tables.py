"""What a report says, as plain tables: the same content for every format.

Flows in: a `Result` or a `Comparison`. Flows out: a heading, sentences and `Table`s of text. Nothing is escaped here, but what
does not print (control characters, line breaks, marks that turn the direction of writing) is replaced, since every format
would suffer from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evals import statistics as st
from evals.compare import Comparison, p_value
from evals.result import Result
from evals.statistics import Floats
from evals.summary import CORRELATION, Interval, Summary, summarize

NAMED = 20
"""Problems that a list names before it only counts."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of as many cells as the head has."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Content:
    """A report; `problems` is long and for formats that can fold it away."""

    heading: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...]
    problems: Table


def content(of: Result | Comparison) -> Content:
    """Of either."""
    return _of_result(of) if isinstance(of, Result) else _of_comparison(of)


def _of_result(result: Result) -> Content:
    s = summarize(result)
    sentences = [
        f"{s.successes} of {s.judged} judged samples succeeded; {s.problems} problems, {_runs(s.runs)} each.",
        f"{s.missing} samples are missing, lost to infrastructure; they count neither way." if s.missing else "",
    ]
    sentences += [f"Settings: {json.dumps(result.settings, ensure_ascii=False)}"] if result.settings else []
    tables = (
        _table("Success", ("measure", "value"), _success(s)),
        _table("pass@k", ("k", "pass@k", "problems"), ((k, _percent(v), n) for k, (v, n) in s.pass_at.items())),
        _table("Runs", ("run", "success"), ((run, _percent(v)) for run, v in enumerate(s.by_run))),
        _table("Terminations", ("termination", "samples", "share"), _terminations(s)),
        _table(
            "Use per judged sample",
            ("", "mean", "median", "total, with missing"),
            ((what, *(_number(v) for v in (u.mean, u.median, u.total))) for what, u in s.uses.items()),
        ),
    )
    kept = tuple(t for t in tables if t.rows and (s.runs > 1 or t.title not in ("pass@k", "Runs")))
    matrix = result.successes
    problems = _table("Problems", ("problem", "succeeded of judged"), zip(result.problems, map(_fraction, matrix), strict=True))
    return Content(printable(f"{result.suite}: {result.model}"), _sentences(sentences), kept, problems)


def _success(s: Summary) -> Iterable[tuple[str, str]]:
    return (
        (
            f"success, mean over {_runs(s.runs)}" + (f" (avg@{s.runs}, not pass@{s.runs})" if s.runs > 1 else ""),
            _percent(s.success),
        ),
        ("95 % interval over samples, Wilson", _interval(s.wilson)),
        ("95 % interval over samples, exact (Clopper-Pearson)", _interval(s.clopper_pearson)),
        ("95 % interval over problems, bootstrap", _interval(s.bootstrap)),
        ("standard error over samples, binomial", _points(s.error_binomial)),
        ("standard error over problems", _points(s.error_problems)),
        ("ended by a limit", _percent(s.truncated)),
        ("smallest difference that is found 4 times in 5, other problems", _points(s.detectable_unpaired)),
        (f"the same problems, assuming a correlation of {CORRELATION}", _points(s.detectable_paired)),
    )


def _terminations(s: Summary) -> Iterable[tuple[Any, ...]]:
    total = sum(s.terminations.values())
    return ((name, count, _percent(count / total)) for name, count in s.terminations.items())


def _of_comparison(c: Comparison) -> Content:
    a, b = summarize(c.a), summarize(c.b)
    several = c.mcnemar is None
    sentences = [
        c.verdict,
        f"{len(c.differences)} problems in common; A has {len(c.only_a)} and B {len(c.only_b)} that the other has not"
        f"{_named(c.only_a + c.only_b)}.",
        f"{len(c.lost)} more have no judged run in one of them{_named(c.lost)}." if c.lost else "",
        "There are several runs per problem: sign flips of the problems' means, not McNemar's test." if several else "",
        "" if c.asked_otherwise else "This is about these two models, not about other training seeds.",
    ]
    sides = (
        ("model", c.a.model, c.b.model),
        ("success", _percent(a.success), _percent(b.success)),
        ("95 % interval over problems", _interval(a.bootstrap), _interval(b.bootstrap)),
        ("95 % interval over samples, Wilson", _interval(a.wilson), _interval(b.wilson)),
        ("runs per problem", a.runs, b.runs),
        ("missing samples", a.missing, b.missing),
        ("ended by a limit", _percent(a.truncated), _percent(b.truncated)),
        *((f"{what}, mean", _number(a.uses[what].mean), _number(b.uses[what].mean)) for what in a.uses),
    )
    difference = [
        ("A minus B", _points(c.difference, sign=True)),
        ("95 % interval, paired bootstrap over problems", _interval((c.low, c.high), sign=True)),
        ("p, sign flips of the problems' means", p_value(c.sign_flip)),
        *([] if c.mcnemar is None else [("p, McNemar exact (decides)", p_value(c.mcnemar))]),
        ("problems with A ahead, B ahead, neither", f"{c.ahead_a}, {c.ahead_b}, {len(c.differences) - c.ahead_a - c.ahead_b}"),
        ("correlation of the problems' means", "-" if math.isnan(c.correlation) else f"{c.correlation:.2f}"),
        ("smallest difference that is found 4 times in 5, as paired here", _points(c.detectable)),
        ("without pairing", _points(c.detectable_unpaired)),
    ]
    tables = [_table("A and B", ("", "A", "B"), sides), _table("Difference", ("measure", "value"), difference)]
    if c.unlike:
        rows = ((key, *(json.dumps(v, ensure_ascii=False) for v in values)) for key, values in c.unlike.items())
        tables.append(_table("Settings that differ", ("setting", "A", "B"), rows))
    cells = zip(c.a.problems, map(_fraction, c.a.successes), map(_fraction, c.b.successes), c.differences, strict=True)
    problems = _table("Problems", ("problem", "A", "B", "A minus B"), ((p, x, y, f"{d:+.2f}") for p, x, y, d in cells))
    return Content(printable(f"{c.a.suite}: A and B"), _sentences(sentences), tuple(tables), problems)


def printable(text: str) -> str:
    """With a replacement character for each that does not print."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Table:
    return Table(title, head, tuple(tuple(printable(str(cell)) for cell in row) for row in rows))


def _sentences(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(printable(s) for s in sentences if s)


def _named(problems: tuple[str, ...]) -> str:
    more = ", .." if len(problems) > NAMED else ""
    return f" ({', '.join(problems[:NAMED])}{more})" if problems else ""


def _runs(n: int) -> str:
    return "1 run" if n == 1 else f"{n} runs"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share * 100:.1f} %"


def _points(share: float, *, sign: bool = False) -> str:
    if math.isinf(share):
        return "none: too few problems"
    return "-" if math.isnan(share) else f"{share * 100:{'+' if sign else ''}.2f} points"


def _interval(interval: Interval, *, sign: bool = False) -> str:
    form = "+.1f" if sign else ".1f"
    return "-" if math.isnan(interval[0]) else f"{interval[0] * 100:{form}} to {interval[1] * 100:{form}}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}".removesuffix(".0")


def _fraction(row: Floats) -> str:
    """Of one problem's runs."""
    judged = st.known(row)
    return f"{judged.sum():.0f} / {len(judged)}"
