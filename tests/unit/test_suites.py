"""What can be asked: the suites of the package, a configuration, a file of rows; everything else is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.evaluate import prepare
from evals.models import Model
from evals.suites import load_suite, suites
from harness.errors import ConfigError

ENDPOINT = Model("m", endpoint={"url": "http://localhost/v1", "model": "m"})
PAPER = {"aime_2025": 16, "beyond_aime": 4, "hmmt_nov_2025": 16, "imo_answerbench": 16, "swe_verified": 1}
"""Runs per problem as the paper reports them (avg@16, BeyondAIME avg@4, SWE-bench Pass@1)."""
MATHS = {"problem": "1 + 1?", "answer": "2"}
SWE = {"instance_id": "a__b-1", "problem_statement": "It fails."}


@pytest.mark.parametrize("name", suites())
def test_every_suite_of_the_package_is_valid(name: str) -> None:
    suite = load_suite(name)
    config, plan = prepare(suite, ENDPOINT, [], None, None)
    assert (plan.suite, plan.runs, plan.split) == (name, PAPER.get(name, 1), "heldout")
    assert (plan.problems is None) == (name in PAPER), "a benchmark is asked whole, generated tasks are not"
    assert config.steps == 0 and plan.official == (name == "swe_verified")


@pytest.mark.parametrize("name", PAPER)
def test_benchmarks_are_asked_as_in_the_paper(name: str) -> None:
    config, _ = prepare(load_suite(name), ENDPOINT, [], None, None)
    limits = config.limits
    assert limits.max_context == 131_072 and limits.max_turns == (300 if name == "swe_verified" else 50)
    assert config.agent.id == ("openhands" if name == "swe_verified" else "tool_loop")
    assert config.environment.table()["heldout"] == 1.0, "every problem, not a share"


def test_a_configuration_is_a_suite() -> None:
    suite = load_suite("configs/quickstart.toml")
    assert suite.name == "quickstart" and suite.layers["environment"] == {"id": "toy_repair"}
    assert (suite.table.runs, suite.table.split, suite.table.official) == (1, "heldout", False)
    config, plan = prepare(suite, ENDPOINT, [], None, None)
    assert plan.problems == config.eval.tasks == 256


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[suite]\nruns = 3\nsplit = "train"\n[environment]\nid = "sums"\n')
    config, plan = prepare(load_suite(str(path)), ENDPOINT, [], None, None)
    assert (plan.suite, plan.runs, plan.split, plan.problems) == ("mine", 3, "train", None)
    assert config.environment.id == "sums"


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("a.jsonl", json.dumps(MATHS) + "\n", "python_tir"),
        ("a.json", json.dumps([{"Question": "1 + 1?", "answer": 2}]), "python_tir"),
        ("a.csv", " Problem ,answer\n1 + 1?,2\n", "python_tir"),
        ("a.jsonl", json.dumps(SWE) + "\n", "swe"),
        ("a.jsonl", json.dumps(SWE | {"problem": "?"}) + "\n", "swe"),
    ],
)
def test_rows_are_told_by_their_columns(tmp_path: Path, file: str, text: str, kind: str) -> None:
    path = tmp_path / file
    path.write_text(text)
    suite = load_suite(str(path))
    environment = suite.layers["environment"]
    assert (suite.name, environment["id"], environment["dataset"]) == ("a", kind, str(path.resolve()))
    assert "split" not in environment, "a file has none"
    assert suite.table.runs == 1 and suite.table.official == (kind == "swe")


def test_rows_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "aime.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1 + 1?"], "answer": ["2"]}), path)
    assert load_suite(str(path)).layers["environment"]["id"] == "python_tir"


# --- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "message", "hint"),
    [
        ("none.toml", None, "cannot read", "did you mean|valid"),
        ("a.toml", "x = ", "not valid TOML", "correct"),
        ("a.toml", b"\xff", "not valid TOML", "correct"),
        ("a.toml", "suite = 5", "`suite` = 5", ""),
        ("a.toml", "[suite]\nruns = 0", r"`suite\.runs` = 0", "1"),
        ("a.toml", "[suite]\nrun = 2", r"`suite\.run` is not a setting", "runs"),
        ("a.toml", '[suite]\nsplit = "test"', r"`suite\.split` = 'test'", "heldout"),
        ("none.jsonl", None, "there is no such file", "path"),
        ("a.jsonl", "", "has no rows", "at least one"),
        ("a.jsonl", "{", "line 1: no JSON", "correct"),
        ("a.jsonl", "[[1]]", "not an object", "correct"),
        ("a.jsonl", '{"text": "hello"}', "columns: text", "instance_id or problem or question"),
        ("a.parquet", "no", "parquet", "correct"),
    ],
)
def test_one_clear_error(tmp_path: Path, file: str, text: Any, message: str, hint: str) -> None:
    path = tmp_path / file
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_suite(str(path))
    assert hint.split("|")[0] in caught.value.hint or any(word in caught.value.hint for word in hint.split("|"))


@pytest.mark.parametrize("word", ["aime_2024", "", "sums.tml", "configs"])
def test_a_name_that_is_not_known_gets_the_nearest(word: str) -> None:
    with pytest.raises(ConfigError, match="is not known") as caught:
        load_suite(word)
    assert "toml" in caught.value.hint and ".jsonl" in caught.value.hint
    assert "aime_2025" in caught.value.hint or word != "aime_2024"
