"""A scripted walker for the warm start: it hums a little and opens any door. RL is to learn what the signs mean."""

from __future__ import annotations

import random

from environments.corridor.language import DOORS, HUMS

MAX_HUMS = 3


def wanderer(_conversation: str, rng: random.Random) -> str:
    """The reply in any room."""
    return " ".join([*rng.choices(HUMS, k=rng.randint(0, MAX_HUMS)), rng.choice(DOORS)])
