"""What gives an answer away, and what only looks so."""

from __future__ import annotations

import pytest

from environments.examples.sql import Sql
from harness.kit.check import check, passed, table
from harness.kit.secrets import gives_away
from tests.kit import planted
from tests.kit.test_check import MEMORY, failures, spec


@pytest.mark.parametrize(
    ("path", "text", "secret", "told"),
    [
        ("notes.txt", "it is bergamot, they say", ("bergamot",), True),
        ("notes.txt", "it is bergamots", ("cardamom",), False),
        ("answer.txt", "7\n", ("7",), True),
        ("x", "7\n", ("7",), True),
        ("tests/expected_output.json", "[3, 7]", ("7",), True),
        ("tests/expected_output.json", "[3, 17, 0.7, 7.5, 7a, -7]", ("7",), False),
        ("config.json", '{"a": 1, "answer": 7}', ("7",), True),
        ("config.json", '{"answers": ["7", "b"]}', ("7", "b"), True),
        ("config.json", '{"answers": ["7", "c"]}', ("7", "b"), False),
        ("config.py", "ANSWER = -7", ("-7",), True),
        ("read.me", "The label is cat.", ("cat",), True),
        ("read.me", "Find the answer. There are 7 files.", ("7",), False),
        ("numbers.txt", "3\n7\n5\n", ("7",), False),
        ("goldfish.txt", "3 7 5", ("7",), False),
    ],
)
def test_what_a_file_gives_away(path: str, text: str, secret: tuple[str, ...], told: bool) -> None:
    assert gives_away(path, text, secret) is told


@pytest.mark.parametrize(
    ("cls", "seen"),
    [(planted.WritesAShortAnswer, "answer.json holds `truth.right_answer`"), (planted.WritesALabel, "key.txt holds `labels`")],
)
def test_short_and_nested_answers_are_found(cls: type, seen: str) -> None:
    verdicts = check(spec(cls), MEMORY.split())
    assert list(failures(verdicts)) == ["secrets"], table(verdicts)
    assert seen in failures(verdicts)["secrets"]


def test_the_check_says_what_it_looked_for() -> None:
    said = {
        each: [v.said for v in check(each, [MEMORY]) if v.name == "secrets"][0] for each in (spec(planted.Sound), spec(Sql))
    }
    assert said[spec(planted.Sound)] == "looked for `answer` in 4 files of 4 tasks"
    assert said[spec(Sql)].startswith("nothing to look for: no key of `task.data` is called answer, solution,")


def test_an_answer_among_the_data_is_no_leak() -> None:
    verdicts = check(spec(planted.AsksForTheLargest), [MEMORY])
    assert passed(verdicts), table(verdicts)
