"""A scripted walker for the warm start: it hums a little, follows the sign two times in five, and else opens any door.

Flows in: the conversation, which ends with the room's sign. Flows out: a reply. It is right in three rooms in 0.6^3 = 0.216
of all walks; RL is to learn that the signs are always to be followed.
"""

from __future__ import annotations

import random

from environments.corridor.language import DOORS, HUMS, MEANING

MAX_HUMS = 3
FOLLOWS = 0.4


def wanderer(conversation: str, rng: random.Random) -> str:
    """The reply in a room."""
    door = MEANING[conversation.split()[-1]] if rng.random() < FOLLOWS else rng.choice(DOORS)
    return " ".join([*rng.choices(HUMS, k=rng.randint(0, MAX_HUMS)), door])
