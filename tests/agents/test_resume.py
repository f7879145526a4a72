"""A harness is killed with episodes of the real OpenHands in real containers; each goes on in its container, token by token."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.openhands import OpenHands, OpenHandsConfig
from environments.toy_repair import tokenizer
from harness.chat import Chat
from harness.episode import PLACE, Episode, Stage, run_episode
from harness.parsers import hermes
from harness.session import TokenSession
from harness.task import Limits, Task, Termination
from harness.trajectory import Trajectory
from harness.verify import remade
from tests.agents.resumable import COMMANDS, NEW, OLD, POINTS, Engine, play
from tests.contracts.sandbox_support import ROOT, an_engine, containers_of, needs_docker, processes_of, started
from tests.support import USER, FnAgent, FnEnvironment, PlayedEngine, WatchedSandboxes, one_turn
from tests.swe.instance import build, context

pytestmark = [pytest.mark.timeout(600), needs_docker]
WAIT_S = 240.0
BEGAN = "[ -p /tmp/began ] || mkfifo /tmp/began 2>/dev/null; timeout 120 cat /tmp/began"
TURNS = 6


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was on disk after the kill, and what came of it."""

    journals: dict[str, list[dict[str, Any]]]
    """Episode -> its recorded turns."""
    containers: dict[str, str]
    left: set[str]
    """Containers after the kill, of the run."""
    episodes: dict[str, Episode]
    engine: Engine
    workers: list[int]
    folder: Path
    run_id: str

    def of(self, name: str) -> tuple[list[dict[str, Any]], Trajectory]:
        """The recorded turns and the first trajectory of an episode."""
        return self.journals[name], self.episodes[name].trajectories[0]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The tiny instance, on an image of this module's own."""
    files = context()
    files["Dockerfile"] += b'LABEL tests="resume"\n'
    name = build(files)
    yield name
    with an_engine() as engine:
        engine.api.remove_image(name, force=True)


async def killed(folder: Path, image: str, run_id: str) -> list[int]:
    """Play until each episode has come to its point, then kill the harness; the workers that have ended with it."""
    harness = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.agents.resumable", str(folder), image, run_id),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert harness.stdout is not None
        waiting, workers = set(POINTS), []
        async with asyncio.timeout(WAIT_S):
            while waiting:
                episode, workers = json.loads(await harness.stdout.readline())
                if episode in COMMANDS:
                    name = place(folder, episode)
                    with an_engine() as engine:
                        made = engine.api.exec_create(name, ["bash", "-c", BEGAN])["Id"]
                        assert await engine.call(engine.api.exec_start, made) == b"began\n"
                waiting.remove(episode)
        handles = [os.pidfd_open(pid) for pid in workers]
    finally:
        harness.kill()
        await harness.wait()
    for handle in handles:
        assert (await asyncio.to_thread(select.select, [handle], [], [], 60))[0], "a worker ends by itself"
        os.close(handle)
    return workers


def place(folder: Path, episode: str) -> str:
    """The container of an episode."""
    return str(json.loads((folder / "episodes" / episode / PLACE).read_text())["sandbox"])


