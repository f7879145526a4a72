"""online_writing, tier A and the stream: phases, splits, the judge rule by rule, the tokenizer, the demonstrator, the order."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.tool_loop import ToolLoop, ToolLoopConfig
from environments import word_tokenizer
from environments.online_writing import tokenizer
from environments.online_writing.environment import OnlineWriting, OnlineWritingConfig
from environments.online_writing.expert import FLAWED, flawed_writer
from environments.online_writing.gate import writing_gate
from environments.online_writing.stream import Phase, WritingTasks, make_task, paper_phases, phase_of
from environments.online_writing.symbols import PLAIN_WORDS, TOPICS, WORDS, judge, prompt, prompts
from environments.online_writing.verdict import STYLES, Style
from harness.chat import Chat
from harness.configfile import load_config
from harness.engines.scripted import ScriptedEngine
from harness.episode import Episode, run_episode
from harness.errors import ConfigError
from harness.order import TaskOrder
from harness.registry import plugin_config
from harness.task import Split, Task, Termination
from tests.support import PlayedEngine, Raw, memory, stage_of

PHASES = paper_phases()
CONFIG = Path(__file__).parents[2] / "configs/online-writing.toml"
SPLITS: tuple[Split, ...] = ("train", "heldout")
OLD: list[Style] = ["academic", "cute", "chuunibyou"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """The tiny policy's tokenizer and template."""
    folder = tmp_path_factory.mktemp("writer")
    tokenizer.write(folder)
    return Chat(folder, ["<eos>"])


@pytest.mark.parametrize("form", ["symbols", "texts"])
@pytest.mark.parametrize("style", STYLES)
def test_the_solver_writes_what_the_judge_wants(form: str, style: Style) -> None:
    phase = Phase(preferred=style, candidates=[style, *(s for s in STYLES if s != style)][:3], episodes=60)
    made = OnlineWriting(OnlineWritingConfig(form=form, phases=[phase], heldout_tasks=60))  # type: ignore[arg-type]
    for task in (*made.tasks("train"), *made.tasks("heldout")):
        reply = made.solver(task)("", random.Random(0))
        verdict = asyncio.run(made._judge(reply, task.data["topic"], style))
        assert (verdict.style, verdict.quality, verdict.written) == (True, True, style)


def tasks(split: Split, **options: Any) -> WritingTasks:
    made = OnlineWriting(OnlineWritingConfig(**options)).tasks(split)
    assert isinstance(made, WritingTasks)
    return made


# --- the stream ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "phase"), [(0, 0), (2_399, 0), (2_400, 1), (4_799, 1), (4_800, 2), (6_719, 2), (7_199, 2)])
def test_the_preference_switches_after_150_and_300_batches_of_16(index: int, phase: int) -> None:
    assert phase_of(index, PHASES) == phase
    task = tasks("train")[index]
    assert (task.data["phase"], task.data["preferred"]) == (phase, ["cute", "chuunibyou", "classical"][phase])
    offered = {"academic", "cute", "chuunibyou"} if phase < 2 else {"classical", "cute", "chuunibyou"}
    assert set(task.data["candidates"]) == offered, "with the last switch the prompts change too"


def test_training_draws_the_stream_in_its_order_from_any_point() -> None:
    stream = tasks("train", phases=[phase.model_dump() | {"episodes": 5} for phase in PHASES])
    order = TaskOrder(stream, seed=3)
    drawn = [next(order) for _ in range(20)]
    assert drawn == [*range(15), *range(5)], "behind the last phase it begins again"
    resumed = TaskOrder(stream, 3, drawn=7)
    assert [next(resumed) for _ in range(13)] == drawn[7:]
    shuffled = TaskOrder(tasks("heldout"), seed=3)
    assert [next(shuffled) for _ in range(20)] != list(range(20)), "what is no stream is shuffled"


