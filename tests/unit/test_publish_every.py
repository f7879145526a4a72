"""`rollout.publish_every`: the engine samples with the weights it was given last, tokens say so, and the last ones arrive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.chat import Chat
from harness.config import Config, Plugin
from harness.configfile import load_config
from harness.errors import ConfigError
from harness.ledger import Ledger
from harness.loop import Loop
from harness.protocols import GenerateRequest, Generation
from harness.trajectory import Trajectory
from tests.support import FnEnvironment, PlayedEngine, stage_of

BATCH = 2


class Engine(PlayedEngine):
    """Stamps each token with the version that it was last given."""

    version = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0)
        return Generation([1, self.chat.stop_ids[0]], [-0.5, -0.5], [self.version] * 2, "stop")


class Job:
    """A run without processes: a trainer that always steps, and the engine above."""

    def __init__(self, folder: Path, chat: Chat, publish_every: int, frozen: int = 0) -> None:
        sections: dict[str, Any] = {
            "rollout": {"publish_every": publish_every, "concurrency": 4, "eta": 1.0},
            "algorithm": {"batch": BATCH},
            "critic": {"policy_freeze_steps": frozen},
        }
        self.config = Config(environment=Plugin(id="toy_repair"), alarms="warn", **sections)
        self.ledger, self.engine, self.learner, self.idle = Ledger(folder), Engine(chat, []), self, True
        self.folder = SimpleNamespace(
            path=folder, metrics=lambda row: self.rows.append(row), prune_checkpoints=lambda *_: None, rewind=lambda _: None
        )
        self.engine.metrics = self.figures  # type: ignore[attr-defined]
        self.rows: list[dict[str, Any]] = []
        self.published: list[int] = []
        self.version, self.generation, self.resumed, self.model = 0, 1, False, Path("model")
        self._chat = chat

    async def figures(self) -> dict[str, float]:
        return {}

    async def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"stepped": arguments.get("update_policy", False), "metrics": {}}

    def stage(self) -> Any:
        return stage_of(self._chat, self.engine)

    def tasks(self, split: str) -> Any:
        return FnEnvironment(100).tasks("train")

    async def publish(self, version: int) -> None:
        self.published.append(version)
        self.version = self.engine.version = version

    def run(self, steps: int) -> Loop:
        async def main() -> Loop:
            loop = Loop(self)  # type: ignore[arg-type]
            await loop.run_to(steps)
            return loop

        return asyncio.run(main())

    def trained(self, number: int) -> list[Trajectory]:
        """The trajectories of one batch."""
        rows = self.ledger._db.execute("SELECT id FROM episodes WHERE batch = ?", (number,)).fetchall()
        return [Trajectory.load(self.ledger.path(row["id"])) for row in rows]


@pytest.mark.parametrize(
    ("every", "steps", "published"), [(1, 4, [1, 2, 3, 4]), (3, 7, [3, 6, 7]), (3, 6, [3, 6]), (9, 4, [4])]
)
def test_weights_are_published_every_so_many_steps_and_at_the_end(
    tmp_path: Path, chat: Chat, every: int, steps: int, published: list[int]
) -> None:
    job = Job(tmp_path, chat, every)
    loop = job.run(steps)
    assert job.published == published and loop.clock.version == job.version == steps
    assert [row["version"] for row in job.rows] == list(range(1, steps + 1)), "the trainer's own count is not delayed"
    for number in range(1, steps + 1):
        batch = job.trained(number)
        assert len(batch) == BATCH
        for t in batch:
            (version,) = set(t.policy_versions[t.loss_mask].tolist())
            assert version in (0, *published) and version <= (number - 1) // every * every, "what the engine really had"
    job.ledger.close()


def test_a_step_that_moves_no_policy_publishes_nothing(tmp_path: Path, chat: Chat) -> None:
    """Critic-only batches are not counted: versions are policy steps."""
    job = Job(tmp_path, chat, 2, frozen=3)
    loop = job.run(6)
    assert job.published == [2, 3] and (loop.clock.consumed, loop.clock.version) == (6, 3)
    job.ledger.close()


def test_it_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.publish_every"):
        load_config(["configs/corridor.toml", "rollout.publish_every=0"])
