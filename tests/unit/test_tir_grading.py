"""Grading: the last box, what is decided at once, what algebra decides, and answers that are made to hurt the grader."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.python_tir import grading
from environments.python_tir.audit import FORMS_MIN, audit, right_forms, wrong_forms
from environments.python_tir.equivalence import clean, equivalent, number, plain, wordy
from environments.python_tir.grading import ANSWER_MAX, Grader, Verdict, last_boxed
from environments.python_tir.rows import MathRow, load
from harness.errors import ConfigError, VerifierFault

SHARED = os.environ.get("SAO_SHARED_DATA", "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}} done", r"\{1, 2\}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{6} and \boxed{7", "6"),
        (r"\boxed{6} and \boxed{ }", "6"),
        (r"a } b \boxed{8}", "8"),
        (r"\boxed 9", None),
        ("9", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "\\", "7", " ", r"\}"])).map("".join))
def test_last_boxed_takes_any_text(text: str) -> None:
    found = last_boxed(text)
    assert found is None or (found.strip() == found and found in text)


def test_many_boxes_cost_little() -> None:
    before = time.process_time()
    assert last_boxed(r"\boxed{" * 200_000) is None
    assert time.process_time() - before < 10, "it is linear; quadratic would take hours"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("025", 25),
        ("1,234,567", 1234567),
        ("12,34", None),
        ("0.5", 0.5),
        ("3/4", 0.75),
        (r"-\frac{1}{2}", -0.5),
    ]
    + [("1/0", None), ("x", None), ("2^3", None), ("9" * 2000, None), ("", None)],
)
def test_number(text: str, value: float | None) -> None:
    assert number(clean(text)) == value


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("204", "$204$.", True),
        ("204", r"204 \text{ minutes}", True),
        ("204", r"\mathbf{204}", True),
        ("204", "205", False),
        ("204", "204.5", False),
        ("90", r"90^\circ", True),
        ("1/2", "0.5", True),
        ("1/3", "0.3333333", None),
        (r"\frac{1}{2}", r"\dfrac{1}{2}", True),
        ("x", "y", None),
        ("odd $n$", r"\text{odd } n", True),
        ("odd $n$", "even n", False),
        ("All powers of 2", "all powers of 2.", True),
        ("All powers of 2", "all powers of 3", False),
        ("n is prime", "n is not prime", False),
    ],
)
def test_what_is_plain(gold: str, answer: str, verdict: bool | None) -> None:
    assert plain(gold, answer) is verdict


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\sqrt{2}-1", r"\frac{1}{1+\sqrt{2}}", True),
        (r"\sqrt{2}-1", r"1-\sqrt{2}", False),
        ("1/3", "0.3333333", True),
        ("1/3", "0.333", False),
        (r"\frac{1}{3000000}", "0.0", False),
        ("2026, 2030", r"\{2030, 2026\}", True),
        ("2026, 2030", r"2026 \text{ and } 2030", True),
        ("2026, 2030", "2026", False),
        ("2026, 2030", "2026, 2030, 2031", False),
        ("(1, 2, 3)", r"\left(1,2,3\right)", True),
        ("(1, 2, 3)", "(3, 2, 1)", False),
        (r"(-\infty, 0]", r"\left(-\infty,0\right]", True),
        (r"(-\infty, 0]", r"(-\infty, 0)", False),
        ("2^{2024}+1", "2^{2024}+2", False),
        ("2^{2024}+1", "1+4^{1012}", True),
        (r"\frac{2025^{101} + 2025^2}{2026}", r"\frac{2025^{101} + 2025^2 + 1}{2026}", False),
        ("3", "n = 3", True),
        ("3", "not 3", False),
        ("3", r"3 \text{ or } 4", False),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("x^2 + 2x + 1", "(x-1)^2", False),
        ("3", "hello", False),
        ("3", "}{", False),
    ],
)
def test_algebra(gold: str, answer: str, verdict: bool) -> None:
    assert equivalent(gold, answer) is verdict


def graded(*pairs: tuple[str, str]) -> list[Verdict]:
    async def main() -> list[Verdict]:
        grader = Grader(1)
        try:
            return [await grader.grade(gold, answer) for gold, answer in pairs]
        finally:
            grader.close()

    return asyncio.run(main())


def test_an_answer_made_to_hurt_is_wrong_and_the_next_is_judged() -> None:
    tower, memory = "9^{9^{9^{9^{9}}}}", r"\binom{10^{9}}{5 \cdot 10^{8}}"
    hurt = graded((r"\sqrt{2}", tower), (r"\sqrt{2}", memory), (r"\sqrt{2}", "(" * 1900), (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"))
    assert [verdict.correct for verdict in hurt] == [False, False, False, True]
    assert graded(("1", "1" * (ANSWER_MAX + 1))) == [Verdict(False, "length")]


def test_plain_answers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "Judge", None)
    assert graded(("7", "7"), ("7", "8")) == [Verdict(True, "plain"), Verdict(False, "plain")]


def test_a_missing_library_is_said_before_the_first_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math-verify, which is missing"):
        Grader()


def test_a_judge_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading.sys, "executable", "/bin/false")
    with pytest.raises(VerifierFault, match="does not start"):
        graded((r"\sqrt{2}", r"\sqrt{3}"))


def test_a_judge_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "WALL_S", 0.0)
    assert graded((r"\sqrt{2}", r"\frac{2}{\sqrt{2}}")) == [Verdict(False, "limit")]


# --- many written forms ----------------------------------------------------------------------------------------------

GOLDS = [
    "204",
    "025",
    r"\frac{1}{2}",
    r"$\sqrt{2}-1$",
    "2026, 2030",
    "$(4, 1, 2)$",
    r"$(-\infty, 0]$",
    "odd $n$",
    "$2^{u-2}$",
    "0.5",
]


def test_every_answer_has_five_forms_and_wrong_neighbours() -> None:
    for gold in GOLDS:
        forms = [text for _, text in right_forms(gold)]
        assert len(set(forms)) >= FORMS_MIN, gold
        assert {text for _, text in wrong_forms(gold)}.isdisjoint(forms)


def test_forms_of_a_few_answers() -> None:
    report = asyncio.run(audit([MathRow(id=gold, problem="?", answer=gold) for gold in GOLDS]))
    print(report)
    assert not report.refused and not report.accepted, str(report)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "refused", "accepted"), [("aime24.jsonl", 0.0, 0.0), ("imo_answerbench_v2.csv", 0.005, 0.0)])
def test_forms_of_a_data_set(name: str, refused: float, accepted: float) -> None:
    """The rates of `docs/python-tir.md`, every disagreement printed."""
    if not Path(SHARED, name).is_file():
        pytest.skip("SAO_SHARED_DATA names no folder with samples")
    report = asyncio.run(audit(load(str(Path(SHARED, name)), invalid="skip")[0]))
    print(name, report)
    assert len(report.refused) <= refused * report.right, str(report)
    assert len(report.accepted) <= accepted * report.wrong, str(report)


def test_wordy() -> None:
    assert wordy("odd $n$") and wordy("no solutions") and not wordy(r"\frac{\sin x}{\log n}") and not wordy("gcd(a, b)")
