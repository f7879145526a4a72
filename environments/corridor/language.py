"""The words of the corridor, and what they mean.

    stone2 stone9 stone5 sign7   ->   hum3 hum0 <left>          (in a room its sign comes last, in a reply the door)

Flows in: texts. Flows out: signs and doors. `python -m environments.corridor.language FOLDER` writes the tokenizer.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from environments import word_tokenizer

DOORS = ("<left>", "<middle>", "<right>")
SIGNS = tuple(f"sign{i}" for i in range(24))
STONES = tuple(f"stone{i}" for i in range(12))
"""What else is in a room: means nothing."""
HUMS = tuple(f"hum{i}" for i in range(12))
"""What may be said before a door is opened: means nothing."""
WORDS = (*DOORS, *SIGNS, *STONES, *HUMS)
MEANING = {sign: DOORS[i % len(DOORS)] for i, sign in enumerate(SIGNS)}
"""The right door of each sign."""


def opened(reply: str) -> str | None:
    """The door that a reply opens: its last word, if nothing but humming stands before it."""
    words = reply.split()
    if not words or words[-1] not in DOORS or any(word not in HUMS for word in words[:-1]):
        return None
    return words[-1]


def follow(conversation: str, rng: random.Random) -> str:
    """The right door of the sign that was seen last."""
    return MEANING[re.findall(r"sign\d+", conversation)[-1]]


def write(folder: Path) -> None:
    """Write `tokenizer.json` and `chat_template.jinja`."""
    word_tokenizer.write(folder, WORDS)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
