"""Generate toy repositories: `lib.py` returns the wrong argument, and only a test run says which one was wanted.

Flows out: `Task`s. A task is a pure function of (split, seed, index). The bug is the ordered pair (planted, wanted) of
argument names: one pair in five is kept for the held-out split, so no held-out task or bug occurs in training.
"""

from __future__ import annotations

import random

from harness.task import LazyTasks, Split, Task

NAMES = "abcdefghijkl"
NUMBERS = range(12)
ARGUMENTS = 5
VISIBLE_CASES = 4
"""Each test run uses the next of them, so a second look shows fresh numbers."""
HIDDEN_CASES = 3

PROMPT = "The tests of lib.py fail. Repair it."

CHECK = """\
# Run cases FIRST..LAST of FILE against lib.py and print one JSON line: {"ok": true}, or the first failure.
# Usage: check.py FILE FIRST LAST. Without imports beyond sys, because it runs thousands of times.
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, ".")
try:
    from lib import f
    for args, want in eval(open(sys.argv[1]).read())[int(sys.argv[2]):int(sys.argv[3])]:
        got = f(**args)
        if type(got) is not int:
            raise TypeError
        if got != want:
            report = {"want": want, "got": got, **args}
            print("{" + ", ".join(f'"{key}": {value}' for key, value in report.items()) + ', "ok": false}')
            break
    else:
        print('{"ok": true}')
except Exception as error:
    print(f'{{"error": "{type(error).__name__}", "ok": false}}')
"""


def held_out(planted: str, wanted: str) -> bool:
    """True for one bug in five; every name is as often planted and wanted on either side."""
    return (NAMES.index(planted) + 2 * NAMES.index(wanted)) % 5 == 0


def make_task(split: Split, seed: int, index: int) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"toy_repair/{split}/{seed}/{index}")
    while True:
        names = rng.sample(NAMES, ARGUMENTS)
        planted, wanted = rng.sample(names, 2)
        if held_out(planted, wanted) == (split == "heldout"):
            break

    def cases(count: int) -> list[tuple[dict[str, int], int]]:
        drawn = [dict(zip(names, rng.sample(NUMBERS, ARGUMENTS), strict=True)) for _ in range(count)]
        return [(args, args[wanted]) for args in drawn]

    return Task(
        id=f"toy_repair/{split}/{seed}/{index}",
        messages=({"role": "user", "content": PROMPT},),
        data={
            "names": names,
            "planted": planted,
            "wanted": wanted,
            "files": {
                "lib.py": f"def f({', '.join(names)}):\n    return {planted}\n",
                "tests/check.py": CHECK,
                "tests/cases.txt": repr(cases(VISIBLE_CASES)),
            },
            "hidden": repr(cases(HIDDEN_CASES)),
        },
    )


class ToyTasks(LazyTasks):
    """A split."""

    def __init__(self, split: Split, seed: int, size: int) -> None:
        super().__init__(size)
        self.split, self.seed = split, seed

    def make(self, index: int) -> Task:
        """See `LazyTasks`."""
        return make_task(self.split, self.seed, index)
