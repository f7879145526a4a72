"""corridor: walks are functions of their index, the splits share none, and only the right doors are rewarded."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments import word_tokenizer
from environments.corridor import language
from environments.corridor.environment import Corridor, CorridorConfig, Walk, held_out
from environments.corridor.language import DOORS, HUMS, MEANING, SIGNS, STONES, WORDS, opened
from environments.corridor.wanderer import FOLLOWS, wanderer
from harness.chat import Chat
from harness.kit.check import check, passed, table
from harness.task import Split, Task

ROOT = Path(__file__).parents[2]
SPLITS: tuple[Split, ...] = ("train", "heldout")
ROOMS = 3


def tasks(split: Split, count: int = 300, **options: int) -> list[Task]:
    return Corridor(CorridorConfig(**options)).tasks(split)[:count]  # type: ignore[return-value]


def walked(task: Task, replies: Sequence[str]) -> float:
    """The reward of these replies, in so many rooms as there are replies."""

    async def go() -> float:
        live = Walk(task)
        for number, reply in enumerate(replies, 1):
            result = await live.on_reply(reply)
            rooms = task.data["rooms"]
            assert (result.content, result.done) == (("", True) if number == len(rooms) else (rooms[number], False))
        return (await live.score()).reward

    return asyncio.run(go())


def right(task: Task) -> list[str]:
    return [MEANING[sign] for sign in task.data["signs"]]


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_split_seed_and_index(split: Split) -> None:
    first, again, other = (tasks(split, seed=seed) for seed in (3, 3, 4))
    assert first == again and [t.data for t in first] != [t.data for t in other]
    assert len({task.id for task in (*first, *other)}) == len(first) + len(other)
    few = Corridor(CorridorConfig(seed=3, train_tasks=5, heldout_tasks=5)).tasks(split)
    assert list(few) == first[:5], "the size changes no task"


def test_the_splits_share_no_walk_and_every_sign_is_on_both_sides() -> None:
    walks = {split: {tuple(t.data["signs"]) for t in tasks(split, 1_024, train_tasks=1_024)} for split in SPLITS}
    assert not walks["train"] & walks["heldout"]
    for split in SPLITS:
        assert {sign for walk in walks[split] for sign in walk} == set(SIGNS)
    every = list(itertools.product(SIGNS, repeat=2))
    assert 0.15 < sum(map(held_out, every)) / len(every) < 0.25


@pytest.mark.parametrize("rooms", [1, 3, 16])
def test_a_walk_has_its_rooms(rooms: int) -> None:
    (task,) = tasks("train", 1, rooms=rooms)
    assert len(task.data["rooms"]) == rooms and task.messages == ({"role": "user", "content": task.data["rooms"][0]},)
    for room, sign in zip(task.data["rooms"], task.data["signs"], strict=True):
        *stones, last = room.split()
        assert len(stones) == 3 and set(stones) <= set(STONES) and last == sign


def test_doors_are_equally_often_right() -> None:
    counts = [sum(door == meant for meant in MEANING.values()) for door in DOORS]
    assert counts == [8, 8, 8]


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_the_contract_of_an_environment_is_kept() -> None:
    verdicts = check("corridor", ["sandbox.id=memory", "rooms=2"])
    assert passed(verdicts), table(verdicts)


def test_only_all_the_right_doors_are_rewarded() -> None:
    for task in tasks("heldout", 20):
        doors = right(task)
        assert walked(task, doors) == 1.0
        assert walked(task, [f"hum3 hum0 {door}" for door in doors]) == 1.0, "humming changes nothing"
        for room in range(ROOMS):
            for wrong in (*(door for door in DOORS if door != doors[room]), "", HUMS[0], "I give up."):
                assert walked(task, [*doors[:room], wrong, *doors[room + 1 :]]) == 0.0
        assert [walked(task, doors[:n]) for n in range(ROOMS)] == [0.0] * ROOMS, "rooms that a limit cut off are wrong"


def test_the_solver_goes_by_the_last_sign() -> None:
    solver = Corridor(CorridorConfig()).solver(tasks("train", 1)[0])
    for conversation, door in (("user\nstone1 sign0<|im_end|>\n", 0), ("sign0<|im_end|> <left> sign23", 2), ("sign2 sign1", 1)):
        assert solver(conversation, random.Random(0)) == DOORS[door]


@given(st.lists(st.sampled_from([*DOORS, *HUMS[:2], "stone0", "<eos>"]), max_size=4))
def test_a_reply_opens_its_last_word_if_only_humming_stands_before(words: list[str]) -> None:
    door = opened(" ".join(words))
    if words and words[-1] in DOORS and set(words[:-1]) <= set(HUMS):
        assert door == words[-1]
    else:
        assert door is None


def test_the_wanderer_is_right_as_often_as_it_was_made() -> None:
    """0.4 + 0.6 / 3 = 0.6 in a room, 0.6^3 = 0.216 in a walk."""
    rng = random.Random(0)
    walks = tasks("train", 256) * 40
    rewards = [
        all(opened(wanderer(f"<bos> {room}", rng)) == door for room, door in zip(t.data["rooms"], right(t), strict=True))
        for t in walks
    ]
    per_room = FOLLOWS + (1 - FOLLOWS) / len(DOORS)
    assert sum(rewards) / len(rewards) == pytest.approx(per_room**ROOMS, abs=0.015) == pytest.approx(0.216, abs=0.015)


# --- the language ----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(WORDS), max_size=30))
def test_every_text_round_trips(words: list[str]) -> None:
    tokenizer = word_tokenizer.build(WORDS)
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False).ids
    assert len(ids) == len(words) and tokenizer.decode(ids, skip_special_tokens=False) == " ".join(words)


def test_words_are_told_apart_and_others_are_unknown() -> None:
    tokenizer = word_tokenizer.build(WORDS)
    ids = [tokenizer.token_to_id(word) for word in (*word_tokenizer.SPECIAL, *WORDS)]
    assert ids == list(range(tokenizer.get_vocab_size())) and len(WORDS) == 51
    assert tokenizer.encode("sign24", add_special_tokens=False).ids == [tokenizer.token_to_id("<unk>")]


def test_the_stored_policy_speaks_it(tmp_path: Path) -> None:
    """The tokenizer of configs/corridor-warm is this one, and a conversation costs what the limits of the suite allow."""
    language.write(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (ROOT / "configs" / "corridor-warm" / name).read_bytes()
    chat = Chat(tmp_path, ["<eos>"])
    (task,) = tasks("train", 1)
    opening = chat.opening(task.messages, ())
    assert chat.decode(opening) == f"<bos> {task.data['rooms'][0]}"
    assert len(opening) + ROOMS * 6 + (ROOMS - 1) * 5 <= 64
