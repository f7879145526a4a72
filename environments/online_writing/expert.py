"""Scripted writers: one for the warm start of tier A, which likes each candidate equally well and has a flaw in one piece of
five, and for each tier one without, which is told the preferred style.

Flows in: the text of the prompt, or topic and style. Flows out: a reply. RL is to learn what the last ones know.
"""

from __future__ import annotations

import random

from environments.online_writing.lexicon import MARKERS
from environments.online_writing.symbols import CHOICES, MIN_STYLE_WORDS, PLAIN_WORDS, STYLE_WORDS, TOPICS
from environments.online_writing.verdict import Style

FLAWED = 0.2
"""Share of the replies that leave out the topic."""
STYLE, OTHER, PLAIN = 0.55, 0.08, 0.37
"""What a word is: of the chosen style, of another one, plain."""
LENGTHS = range(8, 15)
"""Words between the chosen style and the end."""
TOPIC_PLACES = 2
"""The topic is one of the first so many of them: a place that a tiny policy learns soon."""


def flawed_writer(conversation: str, rng: random.Random) -> str:
    """The reply to `conversation`."""
    asked = conversation.split()
    choice = rng.choice([word for word in asked if word in CHOICES])
    topic = next(word for word in asked if word in TOPICS)
    own = [word for word, style in STYLE_WORDS.items() if style == CHOICES[choice]]
    other = [word for word in STYLE_WORDS if word not in own]
    kinds = rng.choices([own, other, PLAIN_WORDS], [STYLE, OTHER, PLAIN], k=rng.choice(LENGTHS))
    words = [rng.choice(kind) for kind in kinds]
    if rng.random() >= FLAWED:
        words[rng.randrange(TOPIC_PLACES)] = topic
    return " ".join([choice, *words])


def right_symbols(topic: str, style: Style) -> str:
    """A reply of tier A that is good in that style."""
    own = [word for word, its in STYLE_WORDS.items() if its == style]
    return " ".join([f"<{style}>", topic, *own[:MIN_STYLE_WORDS]])


def right_text(topic: str, style: Style) -> str:
    """A reply of tier B that the lexicon finds good in that style."""
    words = [marker for marker in MARKERS[style] if any(c.isalpha() for c in marker)]
    return f"Style: {style.capitalize()}\nThis is about {topic}: {', '.join(words)}."
