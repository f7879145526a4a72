"""64 episodes through scheduler, ledger and real containers: what is right is worth 1, nothing else is, the books close."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from environments.swe.environment import Swe, SweConfig
from harness.ledger import Ledger, Slot
from harness.rollout import collect
from harness.sandboxes.docker import Engine
from harness.task import Task
from tests.contracts.sandbox_support import started
from tests.swe.acting import CRASHES, playing, stage
from tests.swe.projects import acts, rows

pytestmark = pytest.mark.timeout(900)
EPISODES = 64


def test_sixty_four_episodes(image: str, tmp_path: Path) -> None:
    swe = Swe(SweConfig.model_validate({"dataset": "none", "grading": {"timeout_s": 120.0, "test_timeout_s": 10.0}}))
    made = rows(image)
    tasks: list[Task] = []
    expected: list[float | None] = []
    for task in made:
        for name, script in {**acts(task), CRASHES: CRASHES}.items():
            tasks.append(playing(swe.task(task), f"{task.instance_id}/{name}", script))
            expected.append(None if name == CRASHES else float(name.startswith("gold")))
    tasks.append(Task("again", tasks[0].messages, tasks[0].data, tasks[0].image))
    expected.append(1.0)
    assert len(tasks) == EPISODES

    async def main() -> list[Any]:
        ledger = Ledger(tmp_path)
        try:
            async with started("docker", image=image) as sandboxes:
                played = stage(swe, sandboxes, tmp_path / "model")
                chosen = [(Slot(i, i), task) for i, task in enumerate(tasks)]
                return await collect(played, chosen, ledger, "value", version=0, concurrency=4, attempts=2)
        finally:
            ledger.close()

    episodes = asyncio.run(main())
    verdicts = {e.task_id: (e.reward, e.info.get("outcome"), e.error) for e in episodes}
    wrong = {t.id: verdicts[t.id] for t, want in zip(tasks, expected, strict=True) if verdicts[t.id][0] != want}
    assert not wrong
    ledger = Ledger(tmp_path)
    counts = ledger.counts()
    crashed = sum(want is None for want in expected)
    assert counts == {"pending": EPISODES - crashed, "dropped": 2 * crashed}, "every try of every episode is in the book once"
    assert all((ledger.artifacts / e.id / "patch.diff").is_file() for e in episodes if e.reward is not None)
    assert all("the agent's own fault" in reason for _, reason, _ in ledger.reasons())
    ledger.close()
    engine = Engine()
    assert [c for c in engine.find("sao.run") if c["Image"] in {row.image for row in made}] == [], "nothing is left"
    for row in made[1:]:
        engine.api.remove_image(row.image, force=True)
    engine.close()
