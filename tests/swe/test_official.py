"""Our verdicts and those of `swebench eval` on the same image and patches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from environments.swe.official import evaluate
from environments.swe.patch import Extracted
from tests.swe.instance import GOLD_PATCH, environment, row

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
