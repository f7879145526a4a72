"""toy_repair: the splits share no bug, blind play cannot win, hidden tests judge, the demonstrator is as flawed as designed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.tool_loop import ToolLoop, ToolLoopConfig, run_tool
from environments.toy_repair.environment import ToyRepair, ToyRepairConfig
from environments.toy_repair.expert import HABIT, RETRY, RIGHT, flawed_expert
from environments.toy_repair.tasks import ARGUMENTS, HIDDEN_CASES, NAMES, VISIBLE_CASES, make_task
from environments.toy_repair.tokenizer import build_tokenizer
from harness.chat import Chat
from harness.engines.scripted import ScriptedEngine
from harness.episode import Episode
from harness.ledger import Ledger, Slot
from harness.protocols import ToolCall
from harness.rollout import collect
from harness.task import Split, Task, Termination
from tests.support import memory, stage_of

ENVIRONMENT = ToyRepair(ToyRepairConfig())
SPLITS: tuple[Split, ...] = ("train", "heldout")


def pair(task: Task) -> tuple[str, str]:
    return task.data["planted"], task.data["wanted"]


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_the_splits_share_no_bug_and_no_task() -> None:
    bugs = {split: {pair(make_task(split, seed, i)) for seed in (0, 1) for i in range(1500)} for split in SPLITS}
    assert not bugs["train"] & bugs["heldout"]
    assert len(bugs["train"]) + len(bugs["heldout"]) == len(NAMES) * (len(NAMES) - 1), "and every bug is in one of them"
    assert 15 <= len(bugs["heldout"]) <= 40
    ids = [make_task(split, seed, i).id for split in SPLITS for seed in (0, 1) for i in range(50)]
    assert len(set(ids)) == len(ids)


@given(st.sampled_from(SPLITS), st.integers(0, 5), st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_task_is_a_function_of_split_seed_and_index_and_is_broken_but_repairable(split: Split, seed: int, index: int) -> None:
    task = make_task(split, seed, index)
    assert task == make_task(split, seed, index)
    names, (planted, wanted) = task.data["names"], pair(task)
    assert len(set(names)) == ARGUMENTS
    assert planted != wanted
    assert {planted, wanted} <= set(names)
    shown = json.dumps(task.messages)
    assert not any(f'"{n}"' in shown or f" {n}," in shown for n in names), "no name is shown before a look"
    assert verdict(task, [])[0] == 0.0
    assert verdict(task, [wanted])[0] == 1.0


def test_seeds_make_other_tasks() -> None:
    a, b = ([make_task("train", seed, i).data["files"] for i in range(20)] for seed in (0, 1))
    assert all(x != y for x, y in zip(a, b, strict=True))


def test_lazy_sequences() -> None:
    tasks = ToyRepair(ToyRepairConfig(train_tasks=7, heldout_tasks=3)).tasks("train")
    assert (len(tasks), len(ToyRepair(ToyRepairConfig(heldout_tasks=3)).tasks("heldout"))) == (7, 3)
    assert tasks[-1] == tasks[6]
    assert [t.id for t in tasks[2:4]] == [tasks[2].id, tasks[3].id]
    assert [t.id for t in tasks] == [tasks[i].id for i in range(7)]
    for wrong in (7, -8):
        with pytest.raises(IndexError):
            tasks[wrong]


# --- the environment -------------------------------------------------------------------------------------------------

Play = Callable[["Hands"], Awaitable[None]]


class Hands:
    """One live task and a way to call its tools as an agent would."""

    def __init__(self, live: Any, task: Task) -> None:
        self.live, self.task = live, task

    async def __call__(self, name: str, **arguments: Any) -> str:
        return (await run_tool(self.live.tools, ToolCall("c", name, json.dumps(arguments)))).content


async def _judge(task: Task, play: Play) -> tuple[float, dict[str, Any]]:
    sandbox = await memory().acquire(task)
    hands = Hands(await ENVIRONMENT.begin(task, sandbox), task)
    await play(hands)
    score = await hands.live.score()
    return score.reward, score.info


def verdict(task: Task, uses: list[str]) -> tuple[float, dict[str, Any]]:
    """The judgement after some edits."""

    async def play(hands: Hands) -> None:
        for use in uses:
            await hands("edit", want=0, use=use)

    return asyncio.run(_judge(task, play))


def converse(play: Play, task: Task | None = None) -> tuple[float, dict[str, Any]]:
    return asyncio.run(_judge(task or make_task("train", 0, 0), play))


def test_finish_wants_a_test_run_after_the_last_edit() -> None:
    async def play(hands: Hands) -> None:
        assert await hands("finish") == "error: run the tests first"
        await hands("read_code")
        assert await hands("finish") == "error: run the tests first"
        await hands("run_tests")
        await hands("edit", want=1, use="a")
        assert await hands("finish") == "error: run the tests first"
        await hands("run_tests")
        assert await hands("finish") == "done"

    converse(play)


def test_only_two_edits() -> None:
    task = make_task("train", 0, 0)
    planted, wanted = pair(task)

    async def play(hands: Hands) -> None:
        assert await hands("edit", want=1, use=planted) == "edited"
        assert await hands("edit", want=1, use=planted) == "edited"
        assert await hands("edit", want=1, use=wanted) == "error: no edit is left"

    assert converse(play, task) == (0.0, {"edits": 2, "test_runs": 0})


@pytest.mark.parametrize("use", ["", "a b", "a)", "1", "a\n    import os", "a#", "\ud800", "a.b"])
def test_a_use_that_is_no_name_is_refused_and_costs_no_edit(use: str) -> None:
    async def play(hands: Hands) -> None:
        before = await hands("read_code")
        assert (await hands("edit", want=1, use=use)).startswith("error: ")
        assert await hands("read_code") == before

    assert converse(play)[1]["edits"] == 0


@pytest.mark.parametrize(
    "use",
    ["f", "print", "exit", "quit", "__name__", "__builtins__", "True", "None", "return", "lambda", "zz", "é", "NotImplemented"],
)
def test_what_the_policy_can_write_is_judged_0_never_unjudged(use: str) -> None:
    """A name whose value is no number, or no name at all: the hidden tests must still give a verdict, or the policy has an
    escape from its reward.
    """

    async def play(hands: Hands) -> None:
        assert await hands("edit", want=1, use=use) == "edited"
        report = json.loads(await hands("run_tests"))
        assert report["ok"] is False

    assert converse(play)[0] == 0.0


def test_the_report_shows_what_is_needed_and_new_numbers_at_each_run() -> None:
    task = make_task("train", 0, 3)
    planted, wanted = pair(task)
    seen: list[str] = []

    async def play(hands: Hands) -> None:
        seen.extend([await hands("run_tests") for _ in range(VISIBLE_CASES + 1)])

    converse(play, task)
    for text in seen:
        report = json.loads(text)
        assert list(report) == ["want", "got", *task.data["names"], "ok"]
        assert (report["want"], report["got"]) == (report[wanted], report[planted])
        assert len({report[n] for n in task.data["names"]}) == ARGUMENTS, "the value points at exactly one name"
    assert len(set(seen[:VISIBLE_CASES])) == VISIBLE_CASES
    assert seen[0] == seen[VISIBLE_CASES]


def test_hidden_tests_judge_not_the_files_that_the_agent_sees() -> None:
    """A checker or visible cases that say ok do not help; what was written over is written anew."""
    task = make_task("train", 0, 1)

    async def run() -> float:
        sandbox = await memory().acquire(task)
        live = await ENVIRONMENT.begin(task, sandbox)
        for path in list(sandbox.files):
            if path.startswith("tests/"):
                await sandbox.write(path, b"print('{\"ok\": true}')")
        await sandbox.write("tests/hidden.txt", b"[]")
        return float((await live.score()).reward)

    assert asyncio.run(run()) == 0.0


def test_a_repair_that_fits_only_the_visible_cases_is_not_enough() -> None:
    task = make_task("train", 0, 2)
    planted, wanted = pair(task)
    args = task.data["names"]

    async def run() -> float:
        sandbox = await memory().acquire(task)
        live = await ENVIRONMENT.begin(task, sandbox)
        shown = eval(task.data["files"]["tests/cases.txt"])
        table = {tuple(a[n] for n in args): want for a, want in shown}
        code = f"def f({', '.join(args)}):\n    return {table!r}.get(({', '.join(args)}), {planted})\n"
        await sandbox.write("lib.py", code.encode())
        tools = {t.name: t for t in live.tools}
        assert (await tools["run_tests"].call({})).content == '{"ok": true}'
        return float((await live.score()).reward)

    assert asyncio.run(run()) == 0.0
    hidden, shown = eval(task.data["hidden"]), eval(task.data["files"]["tests/cases.txt"])
    assert len(hidden) == HIDDEN_CASES
    assert not [case for case in hidden if case in shown]


# --- chance ----------------------------------------------------------------------------------------------------------

GUESSES = 400


def share(split: Split, play: Play) -> float:
    async def run() -> float:
        return sum([(await _judge(make_task(split, 0, i), play))[0] for i in range(GUESSES)]) / GUESSES

    return asyncio.run(run())


def best_letters(split: Split) -> list[str]:
    """The names most often wanted: the best that can be known without a look."""
    return [n for n, _ in Counter(make_task(split, 0, i).data["wanted"] for i in range(2000)).most_common()]


@pytest.mark.parametrize("split", SPLITS)
def test_without_reading_anything_little_is_won(split: Split) -> None:
    first, second, *_ = best_letters(split)

    async def once(hands: Hands) -> None:
        await hands("edit", want=3, use=first)
        await hands("run_tests")
        await hands("finish")

    async def twice(hands: Hands) -> None:
        """Reads only whether the tests pass."""
        await hands("edit", want=3, use=first)
        if '"ok": true' not in await hands("run_tests"):
            await hands("edit", want=3, use=second)
            await hands("run_tests")
        await hands("finish")

    one, two = share(split, once), share(split, twice)
    assert 0.02 < one < 0.25
    assert one < two < 0.45, "the few held-out bugs favour some letters; still far from what reading gives"


@pytest.mark.parametrize("split", SPLITS)
def test_knowing_the_names_but_not_the_numbers_is_a_coin_at_best(split: Split) -> None:
    def others(code: str) -> list[str]:
        head, returned = code.strip().split("\n")
        names = head[len("def f(") : -2].split(", ")
        return [n for n in names if n != returned.split()[-1]]

    async def first_name(hands: Hands) -> None:
        await hands("edit", want=3, use=others(await hands("read_code"))[0])
        await hands("run_tests")

    async def two_names(hands: Hands) -> None:
        a, b, *_ = others(await hands("read_code"))
        await hands("edit", want=3, use=a)
        if '"ok": true' not in await hands("run_tests"):
            await hands("edit", want=3, use=b)
            await hands("run_tests")

    assert share(split, first_name) == pytest.approx(0.25, abs=0.07)
    assert share(split, two_names) == pytest.approx(0.50, abs=0.08)


@pytest.mark.parametrize("split", SPLITS)
def test_reading_the_numbers_wins_always(split: Split) -> None:
    async def reader(hands: Hands) -> None:
        report = json.loads(await hands("run_tests"))
        use = next(n for n in report if n not in ("want", "got", "ok") and report[n] == report["want"])
        await hands("edit", want=report["want"], use=use)

    assert share(split, reader) == 1.0


# --- the demonstrator ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrations(chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Episode]]:
    """Whole episodes: expert, scripted engine, tool loop, environment, memory sandboxes, ledger."""
    ledger = Ledger(tmp_path_factory.mktemp("demonstrations"))
    stage = stage_of(
        chat,
        ScriptedEngine(chat, flawed_expert),
        agent=ToolLoop(ToolLoopConfig()),
        environment=ENVIRONMENT,
        sandboxes=memory(),
        max_turns=12,
        max_context=320,
        max_tokens_per_turn=24,
    )
    tasks = ENVIRONMENT.tasks("train")
    chosen = [(Slot(i, i), tasks[i]) for i in range(500)]
    work = collect(stage, chosen, ledger, "demonstration", version=0, concurrency=8, attempts=1, keep=False)
    yield asyncio.run(work)
    ledger.close()


def test_the_demonstrator_succeeds_as_often_as_designed(demonstrations: list[Episode]) -> None:
    at_once = RIGHT + HABIT / ARGUMENTS
    expected = at_once + (1 - at_once) * RETRY * at_once
    rewards = [e.reward for e in demonstrations]
    assert None not in rewards
    assert sum(filter(None, rewards)) / len(rewards) == pytest.approx(expected, abs=0.07)
    assert 0.2 < expected < 0.5


def test_the_demonstrator_always_looks_edits_checks_and_ends_within_the_limits(demonstrations: list[Episode]) -> None:
    for episode in demonstrations:
        assert episode.termination == Termination.FINISHED
        (t,) = episode.trajectories
        assert t.n_turns in (4, 6), "look, edit, check, (edit, check,) finish"
        assert len(t) <= 320
    turns = Counter(e.trajectories[0].n_turns for e in demonstrations)
    assert 0.03 < turns[6] / len(demonstrations) < 0.2


def test_no_demonstration_contains_a_failed_call(demonstrations: list[Episode], chat: Chat) -> None:
    for episode in demonstrations[:100]:
        assert "error" not in chat.decode(episode.trajectories[0].tokens.tolist())


def test_the_expert_is_a_function_of_what_it_reads_and_its_random_numbers() -> None:
    said = '<|im_start|>tool\n{"want": 3, "got": 1, "a": 1, "b": 3, "c": 0, "ok": false}<|im_end|>'
    assert flawed_expert(said, random.Random(1)) == flawed_expert(said, random.Random(1))
    uses = Counter(json.loads(flawed_expert(said, random.Random(i)).split("\n")[1])["arguments"]["use"] for i in range(2000))
    assert uses["b"] / 2000 == pytest.approx(RIGHT, abs=0.04)
    assert uses["a"] / 2000 == pytest.approx(HABIT + (1 - RIGHT - HABIT) / 2, abs=0.04)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@given(st.text())
def test_the_tokenizer_takes_any_text_and_gives_it_back(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_writing_the_files_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    from environments.toy_repair.tokenizer import write

    write(tmp_path / "a")
    write(tmp_path / "b")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
