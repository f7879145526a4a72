"""T-LEARN: the symbolic writing task of algorithm.md 6.2 (tier A), synchronous. SAO learns it; with a wrong sign, or with an
importance weight that is differentiated, it does not.

A prompt is BOS, three candidate styles in random order and a topic. The policy names a style, writes words and ends. It is paid
for style times quality: it named the preferred style and wrote in it; it ended in time, named the topic and did not repeat.
The supervised start names each candidate with p = 1/3 and has quality .8, so that about a quarter of the texts are paid for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import torch

from harness.config import SftConfig
from harness.trajectory import Trajectory, TrajectoryBuilder
from tests.trainer import support
from trainer import parallel, sft
from trainer.freeze import freeze
from trainer.losses.dis import log_band
from trainer.losses.types import PolicyLossInput, PolicyLossOutput, log_ratio
from trainer.model import Critic, Policy, random_policy
from trainer.objective import Objective
from trainer.optimizer import Optimizer
from trainer.step import Learners, StepOptions, train_step
from trainer.weights import export, load_tensors

pytestmark = pytest.mark.usefixtures("rank")

# --- the task --------------------------------------------------------------------------------------------------------

BOS, EOS = 0, 1
STYLES = range(2, 6)
WORDS = {style: range(6 + 8 * i, 14 + 8 * i) for i, style in enumerate(STYLES)}
NEUTRAL, TOPICS = range(38, 54), range(54, 62)
CANDIDATES, PREFERRED = (2, 3, 4), 3
LONGEST = 12
"""Action tokens."""

PROMPTS = [[BOS, *order, topic] for order in permutations(CANDIDATES) for topic in TOPICS]
HELD_OUT = PROMPTS[::5]
TRAIN = [prompt for prompt in PROMPTS if prompt not in HELD_OUT]


def style(text: Sequence[int]) -> bool:
    """Named first, and at least three style words, 60% of them its own."""
    found = [token for token in text if any(token in words for words in WORDS.values())]
    return text[0] == PREFERRED and len(found) >= 3 and sum(token in WORDS[PREFERRED] for token in found) >= 0.6 * len(found)


def quality(text: Sequence[int], topic: int) -> bool:
    return text[-1] == EOS and topic in text and max(Counter(text).values()) <= 4


def demonstration(rng: random.Random, number: int) -> Trajectory:
    """A text in any of the candidate styles; one in five forgets its topic."""
    prompt = rng.choice(TRAIN)
    chosen = rng.choice(CANDIDATES)
    words = [rng.choice(WORDS[chosen if rng.random() < 0.9 else rng.choice(STYLES)]) for _ in range(rng.randint(2, 6))]
    words += rng.choices(NEUTRAL, k=rng.randint(1, 3))
    rng.shuffle(words)
    builder = TrajectoryBuilder()
    builder.observe(prompt)
    text = [chosen, *prompt[-1:] * (rng.random() < 0.8), *words, EOS]
    builder.act(text, [0.0] * len(text), [0] * len(text))
    return builder.build(f"demonstration-{number}", str(prompt), reward=1.0)


# --- policy and rollouts ---------------------------------------------------------------------------------------------


@cache
def warm(seed: int) -> dict[str, torch.Tensor]:
    """The supervised start, by the stage's own code."""
    policy, rng = fresh(seed), random.Random(f"{seed}/demonstrations")
    optimizer = support.optimizer(lr=1e-2, clip=1.0, weight_decay=0.0, warmup_steps=10)
    settings = SftConfig(batch=32, epochs=1, decay=0.3).model_dump() | {"optimizer": optimizer}
    texts = [demonstration(rng, i) for i in range(6400)]
    sft.train(policy, texts, settings, Path(), budget=2**20, seed=seed)
    return policy.state_dict()


def fresh(seed: int) -> Policy:
    return random_policy(support.fields("qwen3", num_hidden_layers=1, initializer_range=0.1), seed)


@torch.no_grad()
def play(policy: Policy, prompts: Sequence[list[int]], version: int, rng: torch.Generator) -> list[Trajectory]:
    """One text per prompt at temperature 1, with the log-probs that it was sampled from."""
    rows, n = torch.tensor(prompts), len(prompts[0])
    logprobs = torch.empty(len(rows), 0)
    while rows.shape[1] < n + LONGEST and not (rows == EOS).any(1).all():
        logits = policy.model(input_ids=rows, use_cache=False, cu_seqlens=[0, rows.shape[1]], logits_to_keep=1).logits
        logp = torch.log_softmax(logits[:, -1], -1)
        sampled = torch.multinomial(logp.exp(), 1, generator=rng)
        rows, logprobs = torch.cat([rows, sampled], 1), torch.cat([logprobs, logp.gather(1, sampled)], 1)
    made = []
    for i, (row, old) in enumerate(zip(rows[:, n:].tolist(), logprobs.tolist(), strict=True)):
        stop = row.index(EOS) + 1 if EOS in row else len(row)
        text, prompt = row[:stop], prompts[i]
        builder = TrajectoryBuilder()
        builder.observe(prompt)
        builder.act(text, old[:stop], [version] * stop)
        reward = float(style(text) and quality(text, prompt[-1]))
        made.append(builder.build(f"{version}-{i}", str(prompt), reward=reward, info={"termination": "finished"}))
    return made


# --- training --------------------------------------------------------------------------------------------------------