@given(st.sampled_from(SPLITS), st.integers(0, 3), st.integers(0, 7_199))
def test_a_task_is_a_function_of_split_seed_and_index(split: Split, seed: int, index: int) -> None:
    task = make_task("symbols", split, seed, index, PHASES)
    assert task == make_task("symbols", split, seed, index, PHASES)
    assert task.data["preferred"] in task.data["candidates"]
    assert task.messages[0]["content"] == prompt(task.data["candidates"], task.data["topic"])
    other = make_task("symbols", split, seed + 1, index, PHASES)
    assert other.id != task.id


def test_the_prompt_does_not_tell_the_preference() -> None:
    """The same prompts are asked in the first two phases, which prefer different styles."""
    asked = [{make_task("symbols", "train", 0, i, PHASES).messages[0]["content"] for i in r} for r in _first_two()]
    assert asked[0] == asked[1]


def _first_two() -> tuple[range, range]:
    return range(2_400), range(2_400, 4_800)


@pytest.mark.parametrize("candidates", [phase.candidates for phase in PHASES[1:]])
def test_the_splits_share_no_prompt_but_every_topic(candidates: list[Style]) -> None:
    train, heldout = (prompts(candidates, held_out=side) for side in (False, True))
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 6 * len(TOPICS) and len(heldout) == 12
    assert {topic for _, topic in train} == {topic for _, topic in heldout} == set(TOPICS)


def test_no_prompt_of_evaluation_is_ever_trained() -> None:
    asked = {split: {task.messages[0]["content"] for task in tasks(split)} for split in SPLITS}
    assert not asked["train"] & asked["heldout"]
    assert {task.data["phase"] for task in tasks("heldout")[:3]} == {0, 1, 2}, "held-out tasks take the phases in turn"


