"""online_writing, tier B: topics and prompts, the lexicon judge rule by rule, what does not fool it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.tool_loop import ToolLoop, ToolLoopConfig
from environments.online_writing import lexicon, texts
from environments.online_writing.environment import OnlineWriting, OnlineWritingConfig
from environments.online_writing.lexicon import MARKERS, MAX_REPEATS, hits, judge
from environments.online_writing.stream import make_task, paper_phases
from environments.online_writing.verdict import STYLES, Style
from harness.chat import Chat
from harness.episode import run_episode
from tests.support import PlayedEngine, memory, stage_of

PHASES = paper_phases()
TOPIC = "the old bridge"
CUTE = "A tiny fluffy bunny hops over the old bridge and says hehe to every cloud that is floating by on this warm spring day."
CLASSICAL = (
    "Behold the old bridge, whence the river doth sing; alas, no traveller hath crossed it since winter took the road away."
)
ACADEMIC = (
    "The analysis suggests that the old bridge carries evidence of repair; therefore it was used long after the road closed."
)
CHUUNI = "Fools! The sealed power of the old bridge shall awaken when the dark flame burns, and my destiny crosses it at last."
TEXTS: dict[Style, str] = {"cute": CUTE, "classical": CLASSICAL, "academic": ACADEMIC, "chuunibyou": CHUUNI}
PLAIN = "We walked over the old bridge in the morning and came back when the sun was low and the water had turned to copper."


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_400_topics_are_trained_and_100_others_held_out() -> None:
    train, heldout = texts.TOPICS["train"], texts.TOPICS["heldout"]
    assert (len(set(train)), len(set(heldout))) == (400, 100)
    assert not set(train) & set(heldout)
    assert {w for t in heldout for w in t.split()} == {w for t in train for w in t.split()}, "but no word is new"


def test_no_prompt_and_no_topic_holds_a_marker() -> None:
    for said in (*texts.TOPICS["train"], *texts.TOPICS["heldout"], *texts.TEMPLATES):
        assert not any(counts for counts in hits(said).values()), said


@given(st.sampled_from(["train", "heldout"]), st.integers(0, 7_199))
def test_the_prompt_names_topic_and_candidates_and_not_the_preference(split: texts.Split, index: int) -> None:
    task = make_task("texts", split, 0, index, PHASES)
    assert task == make_task("texts", split, 0, index, PHASES)
    assert task.data["topic"] in texts.TOPICS[split]
    system, user = (message["content"] for message in task.messages)
    assert task.data["topic"] in user and "2-4 sentences" in user
    assert ", ".join(s.capitalize() for s in task.data["candidates"]) in system
    assert "Style: <name>" in system


def test_candidates_come_in_random_order() -> None:
    orders = Counter(tuple(make_task("texts", "train", 0, i, PHASES).data["candidates"]) for i in range(600))
    assert len(orders) == 6 and min(orders.values()) > 60


# --- the lexicon -----------------------------------------------------------------------------------------------------


def test_each_style_has_20_to_30_markers_of_its_own() -> None:
    assert set(MARKERS) == set(STYLES)
    for markers in MARKERS.values():
        assert 20 <= len(markers) <= 30 and len(set(markers)) == len(markers)
    everything = [m for markers in MARKERS.values() for m in markers]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("style", STYLES)
def test_every_marker_is_found_once_where_it_stands(style: Style) -> None:
    for marker in MARKERS[style]:
        for said in (marker, marker.upper(), f"so ({marker})."):
            assert hits(said)[style] == {marker: 1}, marker


@pytest.mark.parametrize("inside", ["thyme", "huge", "ashore", "lot", "studying", "hugged", "therefore_", "littlest"])
def test_markers_are_whole_words(inside: str) -> None:
    assert not any(counts for counts in hits(inside).values())


def test_a_long_marker_is_one_hit() -> None:
    assert hits("the ancient seal and art thou") == {
        **dict.fromkeys(STYLES, Counter()),
        "chuunibyou": {"ancient seal": 1},
        "classical": {"art thou": 1},
    }
    assert hits("’Twas o’er")["classical"] == {"'twas": 1, "o'er": 1}, "with either apostrophe"


@pytest.mark.parametrize("written", STYLES)
@pytest.mark.parametrize("preferred", STYLES)
def test_the_style_with_the_most_markers_must_be_the_preferred_one(written: Style, preferred: Style) -> None:
    verdict = judge(f"Style: {written.capitalize()}\n{TEXTS[written]}", TOPIC, preferred)
    assert verdict.quality and verdict.written == written
    assert verdict.reward == float(written == preferred)


@pytest.mark.parametrize(
    ("text", "style", "quality"),
    [
        (CUTE, True, True),
        (PLAIN, False, True),
        (PLAIN + " hehe tiny", False, True),  # two markers
        (PLAIN + " hehe tiny yay", True, True),
        (PLAIN + " hehe tiny yay alas thou thee", False, True),  # a tie is nobody's
        (PLAIN + " hehe tiny yay bunny alas thou thee", True, True),
        (PLAIN + " ✨🌸🐾", True, True),
        (CUTE.replace("the old bridge", "a bridge"), True, False),  # not the topic
        (CUTE.replace("the old bridge", "THE OLD BRIDGE"), True, True),
        ("hehe tiny bunny, the old bridge, yay", True, False),  # six words
        (" ".join(CUTE.split()[:19]), True, False),  # 19 words
        (" ".join(CUTE.split()[:20]), True, True),
        ("hehe yay bunny. " + "the old bridge is old. " * 8, True, False),  # the same bigrams again and again
        (PLAIN + " hehe" * MAX_REPEATS, True, True),
        (PLAIN + " hehe" * (MAX_REPEATS + 1), True, False),  # one marker as padding
        (CUTE + " alas." * (MAX_REPEATS + 1), False, False),  # also of another style
        (PLAIN + " ✨" * (MAX_REPEATS + 1), True, False),
        (" ".join(MARKERS["cute"]), True, False),  # the whole lexicon, but no topic
        ("", False, False),
        ("Style: Cute", False, False),
        ("Style: cute tiny fluffy bunny hehe yay\n" + PLAIN, False, True),  # the first line is not counted
        ("the old bridge. tiny fluffy bunny\nStyle: Cute\nhehe", True, False),
        ("\ud83d bunny tiny hehe", True, False),
    ],
)
def test_the_two_judgements(text: str, style: bool, quality: bool) -> None:
    verdict = judge(text, TOPIC, "cute")
    assert (verdict.style, verdict.quality) == (style, quality)


def test_a_declared_style_is_not_required_and_does_not_help() -> None:
    assert judge(CUTE, TOPIC, "cute").reward == 1.0
    assert judge(f"Style: Classical\n{CUTE}", TOPIC, "cute").reward == 1.0
    assert judge(f"Style: Classical\n{CUTE}", TOPIC, "classical").reward == 0.0


@given(st.text(max_size=300), st.sampled_from(STYLES))
def test_whatever_is_written_has_a_verdict(text: str, preferred: Style) -> None:
    assert judge(text, TOPIC, preferred).reward in (0.0, 1.0)


def test_an_episode_of_tier_b(chat: Chat) -> None:
    environment = OnlineWriting(OnlineWritingConfig(form="texts"))
    task = environment.tasks("train")[0]
    reply = f"Style: Cute\n{CUTE.replace(TOPIC, task.data['topic'])}"
    engine = PlayedEngine(chat, [reply])
    stage = stage_of(chat, engine, agent=ToolLoop(ToolLoopConfig()), environment=environment, sandboxes=memory(), max_turns=1)
    episode = asyncio.run(run_episode(stage, task, "e"))
    assert (episode.reward, episode.error) == (1.0, "")
    assert lexicon.body(reply) == CUTE.replace(TOPIC, task.data["topic"])
