"""The stored result of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.result import Result, Sample, load
from harness.errors import ConfigError, InvariantError


def sample(problem: str, run: int, reward: float | None) -> Sample:
    return Sample(problem, run, reward, "finished", 3, 900, 200, 1.5, "" if reward is not None else "lost")


RESULT = Result(
    suite="tens",
    model="m",
    runs=2,
    problems=("p", "q"),
    settings={"temperature": 1.0, "tools": ["python"]},
    samples=(sample("p", 0, 1.0), sample("p", 1, 0.5), sample("q", 0, None)),
)


def test_the_matrix_of_successes() -> None:
    """A half is no success; what was lost, and what never ran, is missing."""
    np.testing.assert_array_equal(RESULT.successes, [[1.0, 0.0], [np.nan, np.nan]])
    assert RESULT.successes.dtype == np.float64
    assert [s.run for s in RESULT.judged] == [0, 1]


def test_some_of_the_problems() -> None:
    part = RESULT.only(["q"])
    assert part.problems == ("q",) and part.samples == RESULT.samples[2:]
    assert RESULT.only(["q", "p"]).problems == ("q", "p")


@pytest.mark.parametrize("name", ["", "result.json", "other.json", "new/folder"])
def test_what_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    RESULT.save(path)
    assert load(path) == RESULT
    assert not list(tmp_path.rglob("*.part"))


TEXT = st.text(max_size=8)


SETTINGS = st.dictionaries(TEXT, st.none() | TEXT | st.booleans(), max_size=3)
REWARDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=30)
@given(TEXT, TEXT, REWARDS, SETTINGS)
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, problem: str, error: str, reward: float | None, asked: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    result = Result(error, problem, 1, (problem,), asked, (replace(sample(problem, 0, reward), error=error),))
    result.save(folder)
    assert load(folder) == result


def test_bytes_that_were_no_text_do_not_make_it_unreadable(tmp_path: Path) -> None:
    """As `surrogateescape` leaves them in a message."""
    lost = replace(sample("p", 0, None), error=b"\xff!".decode("utf-8", "surrogateescape"))
    replace(RESULT, samples=(lost,)).save(tmp_path)
    assert load(tmp_path).samples[0].error == "?!"


def changed(**fields: Any) -> bytes:
    return json.dumps({**STORED, **fields}).encode()


STORED: dict[str, Any] = {
    "version": 1,
    "suite": "s",
    "model": "m",
    "runs": 1,
    "problems": ["p"],
    "settings": {},
    "samples": [
        {
            "problem": "p",
            "run": 0,
            "reward": 1.0,
            "termination": "finished",
            "turns": 1,
            "tokens": 1,
            "action_tokens": 1,
            "seconds": 1.0,
            "error": "",
        }
    ],
}


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (b"", "EOF"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"{}", "version"),
        (b"[]", "is no result"),
        (changed(version="1"), "version"),
        (changed(version=2), "version 2, not 1"),
        (changed(runs="1"), "runs"),
        (changed(runs=0), "at least 1"),
        (changed(samples=[{**STORED["samples"][0], "reward": "1"}]), "samples.0.reward"),
        (changed(samples=[{**STORED["samples"][0], "reward": float("nan")}]), "not finite"),
        (changed(samples=[{**STORED["samples"][0], "run": 1}]), "run 1"),
        (changed(samples=STORED["samples"] * 2), "two samples"),
        (changed(problems=["p", "p"]), "twice"),
    ],
    ids=str,
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, stored: bytes, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(stored)
    with pytest.raises(ConfigError, match=says) as error:
        load(tmp_path)
    assert str(path) in error.value.message and error.value.hint


def test_the_undamaged_file_loads(tmp_path: Path) -> None:
    """The cases above fail for what they change."""
    (tmp_path / "result.json").write_bytes(changed())
    assert load(tmp_path).samples[0].reward == 1.0


def test_a_path_without_a_result(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="cannot be read") as error:
            load(path)
        assert "result.json" in error.value.hint


@pytest.mark.parametrize("samples", [(sample("x", 0, 1.0),), (sample("p", -1, 1.0),), (sample("p", 0, float("inf")),)], ids=str)
def test_samples_that_contradict_the_result(samples: tuple[Sample, ...]) -> None:
    with pytest.raises(InvariantError):
        replace(RESULT, samples=samples)
