"""Generated problems of graded difficulty, for models from tiny to small. Every answer is an integer.

Flows out: `Task`s. A task is a pure function of (split, seed, levels, index). A hash of the problem's text decides its split,
so the splits share no problem, whatever the seeds.

    1  one operation on two numbers, named by a word   What is the product of 7 and 12?
    2  two operations                                  What is the sum of 31 and 18, multiplied by 6?
    3  number theory of larger numbers                 What is the greatest common divisor of 1368 and 912?
    4  a power with a modulus                          What is the remainder when 317^245 is divided by 1009?
    5  counting by search                              How many integers from 1 to 4000 are divisible by 7 or 12 but not both?
    6  sums over a condition                           What is the sum of all primes p < 3000 with p = 3 mod 7?
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
from collections.abc import Callable, Sequence

from environments.python_tir.prompt import SYSTEM
from harness.task import LazyTasks, Split, Task

HELD_OUT = 0.2
"""Share of the problems that only evaluation asks."""
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("+", operator.add),
    "difference": ("-", operator.sub),
    "product": ("*", operator.mul),
    "quotient": ("//", operator.floordiv),
    "remainder": ("%", operator.mod),
    "bitwise or": ("|", operator.or_),
}
"""The word of level 1, its sign in Python and what it does."""
SMALL = range(2, 16)
"""Numbers of level 1; the first is never the smaller one."""


def _operation(rng: random.Random) -> tuple[str, int]:
    word = rng.choice(list(OPERATIONS))
    b, a = sorted((rng.choice(SMALL), rng.choice(SMALL)))
    return f"What is the {word} of {a} and {b}?", OPERATIONS[word][1](a, b)


def _two_operations(rng: random.Random) -> tuple[str, int]:
    a, b, c = rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(2, 30)
    word = rng.choice(("sum", "product"))
    then, apply = rng.choice((("multiplied by", operator.mul), ("plus", operator.add), ("minus", operator.sub)))
    return f"What is the {word} of {a} and {b}, {then} {c}?", apply(OPERATIONS[word][1](a, b), c)


def _divisors(rng: random.Random) -> tuple[str, int]:
    common = rng.randrange(10, 200)
    a, b = common * rng.randrange(2, 60), common * rng.randrange(2, 60)
    name, value = rng.choice((("greatest common divisor", math.gcd), ("least common multiple", math.lcm)))
    return f"What is the {name} of {a} and {b}?", value(a, b)


def _power(rng: random.Random) -> tuple[str, int]:
    base, exponent, modulus = rng.randrange(20, 500), rng.randrange(50, 500), rng.randrange(500, 5000)
    return f"What is the remainder when {base}^{exponent} is divided by {modulus}?", pow(base, exponent, modulus)


def _count(rng: random.Random) -> tuple[str, int]:
    n, (a, b) = rng.randrange(1000, 9000), rng.sample(range(3, 40), 2)
    text = f"How many integers from 1 to {n} are divisible by {a} or {b} but not by both?"
    return text, sum((k % a == 0) != (k % b == 0) for k in range(1, n + 1))


def _primes(rng: random.Random) -> tuple[str, int]:
    n, modulus = rng.randrange(500, 5000), rng.randrange(3, 12)
    rest = rng.choice([r for r in range(1, modulus) if math.gcd(r, modulus) == 1])
    text = f"What is the sum of all primes p < {n} with p = {rest} mod {modulus}?"
    return text, sum(p for p in range(2, n) if p % modulus == rest and all(p % d for d in range(2, math.isqrt(p) + 1)))


LEVELS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (
    _operation,
    _two_operations,
    _divisors,
    _power,
    _count,
    _primes,
)
"""By level from 1: random numbers -> (problem, answer)."""


def held_out(problem: str) -> bool:
    """Whether only evaluation asks this problem."""
    return int.from_bytes(hashlib.sha256(problem.encode()).digest()[:4]) < HELD_OUT * 2**32


def make_task(split: Split, seed: int, levels: Sequence[int], index: int) -> Task:
    """Task number `index` of a split."""
    name = f"python_tir/{split}/{seed}/{index}"
    rng = random.Random(name)
    level = rng.choice(levels)
    while True:
        problem, answer = LEVELS[level - 1](rng)
        if held_out(problem) == (split == "heldout"):
            break
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": problem})
    return Task(name, messages, {"answer": str(answer), "source": "synthetic", "level": str(level)})


class SyntheticTasks(LazyTasks):
    """A split."""

    def __init__(self, split: Split, seed: int, levels: Sequence[int], size: int) -> None:
        super().__init__(size)
        self.split, self.seed, self.levels = split, seed, levels

    def make(self, index: int) -> Task:
        """See `LazyTasks`."""
        return make_task(self.split, self.seed, self.levels, index)
