"""The examples keep the contract, and hold against an agent that tries more than the task."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from environments.examples.sql import FIRST_QUERY, Sql, SqlConfig
from environments.examples.web_form import WebForm, WebFormConfig
from harness.engines.scripted import call, in_turn
from harness.kit.check import check, passed, table
from harness.kit.play import byte_chat, subject
from harness.task import Limits
from tests.contracts.sandbox_support import IMAGE, needs_docker

EXAMPLES = "environments.examples"
FILES = sorted((Path(__file__).parents[2] / "environments" / "examples").glob("[a-z]*.py"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sql:Sql", ["sandbox.id=memory"]),
        ("web_form:WebForm", ["sandbox.id=memory"]),
        ("shell:Shell", []),
        pytest.param("shell:Shell", ["sandbox.id=docker", f"sandbox.image={IMAGE}", f"image={IMAGE}"], marks=needs_docker),
    ],
)
def test_an_example_keeps_the_contract(name: str, words: list[str]) -> None:
    verdicts = check(f"{EXAMPLES}.{name}", words)
    assert passed(verdicts), table(verdicts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sums", ["sandbox.id=memory"]),
        ("toy_repair", []),
        ("python_tir", []),
        ("online_writing", ["sandbox.id=memory"]),
        ("online_writing", ["sandbox.id=memory", "form=texts"]),
    ],
)
def test_our_own_keep_it_too(name: str, words: list[str]) -> None:
    verdicts = check(name, words)
    assert passed(verdicts), table(verdicts)


def test_examples_are_short() -> None:
    assert len(FILES) == 3
    assert all(len(path.read_text().splitlines()) < 120 for path in FILES)


def played(spec: str, folder: Path, *turns: str) -> Any:
    """One episode on the first training task."""

    async def main() -> Any:
        made = subject(f"{EXAMPLES}.{spec}", {}, {"id": "memory"}, Limits(max_turns=len(turns), wall_s=60.0), folder, "test")
        return await made.play(made.tasks("train", 1)[0], in_turn(*turns))

    return asyncio.run(main())


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM sales",
        "DROP TABLE sales",
        "ATTACH DATABASE '/tmp/x' AS y",
        "PRAGMA query_only = OFF",
        "SELECT 1; SELECT 2",
        "SELECT load_extension('x')",
        "SELECT zeroblob(100000000)",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
    ],
)
def test_sql_refuses_what_is_no_short_reading(statement: str, tmp_path: Path) -> None:
    episode = played("sql:Sql", tmp_path, call("query", sql=statement), call("submit", sql=statement)).episode
    assert episode.reward == 0.0, "the turn's reward is for a query that works"
    assert episode.trajectories[0].turn_rewards == {}


def test_sql_rewards_the_turn_of_the_first_query_that_works(tmp_path: Path) -> None:
    look = call("query", sql="SELECT 1")
    episode = played("sql:Sql", tmp_path, "let me see", call("query", sql="SELEKT"), look, look).episode
    assert episode.reward == 0.0
    assert episode.trajectories[0].turn_rewards == {2: FIRST_QUERY}
    assert episode.trajectories[0].token_rewards().sum() == pytest.approx(FIRST_QUERY)


def test_sql_judges_rows_and_not_text(tmp_path: Path) -> None:
    (task,) = Sql(SqlConfig()).tasks("train")[:1]
    right = call("submit", sql=f"SELECT '{task.data['best']}' AS other")
    assert played("sql:Sql", tmp_path, right).episode.reward == pytest.approx(1.0 - FIRST_QUERY)


@pytest.mark.parametrize("change", [{"token": "0"}, {"guests": "9"}, {"guests": "1e0"}, {"name": ""}, {"name": "Nobody"}])
def test_web_form_believes_the_server_alone(change: dict[str, str], tmp_path: Path) -> None:
    task = WebForm(WebFormConfig()).tasks("train")[0]
    fields = {key: str(value) for key, value in task.data["wanted"].items()} | {"token": task.data["token"]}
    assert played("web_form:WebForm", tmp_path, call("post", path="/book", fields=fields)).episode.reward == 1.0
    wrong = call("post", path="/book", fields=fields | change)
    assert played("web_form:WebForm", tmp_path, wrong).episode.reward == 0.0
    twice = call("post", path="/book", fields=fields)
    assert played("web_form:WebForm", tmp_path, twice, twice).episode.reward == 0.0, "two tables were booked"


def test_the_suite_s_tokenizer_holds_any_text(tmp_path: Path) -> None:
    chat = byte_chat(tmp_path)
    text = "".join(chr(random.Random(0).randrange(1, 0xD000)) for _ in range(100)) + json.dumps({"a": "\U0001f600"})
    assert chat.decode(chat.encode(text)) == text
