"""Text that teaches the skill before RL: which number a test report wants, and which argument has a given number."""

from __future__ import annotations

import json
import random

from environments.toy_repair.expert import call
from environments.toy_repair.tasks import ARGUMENTS, NAMES, NUMBERS, PROMPT

QUERIES = 6
HEAD = "<|im_start|>system\ntools: run_tests read_code edit finish<|im_end|>\n<|im_start|>user\n" + PROMPT + "<|im_end|>\n"
TURN, TOOL, END = "<|im_start|>assistant\n", "<|im_start|>tool\n", "<|im_end|>\n"


def lookup_text(rng: random.Random, level: int) -> list[tuple[str, bool]]:
    """Pieces of one text and whether each carries loss: numbers of arguments, then arguments asked for by their number.

    Level 0 is bare (`"a": 3, ...` and `"want": 3, "a"`) with two to five arguments. Level 1 has the report line and the
    words of the edit call; level 2 the conversation around them, half the time with an older report. In levels 1 and 2 the
    first question is the report's own, and its number carries loss too. A model that starts with level 1 stays at a blind
    guess for long.
    """
    count = rng.randint(2, ARGUMENTS) if level == 0 else ARGUMENTS
    names = rng.sample(NAMES, count)

    def numbers() -> dict[str, int]:
        return dict(zip(names, rng.sample(NUMBERS, count), strict=True))

    def report(of: dict[str, int], wanted: str) -> str:
        got = rng.choice([name for name in names if name != wanted])
        return json.dumps({"want": of[wanted], "got": of[got], **of, "ok": False})

    arguments = numbers()
    wanted, *others = rng.choices(names, k=QUERIES)
    if level == 0:
        pieces = [("".join(f'"{name}": {number}, ' for name, number in arguments.items()), False)]
        for name in [wanted, *others]:
            pieces += [(f'"want": {arguments[name]}, ', False), (f'"{name}"', True)]
        return pieces
    if level == 1:
        pieces = [(report(arguments, wanted) + "\n", False)]
        before, after = "", "\n"
    else:
        look = f"{TURN}{call('run_tests')}{END}{TOOL}"
        pieces = [(HEAD, False)]
        if rng.random() < 0.5:
            old = numbers()
            tried = rng.choice([name for name in names if name != wanted])
            pieces += [(f"{look}{report(old, wanted)}{END}", False)]
            pieces += [(f"{TURN}{call('edit', want=old[wanted], use=tried)}{END}{TOOL}edited{END}", False)]
        pieces += [(f"{look}{report(arguments, wanted)}{END}", False)]
        before, after = f"{TURN}{call('edit').split('}')[0]}", f"}}}}\n</tool_call>{END}{TOOL}edited{END}"
        others = others[:2]
    for number, name in enumerate([wanted, *others]):
        pieces += [(before + '"want"', False), (f": {arguments[name]}, ", number == 0)]
        pieces += [('"use": ', False), (f'"{name}"', True), (after, False)]
    return pieces
