"""Reports of a result and of a comparison, in every format."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from evals import report
from evals.compare import Comparison, compare
from evals.result import Result, Sample
from evals.summary import summarize
from harness.errors import ConfigError

EVIL = "[red]$\\f{$</title><script>x</script>|`a`[b](c)*d*_e_\x1b[31m\n# g\u202e&amp;\udc80"
"""Markup of every format, a broken formula, a colour, a heading, a turn of the direction of writing, half a surrogate pair."""


def make(seed: int = 0, *, problems: int = 20, runs: int = 4, name: str = "model", lost: float = 0.1) -> Result:
    """Random outcomes, a few of them missing."""
    rng = np.random.default_rng(seed)
    ids = tuple(f"{name}-{i}" if name == EVIL else f"p{i}" for i in range(problems))

    def sample(problem: str, run: int) -> Sample:
        missing = rng.random() < lost
        termination = "sandbox_lost" if missing else str(rng.choice(["finished", "max_turns", EVIL]))
        turns = int(rng.integers(1, 40))
        return Sample(
            problem, run, None if missing else float(rng.integers(0, 2)), termination, turns, 700 * turns, 90 * turns, 1.5, ""
        )

    samples = tuple(sample(problem, run) for problem in ids for run in range(runs))
    return Result(name, name, runs, ids, {name: name}, samples)


RESULT = make()
SINGLE = compare(make(1, runs=1), make(2, runs=1))
SEVERAL = compare(make(1, problems=25), make(2))
REPORTS = [RESULT, SINGLE, SEVERAL]


def test_the_numbers_of_a_result_by_hand() -> None:
    rows = [
        ("p", 0, 1.0, "finished", 2, 100),
        ("p", 1, 1.0, "max_turns", 4, 200),
        ("q", 0, 0.0, "finished", 6, 600),
        ("q", 1, None, "sandbox_lost", 1, 50),
    ]
    samples = tuple(Sample(p, run, r, t, turns, tokens, 10, 2.0, "") for p, run, r, t, turns, tokens in rows)
    s = summarize(Result("s", "m", 2, ("p", "q"), {}, samples))
    assert (s.judged, s.successes, s.missing, s.success) == (3, 2, 1, 0.5)
    assert s.by_run == (0.5, 1.0)
    assert s.pass_at == {1: (0.5, 2), 2: (1.0, 1)}
    assert s.terminations == {"finished": 2, "max_turns": 1, "sandbox_lost": 1}
    assert s.truncated == pytest.approx(1 / 3)
    assert (s.uses["turns"].mean, s.uses["turns"].median, s.uses["turns"].total) == (4.0, 4.0, 13.0)
    assert (s.uses["tokens"].mean, s.uses["tokens"].median, s.uses["tokens"].total) == (300.0, 200.0, 950.0)


def test_pass_at_k_for_powers_of_two() -> None:
    assert list(summarize(make(runs=1)).pass_at) == [1]
    assert list(summarize(make(runs=6)).pass_at) == [1, 2, 4]
    assert list(summarize(make(runs=16)).pass_at) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("of", REPORTS)
def test_json_holds_every_number(of: Result | Comparison) -> None:
    stored = report.as_json(of)
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    if isinstance(of, Result):
        assert stored["bootstrap"] == list(summarize(of).bootstrap)
    else:
        assert (stored["difference"], stored["verdict"]) == (of.difference, of.verdict)
        assert stored["a"] == report.as_json(of.a)
        assert list(stored["differences"].values()) == of.differences.tolist()


@pytest.mark.parametrize("form", [report.text, report.markdown, report.html])
@pytest.mark.parametrize("of", REPORTS)
def test_what_every_format_says(form: Any, of: Result | Comparison) -> None:
    said = " ".join(form(of).replace("&#39;", "'").split())
    if isinstance(of, Result):
        s = summarize(of)
        facts = [f"{s.success * 100:.1f} %", "avg@4, not pass@4", f"{s.missing} samples are missing", "max", "Clopper-Pearson"]
    else:
        facts = [of.verdict[:60], "not about other training seeds", f"{of.ahead_a}, {of.ahead_b}, "]
        facts += ["McNemar exact (decides)"] if of is SINGLE else ["sign flips of the problems' means, not McNemar's test"]
    for fact in facts:
        assert fact in said


def test_one_run_has_no_table_of_runs() -> None:
    assert "pass@k" in report.text(RESULT) and "pass@" not in report.text(make(runs=1))


def test_what_only_one_has_is_named() -> None:
    said = " ".join(report.text(SEVERAL).split())
    assert "A has 5 and B 0 that the other has not (p20, p21, p22, p23, p24)." in said


@pytest.mark.parametrize("form", [report.text, report.markdown, report.html])
def test_nothing_judged(form: Any) -> None:
    lost = make(lost=1.0)
    assert "80 samples are missing" in form(lost)
    assert "nan" not in form(lost).lower().replace("nano", "")
    assert report.as_json(lost)["success"] is None


@pytest.fixture(params=["result", "comparison"])
def evil(request: pytest.FixtureRequest) -> Result | Comparison:
    one, other = make(1, name=EVIL), replace(make(2, name=EVIL), settings={})
    return one if request.param == "result" else compare(one, other)


def test_text_escapes(evil: Result | Comparison) -> None:
    said = report.text(evil)
    rows = [line for line in said.splitlines() if line.startswith("  [red]") or line.startswith("  model")]
    assert rows and all("[red]" in row for row in rows), "no markup of rich"
    assert all(c.isprintable() or c == "\n" for c in said)
    assert max(map(len, said.splitlines())) <= 120


def test_markdown_escapes(evil: Result | Comparison) -> None:
    said = report.markdown(evil)
    assert r"\[red\]\$\\f{\$\</title\>\<script\>x\</script\>\|\`a\`\[b\](c)\*d\*\_e\_" in said
    assert "<script>" not in said.replace(r"\<", "")
    lines = said.splitlines()
    assert not any(line.startswith("# g") for line in lines)
    for table in said.split("\n\n"):
        rows = [line.replace(r"\|", "") for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, "as many cells as the head has"
    said.encode()


class Tags(HTMLParser):
    """The tags of a page and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_html_escapes_and_needs_nothing_else(evil: Result | Comparison) -> None:
    page = report.html(evil)
    page.encode()
    tags = Tags()
    tags.feed(page)
    assert {"svg", "table", "details"} <= tags.tags
    assert not tags.tags & {"script", "img", "link", "iframe", "object"}
    assert all(link.startswith("#") for link in tags.links)
    assert "\x1b" not in page and "\u202e" not in page


def drawing(of: Result | Comparison) -> str:
    page = report.html(of)
    return page[page.index("<svg") : page.index("</svg>") + len("</svg>")]


def test_the_plots_are_there_and_the_same_each_time() -> None:
    first = drawing(RESULT)
    said = " ".join(ET.fromstring(first).itertext())
    for title in ("Success by problem", "Turns per judged sample", "Tokens per judged sample", "Terminations", "max_turns"):
        assert title in said
    assert drawing(RESULT) == first
    compared = drawing(SEVERAL)
    assert "A minus B by problem" in compared and "Bootstrap of the difference" in compared


def test_html_without_matplotlib_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="needs matplotlib") as error:
        report.html(RESULT)
    assert "pip install" in error.value.hint
    assert report.text(RESULT) and report.markdown(RESULT), "the other formats do without"
