"""Tier A: writing as a sequence of symbols. A prompt lists three candidate styles and a topic; the reply begins with the token
of the style it chooses.

    <cute> <academic> <chuunibyou> topic3   ->   <cute> cute1 plain7 cute4 topic3 cute1

Flows in: a reply as text. Flows out: a `Verdict`. Everything is a pure function of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

from environments.online_writing.verdict import STYLES, Style, Verdict

CHOICES: dict[str, Style] = {f"<{style}>": style for style in STYLES}
STYLE_WORDS: dict[str, Style] = {f"{style}{i}": style for style in STYLES for i in range(8)}
PLAIN_WORDS = tuple(f"plain{i}" for i in range(16))
TOPICS = tuple(f"topic{i}" for i in range(8))
WORDS = (*CHOICES, *STYLE_WORDS, *PLAIN_WORDS, *TOPICS)

MIN_STYLE_WORDS = 3
MIN_SHARE = 0.6
MAX_REPEATS = 4
HELD_OUT = 4
"""One prompt in so many is only asked by evaluation."""


def prompt(candidates: Sequence[Style], topic: str) -> str:
    """What the policy reads."""
    return " ".join([*(f"<{style}>" for style in candidates), topic])


def prompts(candidates: Sequence[Style], *, held_out: bool) -> list[tuple[tuple[Style, ...], str]]:
    """(candidates in their order, topic): one side of the split. Each topic is on both sides, no prompt is."""
    orders = list(permutations(sorted(candidates)))
    return [
        (order, topic)
        for i, order in enumerate(orders)
        for j, topic in enumerate(TOPICS)
        if ((i + j) % HELD_OUT == 0) == held_out
    ]


def judge(reply: str, topic: str, preferred: Style) -> Verdict:
    """Style: the first word chooses the preferred one, at least 3 style words follow, and 60 % of them belong to it.

    Quality: the topic occurs, and no word more than 4 times. That the reply ended by itself is the caller's to know.
    """
    words = reply.split()
    counts = Counter(STYLE_WORDS[word] for word in words if word in STYLE_WORDS)
    chosen = CHOICES.get(words[0]) if words else None
    styled = counts.total() >= MIN_STYLE_WORDS and chosen is not None and counts[chosen] >= MIN_SHARE * counts.total()
    quality = topic in words and max(Counter(words).values()) <= MAX_REPEATS
    return Verdict(style=styled and chosen == preferred, quality=quality, written=chosen if styled else None)
