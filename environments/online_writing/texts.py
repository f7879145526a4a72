"""Tier B: writing in English. 500 topics, 400 of them for training, and what an instruct model is asked.

Flows in: candidates, a topic, random numbers. Flows out: the opening of the conversation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

from environments.online_writing.verdict import Style
from harness.task import Split

KINDS = (
    "old", "silent", "crowded", "hidden", "floating", "frozen", "sunlit", "wooden", "forgotten", "busy",
    "lonely", "painted", "windy", "mossy", "glass", "borrowed", "broken", "flooded", "roadside", "midnight",
)  # fmt: skip
THINGS = (
    "bridge", "library", "market", "lighthouse", "garden", "train", "clock", "teahouse", "mountain path", "violin",
    "harbour", "letter", "bakery", "umbrella", "observatory", "school", "map", "well", "theatre", "orchard",
    "kite", "workshop", "staircase", "museum", "ferry",
)  # fmt: skip
HELD_OUT = 5
"""One topic in so many is only asked by evaluation; every word occurs on both sides."""
TEMPLATES = (
    "Write 2-4 sentences about {topic}.",
    "Please write 2-4 sentences about {topic}.",
    "I would like to read 2-4 sentences about {topic}.",
    "Tell me about {topic} in 2-4 sentences.",
)
SYSTEM = (
    "You write short texts. Choose one style from this list: {candidates}. "
    "The first line of your answer is `Style: <name>`; the text follows. Name the topic in the text."
)


def topics(split: Split) -> tuple[str, ...]:
    """400 or 100 of them."""
    pairs = product(enumerate(KINDS), enumerate(THINGS))
    return tuple(f"the {kind} {thing}" for (i, kind), (j, thing) in pairs if ((i + j) % HELD_OUT == 0) == (split == "heldout"))


TOPICS: dict[Split, tuple[str, ...]] = {"train": topics("train"), "heldout": topics("heldout")}


def messages(candidates: Sequence[Style], topic: str, rng: random.Random) -> tuple[dict[str, Any], ...]:
    """System prompt with the candidates in their order, and the request."""
    names = ", ".join(style.capitalize() for style in candidates)
    return (
        {"role": "system", "content": SYSTEM.format(candidates=names)},
        {"role": "user", "content": rng.choice(TEMPLATES).format(topic=topic)},
    )
