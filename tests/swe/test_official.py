"""Our verdicts and those of `swebench eval` on the same image and patches; both of one `sao eval`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.swe.official import evaluate
from environments.swe.patch import Extracted
from evals.evaluate import evaluate as play
from evals.evaluate import prepare, store
from evals.models import find_model
from evals.suites import load_suite
from harness.rundir import RunDir
from tests.swe.instance import GOLD, GOLD_PATCH, environment, row
from tests.unit.endpoint_support import Server, answer, refusal

pytestmark = pytest.mark.timeout(400)
WRONG = GOLD_PATCH.replace("price * percent / 100", "percent * 3")


def test_the_official_grader_agrees(image: str, tmp_path: Path) -> None:
    patches = {"gold": GOLD_PATCH, "wrong": WRONG, "empty": "", "unfit": GOLD_PATCH.replace("price - percent\n", "other\n")}
    rows = {name: row(image=image, instance_id=f"tiny__shop-{name}") for name in patches}
    resolved, unjudged, _ = evaluate(
        list(rows.values()), {rows[name].instance_id: patch for name, patch in patches.items()}, tmp_path, "agree", jobs=2
    )
    assert (resolved, unjudged) == ({"tiny__shop-gold"}, {"tiny__shop-unfit"})

    async def ours() -> dict[str, float]:
        async with environment(image) as (swe, task, provider):
            return {
                name: (await swe.judge(rows[name], Extracted(patch.encode()), lambda: provider.acquire(task))).reward
                for name, patch in patches.items()
            }

    rewards = asyncio.run(ours())
    assert {rows[name].instance_id for name, reward in rewards.items() if reward == 1.0} == resolved


def test_an_evaluation_has_the_official_verdicts_beside_ours(image: str, tmp_path: Path) -> None:
    """A file of rows is asked as SWE-bench Verified is. One is solved, one is not, and one is lost until it is played again."""
    acts = {"gold": GOLD, "wrong": GOLD.replace("price * percent / 100", "percent * 3"), "late": GOLD}
    up = {"gold", "wrong"}

    def says(body: dict[str, Any]) -> Any:
        name = next(n for n in acts if f"in the {n} way" in body["messages"][0]["content"])
        if name not in up:
            return refusal(503, "overloaded")
        tool, arguments = ("bash", {"command": acts[name]}) if len(body["messages"]) == 1 else ("submit", {})
        function = {"name": tool, "arguments": json.dumps(arguments)}
        return answer(None, tool_calls=[{"id": "c", "type": "function", "function": function}], finish="tool_calls")

    rows = [row(image=image, instance_id=f"tiny__shop-{n}", problem_statement=f"It fails in the {n} way.") for n in acts]
    (tmp_path / "tiny.jsonl").write_text("".join(f"{r.model_dump_json()}\n" for r in rows))
    settings = [
        "agent.id=tool_loop",
        "sandbox.warm=0",
        "rollout.max_attempts=1",
        "rollout.concurrency=2",
        "endpoint.attempts=1",
    ]

    async def evaluations() -> tuple[list[Any], list[Any]]:
        async with Server([says]) as server:
            words = [*settings, f"sandbox.image={image}", f"run_dir={tmp_path}"]
            config, plan = prepare(load_suite(str(tmp_path / "tiny.jsonl")), find_model(f"{server.url}#m"), words, None, None)
            assert plan.official
            folder = RunDir.create(config, "eval-tiny")
            store(folder, plan)
            results, verdicts = [], []
            for _ in range(2):
                results.append(await play(folder, config, plan))
                verdicts.append(json.loads((folder.path / "official.json").read_text())["run 0"])
                up.add("late")
                folder, config = RunDir.resume(folder.path, model=False)
            folder.close()
            return results, verdicts

    (first, second), verdicts = asyncio.run(evaluations())
    assert first.problems == tuple(r.instance_id for r in rows)
    np.testing.assert_array_equal(first.successes, [[1.0], [0.0], [np.nan]])
    np.testing.assert_array_equal(second.successes, [[1.0], [0.0], [1.0]])
    assert verdicts[0] == {"resolved": ["tiny__shop-gold"], "errors": []}
    assert verdicts[1] == {"resolved": ["tiny__shop-gold", "tiny__shop-late"], "errors": []}
