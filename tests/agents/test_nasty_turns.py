"""Nasty assistant messages (`unit/data/nasty_turns.jsonl`) through session, OpenHands and back: exact, or a counted fork."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.chat import Chat
from harness.task import Termination
from tests.agents.support import FINISH, Stand, exact, run, stand

pytestmark = pytest.mark.timeout(600)

CORPUS = [json.loads(line) for line in (Path(__file__).parents[1] / "unit/data/nasty_turns.jsonl").read_text().splitlines()]

FATAL = {"deep_nesting_unclosed", "number_of_many_digits"}
"""What OpenHands itself does not survive (RecursionError, int's limit of digits): the episode ends there and is judged."""


@pytest.fixture(scope="module")
def openhands(chat: Chat) -> Iterator[Stand]:
    """One worker for all of them."""
    with stand(chat) as made:
        yield made


def check(played: Any) -> int:
    """Every token stands where the engine saw it; the number of forks, which the session has counted."""
    trajectories = played.session.trajectories("t", {})
    exact(trajectories, played.engine)
    forks = len(trajectories) - 1
    assert trajectories[0].info["facts"].get("forks", 0) == forks
    return forks


def test_each_alone(openhands: Stand) -> None:
    async def one(i: int, gate: asyncio.Semaphore) -> Any:
        async with gate:
            turns = [run("echo before"), CORPUS[i]["text"], run("echo after"), FINISH]
            return await openhands.episode(turns, name=f"nasty-{i}")

    async def main() -> list[Any]:
        gate = asyncio.Semaphore(16)
        return list(await asyncio.gather(*(one(i, gate) for i in range(len(CORPUS)))))

    all_played = openhands.run(main())
    assert len(all_played) >= 40
    forks, fatal = {}, set()
    for entry, played in zip(CORPUS, all_played, strict=True):
        assert played.end is Termination.FINISHED, (entry["name"], played.end)
        if (n := check(played)) > 0:
            forks[entry["name"]] = n
        if played.facts().get("openhands_failed"):
            fatal.add(entry["name"])
    assert fatal == FATAL
    assert forks == {}, "none of them makes OpenHands rewrite its history"


def test_all_in_one_conversation(openhands: Stand) -> None:
    alive = [entry for entry in CORPUS if entry["name"] not in FATAL]
    going_on = [entry["text"] for entry in alive if entry["calls"] and all(name != "finish" for name, _ in entry["calls"])]
    random.Random(0).shuffle(going_on)
    turns = [text for i, nasty in enumerate(going_on) for text in (nasty, run(f"echo {i}"))]
    played = openhands.play([*turns, FINISH])
    assert played.end is Termination.FINISHED
    assert played.session.turns == len(turns) + 1
    assert check(played) == 0