def test_lazy_sequences() -> None:
    stream = tasks("train")
    assert stream[-1] == stream[7_199]
    assert [t.id for t in stream[2:4]] == [stream[2].id, stream[3].id]
    for wrong in (7_200, -7_201):
        with pytest.raises(IndexError):
            stream[wrong]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"phases": []}, "phases"),
        ({"phases": [{"preferred": "cute", "candidates": ["academic", "classical", "chuunibyou"], "episodes": 1}]}, "cute"),
        ({"phases": [{"preferred": "cute", "candidates": ["cute", "cute", "chuunibyou"], "episodes": 1}]}, "twice"),
        ({"phases": [{"preferred": "plain", "candidates": OLD, "episodes": 1}]}, "preferred"),
        ({"form": "images"}, "form"),
        ({"judge": {"url": "http://localhost:1", "model": "m"}}, "symbols"),
        ({"form": "texts", "judge": {"url": "http://localhost:1"}}, "model"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plugin_config("environment", {"id": "online_writing", **options})


def test_phases_survive_the_saved_configuration() -> None:
    _, options = plugin_config("environment", {"id": "online_writing"})
    _, again = plugin_config("environment", {"id": "online_writing", **options.model_dump(mode="json", exclude_none=True)})
    assert again == options


# --- the judge -------------------------------------------------------------------------------------------------------

GOOD = "<cute> cute1 topic3 cute2 cute3 plain0"


@pytest.mark.parametrize(
    ("reply", "style", "quality"),
    [
        (GOOD, True, True),
        ("<cute> cute1 topic3 cute2 cute3", True, True),
        ("<cute> cute1 topic3 cute2", False, True),  # two style words
        ("<cute> topic3 plain0", False, True),
        ("<academic> cute1 topic3 cute2 cute3", False, True),  # another choice than its words
        ("<academic> academic1 topic3 academic2 academic3", False, True),  # not what is preferred
        ("cute1 topic3 cute2 cute3", False, True),  # no choice
        ("plain0 <cute> cute1 topic3 cute2 cute3", False, True),  # a late choice
        ("<cute> cute1 topic3 cute2 cute3 academic1 academic2", True, True),  # 60 %
        ("<cute> cute1 topic3 cute2 cute3 academic1 academic2 classical1", False, True),  # 50 %
        ("<cute> cute1 cute2 cute3 plain0", True, False),  # no topic
        ("<cute> cute1 topic4 cute2 cute3", True, False),  # another topic
        ("<cute> topic3 cute1 cute1 cute1 cute1", True, True),
        ("<cute> topic3 cute1 cute1 cute1 cute1 cute1", True, False),  # five times the same word
        ("<cute> topic3 cute1 cute2 cute3 plain0 plain0 plain0 plain0 plain0", True, False),
        ("<cute> <cute> <cute> <cute> <cute> topic3 cute1 cute2 cute3", True, False),
        ("<cute> topic3 topic3 topic3 topic3 topic3 cute1 cute2 cute3", True, False),
        ("<cute> TOPIC3 CUTE1 CUTE2 CUTE3", False, False),
        ("", False, False),
        ("<cute>", False, False),
        ("topic3", False, True),
        ("<eos> " + GOOD, False, True),
        (" ".join(WORDS), False, True),  # a bit of everything
        ("nonsense words", False, False),
    ],
)
def test_the_two_judgements(reply: str, style: bool, quality: bool) -> None:
    verdict = judge(reply, "topic3", "cute")
    assert (verdict.style, verdict.quality) == (style, quality)
    assert verdict.reward == float(style and quality)


@pytest.mark.parametrize("preferred", STYLES)
def test_the_same_reply_is_judged_by_the_preference(preferred: Style) -> None:
    verdict = judge(GOOD, "topic3", preferred)
    assert verdict.style == (preferred == "cute")
    assert verdict.written == "cute"


@given(st.lists(st.sampled_from([*WORDS, "<eos>", "<bos>", "<unk>", "<pad>"]), max_size=24), st.sampled_from(STYLES))
def test_whatever_the_policy_writes_has_a_verdict(reply: list[str], preferred: Style) -> None:
    verdict = judge(" ".join(reply), "topic0", preferred)
    assert not verdict.reward or (reply[0] == f"<{preferred}>" and "topic0" in reply)


# --- episodes --------------------------------------------------------------------------------------------------------


def played(chat: Chat, task: Task, reply: str | Raw) -> Episode:
    """One episode of the tool loop in a sandbox that is a dictionary."""
    stage = stage_of(
        chat,
        PlayedEngine(chat, [reply]),
        agent=ToolLoop(ToolLoopConfig()),
        environment=OnlineWriting(OnlineWritingConfig()),
        sandboxes=memory(),
        max_turns=1,
    )
    return asyncio.run(run_episode(stage, task, "e"))


def reply_to(task: Task, style: Style) -> str:
    return f"<{style}> {style}1 {task.data['topic']} {style}2 {style}3"


@pytest.mark.parametrize("index", [0, 2_400, 4_800])
def test_the_phase_of_the_task_decides_the_reward(words: Chat, index: int) -> None:
    task = tasks("train")[index]
    for style in STYLES:
        episode = played(words, task, reply_to(task, style))
        assert episode.reward == float(style == task.data["preferred"])
        facts = {key: episode.info[key] for key in ("phase", "preferred", "written", "style", "quality")}
        assert facts == {
            "phase": index // 2_400,
            "preferred": task.data["preferred"],
            "written": style,
            "style": style == task.data["preferred"],
            "quality": True,
        }
        assert episode.trajectories[0].info["written"] == style, "the record keeps it"


def test_a_reply_that_is_cut_off_has_reward_0(words: Chat) -> None:
    task = tasks("train")[0]
    episode = played(words, task, Raw(words.encode(reply_to(task, "cute")), finish="length"))
    assert (episode.reward, episode.termination) == (0.0, Termination.MAX_TOKENS_PER_TURN)
    assert episode.info["quality"] is False and episode.info["written"] is None


# --- tokenizer, demonstrator and gate ----------------------------------------------------------------------------------


def test_one_token_per_word(words: Chat) -> None:
    assert words.tokenizer.get_vocab_size() == len(WORDS) + 4 == 64
    text = " ".join(WORDS)
    assert words.decode(words.encode(text)) == text
    assert len(words.encode(text)) == len(WORDS)
    assert words.decode(words.encode("cute1 strange")) == "cute1 <unk>"


@given(st.lists(st.sampled_from([*word_tokenizer.SPECIAL, *WORDS])))
def test_any_reply_round_trips(said: list[str]) -> None:
    made = word_tokenizer.build(WORDS)
    ids = made.encode(" ".join(said), add_special_tokens=False).ids
    assert len(ids) == len(said)
    assert made.decode(ids, skip_special_tokens=False) == " ".join(said)


def test_the_prompt_is_the_specified_one(words: Chat) -> None:
    task = make_task("symbols", "train", 0, 0, PHASES)
    opening = words.decode(words.opening(task.messages, ()))
    a, b, c = task.data["candidates"]
    assert opening == f"<bos> <{a}> <{b}> <{c}> {task.data['topic']}"
    assert words.decode(words.answer(task.messages, {"role": "assistant", "content": GOOD}, ())) == f"{GOOD} <eos>"


def test_the_demonstrator_likes_each_candidate_and_is_as_flawed_as_designed() -> None:
    rng = random.Random(0)
    asked = "<bos> " + prompt(("cute", "classical", "academic"), "topic5")
    replies = [flawed_writer(asked, rng) for _ in range(3_000)]
    verdicts = [judge(reply, "topic5", "cute") for reply in replies]
    for style in ("cute", "classical", "academic"):
        assert 0.28 < sum(reply.startswith(f"<{style}> ") for reply in replies) / 3_000 < 0.38
    assert abs(sum(v.quality for v in verdicts) / 3_000 - (1 - FLAWED)) < 0.04
    assert 0.7 < sum(v.quality and v.written is not None for v in verdicts) / 3_000 < 0.85
    assert max(len(reply.split()) for reply in replies) < 24, "it ends within the budget"


def gate(chat: Chat, script: Any, weights: dict[str, float]) -> dict[str, Any]:
    """The gate on a script; `weights`: what it says about the probability of a first word."""

    class Scored(ScriptedEngine):
        async def score(self, token_ids: list[int]) -> list[float]:
            chance = weights.get(chat.decode(token_ids[-1:]), 1e-9)
            return [0.0] * (len(token_ids) - 2) + [math.log(chance)]

    return asyncio.run(writing_gate(Scored(chat, script), chat, tasks("train")))


FAIR = dict.fromkeys([f"<{style}>" for style in STYLES], 0.33)


def test_the_gate_lets_the_demonstrator_pass(words: Chat) -> None:
    facts = gate(words, flawed_writer, FAIR)
    assert facts["lowest"] == facts["highest"] == pytest.approx(0.33)
    assert 0.6 < facts["success"] < 0.9


def test_the_gate_refuses_who_never_chooses_a_style(words: Chat) -> None:
    with pytest.raises(ConfigError, match="gate `chooses`"):
        gate(words, flawed_writer, FAIR | {"<classical>": 0.05})


def test_the_gate_refuses_who_cannot_write(words: Chat) -> None:
    with pytest.raises(ConfigError, match="gate `writes`"):
        gate(words, lambda conversation, rng: f"<cute> {PLAIN_WORDS[0]}", FAIR)


def test_the_shipped_file_is_two_arms() -> None:
    sao = load_config(CONFIG)
    mean = load_config([CONFIG, "running_mean_128"])
    assert sao.critic is not None and sao.value is not None
    assert sao.critic.optimizer.lr == pytest.approx(5 * sao.trainer.optimizer.lr)
    assert (sao.critic.updates, sao.critic.trainable) == (2, "mlp_only")
    assert mean.critic is None and mean.value is None
    assert mean.advantage.table() == {"id": "running_mean_global", "window": 128}
    for same in ("trainer", "loss", "algorithm", "rollout", "sft", "environment", "steps"):
        assert getattr(sao, same) == getattr(mean, same), same
    first = Phase(**sao.environment.table()["phases"][0])
    assert first.episodes == 150 * sao.algorithm.batch >= sao.value.episodes, "the critic sees nothing of later phases"