@pytest.fixture(scope="module")
def resumed(image: str, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """All episodes, killed and resumed."""
    folder, run_id = tmp_path_factory.mktemp("run"), f"test-{uuid.uuid4().hex[:8]}"
    tokenizer.write(folder / "model")
    (folder / "tmp").mkdir()

    async def never(episode: str, point: str, number: int) -> None:
        pass

    async def main() -> Resumed:
        workers = await killed(folder, image, run_id)
        journals = {}
        for name in POINTS:
            lines = [json.loads(line) for line in (folder / "episodes" / name / "session.jsonl").read_text().splitlines()]
            journals[name] = [line["turn"] for line in lines if "turn" in line]
        containers, left = {name: place(folder, name) for name in POINTS}, set(containers_of(run_id))
        events = sorted((folder / "episodes" / "half" / "agent").rglob("event-*.json"))
        assert "ActionEvent" in events[-1].read_text()
        events[-1].unlink()
        agent = OpenHands(OpenHandsConfig())
        try:
            async with started("docker", run_id, image=image) as sandboxes:
                episodes, engine = await play(folder, image, NEW, never, agent, sandboxes, resume=True)
        finally:
            await agent.close()
        return Resumed(journals, containers, left, episodes, engine, workers, folder, run_id)

    with pytest.MonkeyPatch.context() as patch:  # a machine of its own: other runs on this one would reap what is left
        patch.setattr(socket, "gethostname", lambda: f"host-of-{run_id}")
        try:
            return asyncio.run(main())
        finally:
            with an_engine() as engine:
                engine.reap(run_id)


@pytest.mark.parametrize("name", POINTS)
def test_it_ends_as_if_nothing_had_happened(name: str, resumed: Resumed, chat: Chat) -> None:
    episode = resumed.episodes[name]
    assert (episode.error, episode.reward) == ("", 1.0)
    assert episode.info["termination"] == "finished"
    said = "".join(chat.decode(t.tokens.tolist()) for t in episode.trajectories)
    after = said.rpartition("str_replace")[2]
    assert "ran 1, living 0" in after, f"the command was not run twice, and what was left of it is ended: {after}"
    assert ("Tool call interrupted before completion" in said) == (name in COMMANDS)


@pytest.mark.parametrize("name", POINTS)
def test_it_starts_with_what_was_recorded(name: str, resumed: Resumed) -> None:
    turns, t = resumed.of(name)
    tokens = [token for turn in turns for token in (*turn["observed"], *turn["sampled"])]
    assert len(turns) == POINTS[name] + (name in ("recorded", "judged", *COMMANDS))
    assert t.tokens[: len(tokens)].tolist() == tokens
    actions = [np.arange(span.start, span.stop) for span in t.spans if span.kind == "action"]
    for turn, action in zip(turns, actions, strict=False):
        assert t.tokens[action].tolist() == turn["sampled"]
        assert t.rollout_logprobs[action].tolist() == turn["logprobs"]
        assert t.policy_versions[action].tolist() == turn["versions"] == [OLD] * len(action)
    assert all(set(t.policy_versions[action]) == {NEW} for action in actions[len(turns) :])


@pytest.mark.parametrize("name", POINTS)
def test_the_engine_is_asked_for_the_rest_alone(name: str, resumed: Resumed) -> None:
    assert resumed.engine.asked.get(name, []) == list(range(len(resumed.journals[name]), TURNS))
    for trajectory in resumed.episodes[name].trajectories:
        assert not list(remade(trajectory))
        assert trajectory.info["facts"]["resumed"] == 1


def test_only_a_turn_that_openhands_has_lost_in_part_forks(resumed: Resumed) -> None:
    forks = {name: e.trajectories[0].info["facts"].get("forks", 0) for name, e in resumed.episodes.items()}
    assert forks == {name: int(name == "half") for name in POINTS}
    assert {name: len(e.trajectories) - 1 for name, e in resumed.episodes.items()} == forks


def test_nothing_is_left(resumed: Resumed) -> None:
    assert len(resumed.workers) == 1
    assert set(resumed.containers.values()) < resumed.left, "they and a second one of the episode that was judged"
    assert len(resumed.left) == len(POINTS) + 1
    assert not containers_of(resumed.run_id)
    assert not processes_of(resumed.run_id)
    assert not list((resumed.folder / "episodes").iterdir())
    assert not list((resumed.folder / "tmp").iterdir())


@pytest.mark.parametrize("word", [None, "", "{", "[]", "{}", '{"state": {}}', '{"sandbox": "x", "state": {}}'])
def test_without_a_sandbox_to_go_on_with_it_is_lost_as_any_other(word: str | None, chat: Chat, tmp_path: Path) -> None:
    folder, limits = tmp_path / "e", Limits(max_turns=1, max_context=10_000)
    folder.mkdir()
    if word is not None:
        (folder / PLACE).write_text(word)
    engine, sandboxes = PlayedEngine(chat, []), WatchedSandboxes()

    def session(episode: str, seed: int | None) -> TokenSession:
        return TokenSession(chat, engine, hermes, limits, episode, folder=folder)

    stage = Stage(FnEnvironment(), FnAgent(one_turn), sandboxes, limits, session)  # type: ignore[arg-type]
    episode = asyncio.run(run_episode(stage, Task("t", (USER,)), "e", resume=True))
    assert (episode.termination, episode.reward) == (Termination.SANDBOX_LOST, None)
    assert not sandboxes.made
    assert not folder.exists()