BATCH, CRITIC_ONLY, STEPS = 48, 5, 50
BAND = {"eps_low": 0.3, "eps_high": 5.0}
SAO = {"advantage": {"id": "skip_observation", "alpha": 1.5}, "advantage_values": "pre", **BAND}
"""Of the paper, but for the values before the updates: with so few prompts those after them have seen the answer."""


def learners(seed: int) -> Learners:
    """As `Worker.init` builds them, from the warm start; the critic has no pre-training but the first batches."""
    policy, critic = fresh(seed), Critic(fresh(seed).model.model, bias=0.2)
    policy.load_state_dict(warm(seed))
    critic.model.load_state_dict(policy.model.model.state_dict())
    freeze(critic, "mlp_only")
    parallel.shard(policy, torch.float32)
    parallel.shard(critic, torch.float32)
    slow, fast = (support.optimizer(lr=lr, clip=1.0, weight_decay=0.0) for lr in (3e-3, 1e-2))
    return Learners(policy, Optimizer(policy, slow), critic, Optimizer(critic, fast, 20.0))


def train(seed: int, algorithm: Objective, steps: int = STEPS) -> list[float]:
    """Mean reward of every batch, and last the success on held-out prompts."""
    made, engine, version, curve = learners(seed), fresh(seed), 0, []
    rng, order = torch.Generator().manual_seed(seed), random.Random(f"{seed}/prompts")
    for number in range(1, CRITIC_ONLY + steps + 1):
        load_tensors(engine.model, dict(export(made.policy.model)))
        batch = play(engine, [order.choice(TRAIN) for _ in range(BATCH)], version, rng)
        curve.append(success(batch))
        options = StepOptions(number, version, 2, number > CRITIC_ONLY, 2**20, LONGEST, seed)
        result = train_step(made, batch, algorithm, options)
        assert result["metrics"]["staleness/max"] == result["metrics"]["dis/mask_frac"] == 0.0
        assert result["stepped"] == options.update_policy
        version += result["stepped"]
    load_tensors(engine.model, dict(export(made.policy.model)))
    return [*curve, success(play(engine, HELD_OUT * 40, version, rng))]


def success(texts: Sequence[Trajectory]) -> float:
    return sum(t.reward or 0.0 for t in texts) / len(texts)


def attached(inputs: PolicyLossInput) -> PolicyLossOutput:
    """DIS whose importance weight is differentiated: right in value, wrong in gradient."""
    delta, valid = log_ratio(inputs, "rollout")
    low, high = log_band(**BAND)
    keep = valid & (delta.detach() > low) & (delta.detach() < high)
    weight = torch.where(keep, torch.where(keep, delta, 0.0).exp(), 0.0)
    return PolicyLossOutput(-weight * inputs.advantages * inputs.logprobs, keep, weight.detach())


# --- tests -----------------------------------------------------------------------------------------------------------


def test_the_rewards_by_hand() -> None:
    words, other, topic = list(WORDS[PREFERRED]), WORDS[CANDIDATES[0]][0], TOPICS[0]
    for text, styled, good in (
        ([PREFERRED, topic, *words[:3], EOS], True, True),
        ([CANDIDATES[0], topic, *words[:3], EOS], False, True),
        ([PREFERRED, topic, *words[:2], EOS], False, True),
        ([PREFERRED, topic, *words[:3], other, other, EOS], True, True),
        ([PREFERRED, topic, *words[:2], other, other, EOS], False, True),
        ([PREFERRED, TOPICS[1], *words[:3], EOS], True, False),
        ([PREFERRED, topic, *words[:3]], True, False),
        ([PREFERRED, topic, *words[:1] * 4, EOS], True, True),
        ([PREFERRED, topic, *words[:1] * 5, EOS], True, False),
    ):
        assert (style(text), quality(text, topic)) == (styled, good), text


@pytest.mark.parametrize("seed", range(3))
def test_the_warm_start_is_what_the_task_wants(seed: int) -> None:
    policy = fresh(seed)
    policy.load_state_dict(warm(seed))
    texts = [t.tokens.tolist() for t in play(policy, HELD_OUT * 100, 0, torch.Generator().manual_seed(seed))]
    n = len(HELD_OUT[0])
    for candidate in CANDIDATES:
        assert 0.2 < sum(t[n] == candidate for t in texts) / len(texts) < 0.47
    assert 0.65 < sum(quality(t[n:], t[n - 1]) for t in texts) / len(texts) < 0.9


@pytest.mark.parametrize("seed", range(5))
def test_sao_learns(seed: int) -> None:
    """The optimum is 1. Over 20 seeds: .945 to .980, mean .965; held-out success is measured to +-.01."""
    curve = train(seed, support.algorithm(**SAO))
    assert sum(curve[:CRITIC_ONLY]) / CRITIC_ONLY < 0.35
    assert curve[-1] > 0.9


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bug", ["flip_sign", "attached"])
def test_it_does_not_with_a_bug(bug: str, seed: int) -> None:
    """Neither ends above where it started."""
    right = support.algorithm(**SAO)
    algorithm = replace(right, loss=attached) if bug == "attached" else support.algorithm(control="flip_sign", **SAO)
    curve = train(seed, algorithm)
    assert curve[-1] < sum(curve[:CRITIC_ONLY]) / CRITIC_ONLY


def test_a_seed_is_a_run() -> None:
    assert train(0, support.algorithm(**SAO), steps=3) == train(0, support.algorithm(**SAO), steps=3)
