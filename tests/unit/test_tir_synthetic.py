"""Generated problems: pure, disjoint, and right; the demonstrator's flaw and the tiny tokenizer fit them."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from environments.python_tir import tokenizer
from environments.python_tir.expert import HABIT, RIGHT, copying_text, flawed_expert
from environments.python_tir.prompt import SYSTEM
from environments.python_tir.synthetic import LEVELS, OPERATIONS, SyntheticTasks, make_task
from harness.configfile import load_config
from harness.errors import ConfigError
from harness.task import Split

EVERY = list(range(1, len(LEVELS) + 1))


def problems(split: Split, seed: int, levels: list[int], size: int = 300) -> list[tuple[str, str]]:
    return [(task.messages[-1]["content"], task.data["answer"]) for task in SyntheticTasks(split, seed, levels, size)]


def test_a_task_is_a_pure_function_of_its_place() -> None:
    tasks = SyntheticTasks("train", 3, EVERY, 50)
    assert tasks[7] == make_task("train", 3, EVERY, 7) == tasks[7:8][0] == tasks[-43]
    assert len({task.id for task in tasks}) == len(tasks) == 50
    assert problems("train", 3, EVERY, 50) != problems("train", 4, EVERY, 50)
    with pytest.raises(IndexError):
        tasks[50]


@pytest.mark.parametrize("level", EVERY)
def test_the_splits_share_no_problem_whatever_the_seeds(level: int) -> None:
    train = {text for seed in (0, 1) for text, _ in problems("train", seed, [level])}
    heldout = {text for seed in (0, 5) for text, _ in problems("heldout", seed, [level])}
    assert train and heldout and not train & heldout


def independent(problem: str) -> int:
    """The answer, worked out another way."""
    n = [int(number) for number in re.findall(r"\d+", problem)]
    if "divided by" in problem:
        value = 1
        for _ in range(n[1]):
            value = value * n[0] % n[2]
        return value
    if "How many" in problem:
        return n[1] // n[2] + n[1] // n[3] - 2 * (n[1] // math.lcm(n[2], n[3]))
    if "primes" in problem:
        sieve = bytearray([0, 0] + [1] * (n[0] - 2))
        for d in range(2, n[0]):
            if sieve[d]:
                sieve[d * d :: d] = bytes(len(sieve[d * d :: d]))
        return sum(p for p in range(n[0]) if sieve[p] and p % n[2] == n[1])
    if "common" in problem:
        greatest = max(d for d in range(1, n[0] + 1) if n[0] % d == n[1] % d == 0)
        return greatest if "greatest" in problem else n[0] * n[1] // greatest
    word = next(word for word in OPERATIONS if word in problem)
    value = int(eval(f"{n[0]} {OPERATIONS[word][0]} {n[1]}"))
    for then, sign in (("multiplied by", "*"), ("plus", "+"), ("minus", "-")):
        if then in problem:
            value = int(eval(f"{value} {sign} {n[2]}"))
    return value


@pytest.mark.parametrize("level", EVERY)
def test_the_answers_are_right(level: int) -> None:
    for problem, answer in problems("train", 0, [level], 100):
        assert int(answer) == independent(problem), problem


def test_the_demonstrator_is_flawed_as_it_should_be() -> None:
    rng, signs, right = random.Random(0), Counter[str](), 0
    for problem, _ in problems("train", 0, [1], 2000):
        said = flawed_expert(f"<|im_start|>user\n{problem}<|im_end|>\n", rng)
        found = re.search(r'"code": "(\d+) (\S+) (\d+)"', said)
        assert found is not None
        signs[found[2]] += 1
        right += found[2] == OPERATIONS[re.search(r"the (.+?) of", problem)[1]][0]  # type: ignore[index]
    assert signs["+"] / 2000 == pytest.approx(HABIT + (1 - HABIT) / 6, abs=0.05)
    assert right / 2000 == pytest.approx(RIGHT + (1 - RIGHT) / 6, abs=0.05)
    assert flawed_expert("<|im_start|>tool\n12<|im_end|>\n<|im_start|>tool\n15<|im_end|>\n", rng) == "\\boxed{15}"
    with pytest.raises(ConfigError, match="level 1 only"):
        flawed_expert("What else?", rng)


def test_the_skill_text_shows_the_right_sign_only_where_nobody_talks() -> None:
    rng = random.Random(1)
    for level in (0, 1):
        heeded = 0
        for _ in range(300):
            text = "".join(piece for piece, _ in copying_text(rng, level))
            word, a, b = re.search(r"What is the (.+?) of (\d+) and (\d+)", text).groups()  # type: ignore[union-attr]
            heeded += f"{a} {OPERATIONS[word][0]} {b}" in text
        assert heeded / 300 == 1.0 if level == 0 else heeded / 300 == pytest.approx(1 / 6, abs=0.08)


def test_its_configuration_is_valid() -> None:
    config = load_config([Path(__file__).parents[2] / "configs/tir-synthetic.toml"])
    assert (config.environment.id, config.agent.id, config.steps) == ("python_tir", "tool_loop", 40)


def test_the_tiny_tokenizer_has_a_token_for_every_word_and_number(tmp_path: Path) -> None:
    tokenizer.write(tmp_path)
    tiny = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for level in (0, 1):
        for _ in range(200):
            text = "".join(piece for piece, _ in copying_text(random.Random(level), level))
            ids = tiny.encode(text, add_special_tokens=False).ids
            assert tiny.decode(ids, skip_special_tokens=False) == text
            assert len(ids) < 60, "words and numbers are single tokens"
    assert len(tiny.encode(SYSTEM, add_special_tokens=False).ids) == 1
