"""SWE tasks of the tiny projects, solved by a scripted expert behind the real OpenHands in real containers, and not solved."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.openhands import OpenHands, OpenHandsConfig
from environments.swe.environment import Swe, SweConfig
from environments.swe.rows import SweRow
from harness.chat import Chat
from harness.config import Config
from harness.engines.scripted import ScriptedEngine
from harness.episode import Episode, Stage
from harness.journal import token_digest
from harness.ledger import Ledger, Slot
from harness.parsers import hermes
from harness.protocols import GenerateRequest, Generation
from harness.rollout import collect
from harness.rundir import RunDir
from harness.session import TokenSession
from harness.task import Limits, Task
from harness.trajectory import Trajectory
from harness.verify import lines, verify
from tests.agents.expert import MANNERS, expert, in_manner
from tests.agents.support import exact
from tests.contracts.sandbox_support import an_engine, needs_docker, processes_of, started
from tests.swe.instance import build, context
from tests.swe.projects import module_of, rows

pytestmark = [needs_docker, pytest.mark.timeout(600)]
EPISODES = 16
WORKERS = 2
LIMITS = Limits(max_turns=12, max_context=60_000, max_tokens_per_turn=4_000, wall_s=400.0)


@pytest.fixture(scope="module")
def projects() -> Iterator[list[SweRow]]:
    """The three projects on images of this module's own."""
    files = context()
    files["Dockerfile"] += b'LABEL tests="agents"\n'
    made = rows(build(files))
    yield made
    with an_engine() as engine:
        for row in reversed(made):
            engine.api.remove_image(row.image, force=True)


class Recorder(ScriptedEngine):
    """The expert, and every request and answer by episode."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, expert)
        self.seen: dict[str, Heard] = defaultdict(Heard)

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the expert does."""
        generation = await super().generate(request)
        heard = self.seen[request.request_id.rpartition("/")[0]]
        heard.requests.append(request)
        heard.generations.append(generation)
        return generation


class Heard:
    """What the engine was asked in one episode, and what it answered."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.generations: list[Generation] = []


@dataclass(frozen=True, slots=True)
class Batch:
    """What was played."""

    run: Path
    episodes: dict[str, Episode]
    """By task."""
    manners: dict[str, str]
    modules: dict[str, str]
    engine: Recorder
    worker_pids: list[int]
    stored: dict[str, Trajectory]
    """By episode."""


@pytest.fixture(scope="module")
def batch(projects: list[SweRow], chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """16 episodes in parallel, through the scheduler's collector and the ledger."""
    limits = {"timeout_s": 200.0, "test_timeout_s": 20.0}
    swe = Swe(SweConfig.model_validate({"dataset": "none", "grading": limits}))
    config = Config(
        run_dir=str(tmp_path_factory.mktemp("runs")),
        environment={"id": "swe", "dataset": "none"},
        agent={"id": "openhands", "workers": WORKERS},
        sandbox={"id": "docker"},
        algorithm={"batch": EPISODES, "loss_norm": "token_global"},
    )
    folder = RunDir.create(config, "train")
    engine = Recorder(chat)
    agent = OpenHands(OpenHandsConfig(workers=WORKERS))
    names = [(row, manner) for row in projects for manner in MANNERS][:EPISODES]
    tasks, manners, modules = [], {}, {}
    for row, manner in names:
        made = swe.task(in_manner(row, manner))
        tasks.append(Task(f"{row.instance_id}/{manner}", made.messages, made.data, made.image))
        manners[tasks[-1].id], modules[tasks[-1].id] = manner, module_of(row)

    def session(episode_id: str, seed: int | None) -> TokenSession:
        return TokenSession(chat, engine, hermes, LIMITS, episode_id, seed=seed, folder=folder.path / "episodes" / episode_id)

    async def main() -> tuple[list[Episode], list[int]]:
        ledger = Ledger(folder.path)
        try:
            async with started("docker", folder.id, image=projects[0].image) as sandboxes:
                stage = Stage(swe, agent, sandboxes, LIMITS, session)
                try:
                    played = await collect(
                        stage,
                        [(Slot(i, i), task) for i, task in enumerate(tasks)],
                        ledger,
                        "value",
                        version=0,
                        concurrency=EPISODES,
                        attempts=1,
                    )
                    return played, [worker.pid for worker in agent._crew._workers]
                finally:
                    await agent.close()
        finally:
            ledger.close()
            folder.close()

    episodes, pids = asyncio.run(main())
    stored = {path.name.removesuffix(".0.parquet"): Trajectory.load(path) for path in folder.path.glob("trajectories/*")}
    return Batch(folder.path, {e.task_id: e for e in episodes}, manners, modules, engine, pids, stored)


def test_what_is_right_is_worth_one_and_nothing_else_is(batch: Batch) -> None:
    verdicts = {name: (e.reward, e.error, e.info.get("outcome")) for name, e in batch.episodes.items()}
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict[0] != MANNERS[batch.manners[name]][1]}
    assert not wrong
    assert len(verdicts) == EPISODES
    assert {e.reward for e in batch.episodes.values()} == {0.0, 1.0}


def test_episodes_end_as_their_manners_do(batch: Batch) -> None:
    expected = {"edits": 5, "applies": 6, "stumbles": 10, "finishes": 1, "breaks": 3}
    for name, episode in batch.episodes.items():
        manner, t = batch.manners[name], batch.stored[episode.id]
        facts = t.info["facts"]
        assert t.info["termination"] == "finished", name
        assert (facts.get("openhands_stuck", 0), facts.get("openhands_failed", 0)) == (int(manner == "repeats"), 0), name
        assert t.n_turns == expected.get(manner, t.n_turns) < LIMITS.max_turns, name
        if manner == "stumbles":
            assert facts["agent_errors"] >= 2, "the broken and the unknown call"
            assert facts["nudges"] == 1, "the empty answer"


def test_the_judged_patch_is_the_experts_work(batch: Batch) -> None:
    for name, episode in batch.episodes.items():
        patch = (batch.run / "artifacts" / episode.id / "patch.diff").read_text()
        touched = {line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ b/")}
        assert touched == (set() if batch.manners[name] in ("finishes", "repeats") else {batch.modules[name]}), name


def test_the_books_close_and_the_run_verifies(batch: Batch) -> None:
    ledger = Ledger(batch.run)
    try:
        assert ledger.counts() == {"pending": EPISODES}
    finally:
        ledger.close()
    checks = verify(batch.run)
    assert {check.invariant: check.state for check in checks} == dict.fromkeys(range(1, 7), "ok"), "\n".join(lines(checks))


def test_every_token_is_what_the_engine_saw(batch: Batch) -> None:
    assert set(batch.stored) == set(batch.engine.seen) == {e.id for e in batch.episodes.values()}
    for name, t in batch.stored.items():
        heard: Any = batch.engine.seen[name]
        exact([t], heard)
        for call, request, answer in zip(t.info["calls"], heard.requests, heard.generations, strict=True):
            whole = request.token_ids + answer.token_ids
            assert call == [len(request.token_ids), token_digest(request.token_ids), token_digest(whole)]
        assert "forks" not in t.info["facts"], "one conversation"


def test_nothing_is_left(batch: Batch) -> None:
    with an_engine() as engine:
        assert engine.find(f"sao.run={batch.run.name}") == []
    assert 1 <= len(batch.worker_pids) <= WORKERS
    assert not any(Path(f"/proc/{pid}").exists() for pid in batch.worker_pids)
    assert processes_of(batch.run.name) == []
