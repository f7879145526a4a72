"""A flawed scripted demonstrator: it looks, edits and checks in the right order, but mostly edits by habit.

Flows in: the text of the conversation so far (what a model would see). Flows out: the next assistant text. The habit ("take the
first argument") is what RL is to unlearn; the right choice occurs often enough to be reinforced.
"""

from __future__ import annotations

import json
import random
import re

from harness.engines.scripted import call as call

RIGHT, HABIT, RETRY = 0.15, 0.7, 0.15
"""Shares of edits that read the numbers, that take the first other argument, and of second tries after a failed check."""

_RESULT = re.compile(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", re.DOTALL)


def flawed_expert(conversation: str, rng: random.Random, *, right: float = RIGHT, habit: float = HABIT) -> str:
    """The next assistant turn after `conversation`."""
    results = _RESULT.findall(conversation)
    if not results or results[-1] == "edited":
        return call("run_tests")
    report = json.loads(results[-1])
    edits = results.count("edited")
    if report["ok"] or edits == 2 or (edits == 1 and rng.random() > RETRY):
        return call("finish")
    names = [name for name in report if name not in ("want", "got", "ok")]
    answer = next(name for name in names if report[name] == report["want"])
    wrong = [name for name in names if name != answer]
    draw = rng.random()
    use = answer if draw < right else names[0] if draw < right + habit else rng.choice(wrong)
    return call("edit", want=report["want"], use=use)
