"""Supervised warm start: loss on action spans only, the skill gate, the mean over all examples."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from harness.chat import Chat
from harness.config import SftConfig
from harness.conversations import conversations
from harness.errors import ConfigError
from harness.trajectory import Trajectory
from tests.trainer import support
from trainer import sft
from trainer.model import Policy

pytestmark = pytest.mark.usefixtures("rank")
NEVER, EASY = "tests.trainer.test_sft:noise", "tests.trainer.test_sft:easy"


def noise(rng: random.Random, level: int) -> list[tuple[str, bool]]:
    """Nothing to learn."""
    return [("tools:", False), ("".join(rng.choice("abcdefgh") for _ in range(8)), True)]


def easy(rng: random.Random, level: int) -> list[tuple[str, bool]]:
    """Copy one letter of the level; the letter itself cannot be foretold and carries no loss."""
    letter = rng.choice("ab" if level == 1 else "xy")
    return [(f"tools:{letter}", False), (letter, True)]


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"batch": 4, "epochs": 2, "optimizer": support.optimizer(lr=1e-2, clip=1.0)}
    return SftConfig(**(base | changes)).model_dump()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose vocabulary is the toy tokenizer's."""
    from environments.toy_repair.tokenizer import build_tokenizer

    size = build_tokenizer().get_vocab_size()
    return support.write_model(tmp_path_factory.mktemp("words"), support.policy("qwen3", vocab_size=size))


def policy(folder: Path) -> Policy:
    return support.learners(folder).policy


def gradient(
    folder: Path, trajectories: list[Trajectory], weight: float, budget: int = 64
) -> tuple[dict[str, torch.Tensor], float]:
    made = policy(folder)
    loss = sft.weighted_loss(made, [sft.demonstration(t, weight) for t in trajectories], budget)
    return {n: support.whole(p.grad) for n, p in made.named_parameters() if p.grad is not None}, loss


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_loss_by_hand(moe: Path, weight: float) -> None:
    """Weighted mean over all tokens of all examples, with transformers' own model; micro-batches change nothing."""
    trajectories = support.batch(4, 5)
    model: Any = AutoModelForCausalLM.from_pretrained(moe, attn_implementation="eager", dtype=torch.float32)
    total, count = torch.zeros(()), 0.0
    for t in trajectories:
        ids = torch.from_numpy(t.tokens.astype(np.int64))
        logp = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)
        logp = logp[:-1].gather(1, ids[1:, None])[:, 0]
        weights = torch.from_numpy(np.where(t.loss_mask[1:], 1.0, weight)).float()
        total, count = total - (weights * logp).sum(), count + float(weights.sum())
    (total / count).backward()  # type: ignore[no-untyped-call]
    theirs = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    for budget in (1, 64, 10**6):
        ours, loss = gradient(moe, trajectories, weight, budget)
        assert loss == pytest.approx(total.item() / count, rel=1e-5)
        assert support.apart(ours, theirs) < 2e-5


def test_given_conversations_train(words: Path, tmp_path: Path) -> None:
    """From a file to a policy that says what the assistant said, and does not learn what the user said."""
    chats = [[f"say {a}", b] for a, b in zip("abcd", ("edited", "done", "finish", "no"), strict=True)]
    rows = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in chats]
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    chat = Chat(words, ["<|im_end|>"])
    given = [Trajectory.load(path) for path in conversations(file, chat, tmp_path)]
    made = policy(words)
    fitted = settings(optimizer=support.optimizer(lr=1e-2, weight_decay=0.0), epochs=40)
    report = sft.train(made, given, fitted, words, budget=64, seed=0)
    assert report["demonstrations"] == 4 and report["steps"] == 40
    for t in given:
        where = torch.arange(1, len(t))
        with torch.no_grad():
            logp, _ = made(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)], where)
        acted = torch.from_numpy(t.loss_mask[1:])
        assert logp[acted].min() > -0.2 and logp[~acted].mean() < -2.0


def test_observations_teach_nothing_at_weight_zero(moe: Path) -> None:
    """What a tool printed last has no gradient; at a weight above 0 it has."""
    base = support.batch(11, 1)[0]
    t = replace(
        base,
        tokens=np.concatenate([base.tokens % 60, [62, 63]]).astype(np.int32),
        turn_ids=np.concatenate([base.turn_ids, [-1, -1]]).astype(np.int32),
        rollout_logprobs=np.concatenate([base.rollout_logprobs, [np.nan] * 2]).astype(np.float32),
        policy_versions=np.concatenate([base.policy_versions, [-1, -1]]).astype(np.int32),
    )
    with_, _ = gradient(moe, [t], 0.0)
    without, _ = gradient(moe, [replace(base, tokens=base.tokens % 60)], 0.0)
    assert support.apart(with_, without) < 1e-6
    assert not with_["model.model.embed_tokens.weight"][62:].any()
    assert gradient(moe, [t], 0.5)[0]["model.model.embed_tokens.weight"][62].any()


def test_corpus_pieces_carry_their_loss(words: Path) -> None:
    tokenizer = Tokenizer.from_file(str(words / "tokenizer.json"))
    example = sft.corpus_example([("tools:", True), ("xyz", False), ("ab", True)], tokenizer)
    assert example.weights.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "the first token has nothing before it"
    assert tokenizer.decode(example.tokens.tolist(), skip_special_tokens=False) == "tools:xyzab"


def phase(loss: float, *levels: int) -> dict[str, Any]:
    return {"levels": list(levels), "loss": loss}


def test_the_skill_gate_stops_the_run(words: Path) -> None:
    options = settings(corpus=NEVER, corpus_phases=[phase(99.0, 1), phase(0.01, 1)], corpus_max_steps=4, corpus_batch=4)
    with pytest.raises(ConfigError, match="gate `skill`: phase 1 .* after 4 steps") as caught:
        sft.train(policy(words), support.batch(1), options, words, budget=400, seed=0)
    assert caught.value.hint


def test_a_learnt_skill_passes_and_demonstrations_follow(words: Path) -> None:
    options = settings(
        corpus=EASY,
        corpus_phases=[phase(0.5, 1), phase(0.3, 1, 2)],
        corpus_optimizer=support.optimizer(lr=1e-2, clip=1.0, warmup_steps=5),
        corpus_batch=8,
        corpus_max_steps=300,
        corpus_mix_levels=[2],
        decay=0.5,
    )
    report = sft.train(policy(words), support.batch(1, 9), options, words, budget=400, seed=0)
    assert [p["levels"] for p in report["corpus"]] == [[1], [1, 2]]
    assert all(p["loss"] < limit for p, limit in zip(report["corpus"], (0.5, 0.3), strict=True))
    assert report["corpus_steps"] == report["corpus"][1]["steps"] > report["corpus"][0]["steps"] > 0
    assert report["steps"] == 4 and report["demonstrations"] == 9


def test_imitation_is_deterministic_and_lowers_the_loss(words: Path) -> None:
    runs = []
    for _ in range(2):
        made = policy(words)
        first = gradient(words, support.batch(1), 0.0)[1]
        report = sft.train(made, support.batch(1), settings(epochs=20), words, budget=400, seed=3)
        runs.append((support.parameters(made), report))
    assert support.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert runs[0][1]["loss"] < first / 2


@pytest.mark.parametrize(("step", "factor"), [(0, 1.0), (5, 1.0), (8, 0.5), (9, 0.25)])
def test_decay(step: int, factor: float) -> None:
    assert sft.decay(step, 10, 0.4) == pytest.approx(factor)
    assert sft.decay(step, 10, 0.0) == 1.0
