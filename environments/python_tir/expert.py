"""A flawed scripted demonstrator of synthetic level 1, and text that teaches its craft: to copy numbers from here to there.

Flows in: the conversation so far. Flows out: the next assistant text. It calls Python and boxes what that printed, but mostly
adds by habit, whatever the problem asks. The habit is what RL is to unlearn; the right sign occurs often enough to be
reinforced.
"""

from __future__ import annotations

import random
import re

from environments.python_tir.prompt import SYSTEM
from environments.python_tir.synthetic import OPERATIONS, SMALL
from harness.engines.scripted import call
from harness.errors import ConfigError

RIGHT, HABIT = 0.3, 0.5
"""Shares of calls that heed the word, and that add; the rest draws any sign."""
HABITUAL = "+"

_PROBLEM = re.compile(r"What is the ([a-z ]+) of (\d+) and (\d+)\?")
_RESULT = re.compile(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", re.DOTALL)


def flawed_expert(conversation: str, rng: random.Random) -> str:
    """The next assistant turn after `conversation`."""
    if results := _RESULT.findall(conversation):
        return f"\\boxed{{{results[-1]}}}"
    problem = _PROBLEM.search(conversation)
    if problem is None:
        raise ConfigError("this expert knows synthetic level 1 only", hint="set environment.levels = [1]")
    signs = [sign for sign, _ in OPERATIONS.values()]
    draw = rng.random()
    sign = OPERATIONS[problem[1]][0] if draw < RIGHT else HABITUAL if draw < RIGHT + HABIT else rng.choice(signs)
    return call("python", code=f"{problem[2]} {sign} {problem[3]}")


def copying_text(rng: random.Random, level: int) -> list[tuple[str, bool]]:
    """Pieces of one conversation and whether each carries loss: the numbers do.

    Level 0 is bare: the problem in Python, with the right sign, which carries loss too, and the result again. Level 1 has the
    conversation around them, and any sign: which one to take there is what RL is to teach.
    """
    word, (sign, apply) = rng.choice(list(OPERATIONS.items()))
    if level > 0:
        sign, apply = rng.choice(list(OPERATIONS.values()))
    b, a = sorted((rng.choice(SMALL), rng.choice(SMALL)))
    result = str(apply(a, b))
    problem = f"What is the {word} of {a} and {b}?"
    if level == 0:
        return [
            (problem, False),
            (f"{a}", True),
            (f" {sign} ", True),
            (f"{b}", True),
            (f"tool\n{result}\\boxed{{", False),
            (result, True),
        ]
    before, after = call("python", code="\0").split("\\u0000")
    tools, told = "<|im_start|>system\ntools: python<|im_end|>\n", f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    opening = f"{tools}{told}<|im_start|>user\n{problem}<|im_end|>\n"
    return [
        (f"{opening}<|im_start|>assistant\n{before}", False),
        (f"{a}", True),
        (f" {sign} ", False),
        (f"{b}", True),
        (f"{after}<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n\\boxed{{", False),
        (result, True),
        ("}<|im_end|>", True),
    ]
