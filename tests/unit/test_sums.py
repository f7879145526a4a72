"""sums: tasks are functions of their index, the splits share no problem, the last number of the one reply is judged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agents.tool_loop import ToolLoop, ToolLoopConfig
from environments.sums import EXAMPLE, LEVELS, OPENING, SIGNS, Sums, SumsConfig, held_out, make_task
from harness.chat import Chat
from harness.config import Plugin
from harness.episode import Episode, run_episode
from harness.errors import ConfigError
from harness.registry import plugin_config
from harness.task import Split, Task, Termination
from tests.support import PlayedEngine, Raw, memory, stage_of

SPLITS: tuple[Split, ...] = ("train", "heldout")
ALL = list(range(1, len(LEVELS) + 1))


def tasks(split: Split, **options: Any) -> list[Task]:
    return list(Sums(SumsConfig(**options)).tasks(split))


def played(chat: Chat, task: Task, reply: str | Raw) -> Episode:
    """One episode of the tool loop in a sandbox that is a dictionary."""
    engine = PlayedEngine(chat, [reply])  # a second request would find the list empty
    stage = stage_of(
        chat, engine, agent=ToolLoop(ToolLoopConfig()), environment=Sums(SumsConfig()), sandboxes=memory(), max_turns=1
    )
    return asyncio.run(run_episode(stage, task, "e"))


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_split_seed_and_index(split: Split) -> None:
    first, again, other = (tasks(split, levels=ALL, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert len({task.id for task in (*first, *other)}) == len(first) + len(other)
    assert [task.data for task in first] != [task.data for task in other]
    assert first[:10] == tasks(split, levels=ALL, seed=3, train_tasks=10, heldout_tasks=10), "the size changes no task"


@pytest.mark.parametrize("level", ALL)
def test_the_splits_share_no_problem(level: int) -> None:
    asked = {split: {frozenset(t.data["problem"]) for t in tasks(split, levels=[level])} for split in SPLITS}
    assert not asked["train"] & asked["heldout"], "nor the same numbers in the other order"
    assert len(asked["heldout"]) >= 8
    a, _, b = EXAMPLE
    assert LEVELS[level - 1][0] != "+" or {a, b} not in asked["train"] | asked["heldout"], "its answer is in the prompt"
    sign, first, second = LEVELS[level - 1]
    share = [held_out(a, sign, b) for a in range(first) for b in range(second)]
    assert 0.1 < sum(share) / len(share) < 0.3


@pytest.mark.parametrize("level", ALL)
def test_the_question_shows_the_problem_and_not_the_answer(level: int) -> None:
    sign, first, second = LEVELS[level - 1]
    for task in tasks("train", levels=[level], train_tasks=200):
        a, shown, b = task.data["problem"]
        assert shown == sign and 0 <= a < max(first, second) and 0 <= b < max(first, second)
        assert task.data["answer"] == SIGNS[sign](a, b) >= 0
        assert task.messages == (*OPENING, {"role": "user", "content": f"What is {a} {sign} {b}?"})


def test_levels_are_drawn_alike() -> None:
    levels = [task.data["level"] for task in tasks("train", levels=[1, 3])]
    assert set(levels) == {1, 3}
    assert 0.4 < levels.count(3) / len(levels) < 0.6


@pytest.mark.parametrize(
    ("options", "says"), [({"levels": [6]}, "levels"), ({"levels": []}, "levels"), ({"level": 1}, "`environment.level`")]
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plugin_config("environment", {"id": "sums", **options})


def test_the_configuration_knows_it() -> None:
    made, options = plugin_config("environment", Plugin(id="sums", levels=[2]).table())
    assert made is Sums and options == SumsConfig(levels=[2])


# --- verdicts --------------------------------------------------------------------------------------------------------

SEVEN = Task("t", ({"role": "user", "content": "What is 3 + 4?"},), {"answer": 7})


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("7", 1.0),
        ("3 + 4 = 7.", 1.0),
        ("It is not 8 but\n**7**!", 1.0),
        ("8", 0.0),
        ("7 or 8", 0.0),
        ("17", 0.0),
        ("-7", 0.0),
        ("0.7", 0.0),
        ("7.5", 0.0),
        ("07", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_the_reply_is_the_answer(chat: Chat, reply: str, reward: float) -> None:
    episode = played(chat, SEVEN, reply)
    assert (episode.reward, episode.termination, episode.error) == (reward, Termination.FINISHED, "")
    (trajectory,) = episode.trajectories
    assert trajectory.n_turns == 1


def test_a_reply_that_is_cut_off_is_no_answer(chat: Chat) -> None:
    episode = played(chat, SEVEN, Raw(chat.encode("3 + 4 = 7"), finish="length"))
    assert (episode.reward, episode.termination) == (0.0, Termination.MAX_TOKENS_PER_TURN)


@pytest.mark.parametrize("split", SPLITS)
def test_who_calculates_always_wins(chat: Chat, split: Split) -> None:
    for index in range(20):
        task = make_task(split, 0, index, ALL)
        a, sign, b = task.data["problem"]
        assert played(chat, task, f"That is {SIGNS[sign](a, b)}.").reward == 1.0
        assert played(chat, task, f"That is {SIGNS[sign](a, b) + 1}.").reward == 0.0
