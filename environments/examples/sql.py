"""SQL over a real embedded database: who earned most in a region? The agent asks SQLite, and hands in a query as its answer.

The database is made per task, in the harness's memory, and read-only for the agent. An answer is judged by its rows, not by its
text. The first query that works is worth a tenth, given to the turn that asked it: `Score.turn_rewards`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from harness.engines.scripted import Script, call, in_turn
from harness.protocols import LiveTask, Sandbox, Tool, ToolResult
from harness.task import Score, Split, Task
from harness.tools import current_turn, tool

REGIONS = {"train": ("north", "south", "east"), "heldout": ("west", "centre")}
NAMES = ("Ada", "Bo", "Cem", "Dia", "Eli", "Fay", "Gus", "Hal")
TABLE = "CREATE TABLE sales (person TEXT, region TEXT, amount INTEGER)"
TASKS = 1000
"""Of each split."""
MOST_ROWS, MOST_BYTES, QUERY_S = 50, 1_000_000, 2.0
FIRST_QUERY = 0.1
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
Rows = list[tuple[object, ...]]


class SqlConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seed: int = 0


class Sql:
    """See the module docstring."""

    Config = SqlConfig

    def __init__(self, config: SqlConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """Regions are of one split each."""
        return [make_task(split, self.config.seed, index) for index in range(TASKS)]

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Make the database."""
        return SqlTask(task)

    def solver(self, task: Task) -> Script:
        """Look, then answer."""
        answer = f"SELECT person FROM sales WHERE region = '{task.data['region']}' GROUP BY person ORDER BY SUM(amount) DESC"
        return in_turn(call("query", sql="SELECT * FROM sales LIMIT 3"), call("submit", sql=f"{answer} LIMIT 1"))


class SqlTask:
    def __init__(self, task: Task) -> None:
        self._best = task.data["best"]
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(TABLE)
        self._database.executemany("INSERT INTO sales VALUES (?, ?, ?)", task.data["sales"])
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        self._database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
        self._turns: dict[int, float] = {}
        self._answer: Rows | None = None
        self.tools: Sequence[Tool] = (tool(self.query), tool(self.submit))

    async def query(self, sql: str) -> str:
        """Run a SELECT of SQLite on the table sales (person, region, amount)."""
        rows = await asyncio.to_thread(self._run, sql)
        if isinstance(rows, str):
            return rows
        self._turns = self._turns or {current_turn(): FIRST_QUERY}
        return json.dumps(rows, default=repr)

    async def submit(self, sql: str) -> ToolResult:
        """Hand in the query whose result is the answer."""
        rows = await asyncio.to_thread(self._run, sql)
        if isinstance(rows, str):
            return ToolResult(rows)
        self._answer = rows
        return ToolResult("submitted", done=True)

    def _run(self, sql: str) -> Rows | str:
        """The first rows, or what is wrong with the statement."""
        end = time.monotonic() + QUERY_S
        self._database.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        try:
            return list(self._database.execute(sql).fetchmany(MOST_ROWS))
        except (sqlite3.Error, ValueError) as error:  # ValueError: text that is no UTF-8, or holds NUL
            return f"error: {error}"

    async def score(self) -> Score:
        """Compare the rows."""
        return Score((1.0 - FIRST_QUERY) * (self._answer == [(self._best,)]), self._turns)

    async def close(self) -> None:
        """Forget the database."""
        self._database.close()


def make_task(split: Split, seed: int, index: int) -> Task:
    """Task number `index` of a split: a table of sales with one best person."""
    rng = random.Random(f"sql/{split}/{seed}/{index}")
    region = rng.choice(REGIONS[split])
    sums = dict(zip(rng.sample(NAMES, 4), rng.sample(range(100, 1000), 4), strict=True))
    sales = [(person, region, part) for person, total in sums.items() for part in (total // 3, total - total // 3)]
    sales += [(rng.choice(NAMES), other, rng.randrange(2000)) for other in sum(REGIONS.values(), ()) if other != region]
    rng.shuffle(sales)
    ask = f"Who has the largest sum of sales in the region {region}? Submit a query that gives the name."
    best = max(sums, key=lambda person: sums[person])
    data = {"region": region, "sales": [list(row) for row in sales], "best": best}
    return Task(f"sql/{split}/{seed}/{index}", ({"role": "user", "content": ask},), data)
