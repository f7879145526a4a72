"""Every advantage estimator against a naive loop, and against its defining properties."""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.advantages.batch_norm import batch_normalised
from trainer.advantages.gae import SKIP_OBSERVATION, skip_observation_gae, value_targets
from trainer.advantages.group import group_centred, group_normalised, leave_one_out
from trainer.advantages.reinforce import group_baseline, no_baseline, return_to_go
from trainer.advantages.running_mean import running_mean, running_mean_global, running_mean_prompt
from trainer.advantages.spo import spo
from trainer.advantages.step import STEP_AVERAGE, STEP_LAST
from trainer.advantages.through import THROUGH_OBSERVATIONS
from trainer.advantages.types import AdvantageInput, Outcomes, State
from trainer.advantages.whiten import whiten

CRITICS = {
    "skip": SKIP_OBSERVATION,
    "through": THROUGH_OBSERVATIONS,
    "step_average": STEP_AVERAGE,
    "step_last": STEP_LAST,
}
each_critic = pytest.mark.parametrize("name", CRITICS)

ROWS = st.lists(st.lists(st.integers(-3, 4), max_size=8), min_size=1, max_size=6)
"""Trajectories as runs of tokens: k > 0 is a turn of k action tokens, k < 0 an observation of -k; turns may touch."""
SEEDS = st.integers(0, 2**31)


def make(rows: list[list[int]], seed: int) -> tuple[AdvantageInput, Tensor]:
    """A random pack of the given shape, and a lambda for each trajectory."""
    rng = torch.Generator().manual_seed(seed)
    turns: list[int] = []
    edges = [0]
    for row in rows:
        turn = 0
        for run in row:
            turns += [turn if run > 0 else -1] * abs(run)
            turn += run > 0
        edges.append(len(turns))
    turn_ids = torch.tensor(turns, dtype=torch.int32)
    mask = turn_ids >= 0
    values = torch.randn(len(mask), generator=rng)
    rewards = torch.where(mask & (torch.rand(len(mask), generator=rng) < 0.3), values.flip(0), 0.0)
    bootstrap = torch.randn(len(rows), generator=rng)
    gamma = 1.0 if seed % 2 else 0.9
    return (
        AdvantageInput(values, rewards, mask, turn_ids, torch.tensor(edges), bootstrap, gamma),
        torch.rand(len(rows), generator=rng, dtype=torch.float64),
    )


def changed(i: AdvantageInput, **new: Any) -> AdvantageInput:
    old = {name: getattr(i, name) for name in AdvantageInput.__dataclass_fields__}
    return AdvantageInput(**(old | new))


def naive_steps(name: str, i: AdvantageInput, b: int) -> list[list[int]]:
    """The tokens of each step of trajectory b."""
    tokens = range(int(i.cu_seqlens[b]), int(i.cu_seqlens[b + 1]))
    actions = [t for t in tokens if i.mask[t]]
    if name == "skip":
        return [[t] for t in actions]
    if name == "through":
        return [[t] for t in range(actions[0], actions[-1] + 1)] if actions else []
    return [list(turn) for _, turn in groupby(actions, key=lambda t: int(i.turn_ids[t]))]


def naive(name: str, i: AdvantageInput, lam: list[float]) -> tuple[list[float], list[float], list[int], list[bool]]:
    """A, G, length and supervised, one Python float at a time."""
    advantages, returns, lengths = [0.0] * len(i.mask), [0.0] * len(i.mask), []
    supervised = [False] * len(i.mask)
    for b in range(len(i.bootstrap)):
        steps = naive_steps(name, i, b)
        lengths.append(len(steps))
        next_value, advantage = i.bootstrap[b].item(), 0.0
        for step in reversed(steps):
            values = [i.values[t].item() for t in step]
            value = statistics.fmean(values) if name == "step_average" else values[-1]
            delta = sum(i.rewards[t].item() for t in step) + i.gamma * next_value - value
            advantage, next_value = delta + i.gamma * lam[b] * advantage, value
            for t in step:
                if i.mask[t]:
                    advantages[t], returns[t] = advantage, advantage + value
                    supervised[t] = name != "step_last" or t == step[-1]
    return advantages, returns, lengths, supervised


def close(actual: Tensor, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=1e-6)


@each_critic
@settings(max_examples=150, deadline=None)
@given(ROWS, SEEDS)
def test_critic_kinds_equal_the_naive_loop(name: str, rows: list[list[int]], seed: int) -> None:
    inputs, lam = make(rows, seed)
    before = copy.deepcopy(inputs)
    estimate = CRITICS[name].estimate(inputs, lam)
    advantages, returns, lengths, supervised = naive(name, inputs, lam.tolist())
    assert estimate.advantages.dtype == estimate.returns.dtype == torch.float32
    close(estimate.advantages, advantages)
    close(estimate.returns, returns)
    length = CRITICS[name].length(inputs)
    assert length.dtype == torch.int64
    assert length.tolist() == lengths
    assert CRITICS[name].supervised(inputs).tolist() == supervised
    assert all(torch.equal(getattr(inputs, f), getattr(before, f)) for f in ("values", "rewards", "mask", "turn_ids"))


@each_critic
@settings(max_examples=100, deadline=None)
@given(ROWS, SEEDS, st.sampled_from([math.nan, math.inf, 1e9, -1e9]))
def test_values_that_are_no_steps_are_never_read(name: str, rows: list[list[int]], seed: int, poison: float) -> None:
    """Observations; for `through` only those outside of the first to the last action."""
    inputs, lam = make(rows, seed)
    steps = {t for b in range(len(rows)) for step in naive_steps(name, inputs, b) for t in step}
    read = torch.tensor([t in steps for t in range(len(inputs.mask))], dtype=torch.bool)
    clean = CRITICS[name].estimate(inputs, lam)
    dirty = CRITICS[name].estimate(changed(inputs, values=torch.where(read, inputs.values, poison)), lam)
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)


def test_through_reads_the_observations_between() -> None:
    inputs, _ = make([[-1, 2, -2, 1]], 1)
    moved = changed(inputs, values=inputs.values + ~inputs.mask)
    a, b = (THROUGH_OBSERVATIONS.estimate(x, 0.9).advantages for x in (inputs, moved))
    assert (a[1:3] - b[1:3]).abs().min() > 1e-3
    assert torch.equal(a[5:], b[5:])


@settings(max_examples=100, deadline=None)
@given(ROWS, SEEDS)
def test_with_lambda_1_skip_and_through_agree_on_actions(rows: list[list[int]], seed: int) -> None:
    inputs = changed(make(rows, seed)[0], gamma=1.0)
    skip, through = (e.estimate(inputs, 1.0) for e in (SKIP_OBSERVATION, THROUGH_OBSERVATIONS))
    torch.testing.assert_close(skip.advantages, through.advantages, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(skip.returns, through.returns, atol=2e-6, rtol=1e-6)


@each_critic
def test_with_lambda_1_the_target_is_the_reward_for_any_values(name: str) -> None:
    """Also per step: the step return, R here, on every token."""
    inputs, _ = make([[-2, 3, -1, 2, -2], [-1, 1], [-3]], 5)
    rewards = torch.zeros_like(inputs.rewards)
    rewards[inputs.mask.nonzero()[[4, 5]]] = torch.tensor([[1.0], [0.25]])
    targets = CRITICS[name].estimate(changed(inputs, rewards=rewards, gamma=1.0, bootstrap=torch.zeros(3)), 1.0).returns
    close(targets, [0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0.25, 0, 0, 0])


def test_skip_observation_equals_the_public_functions() -> None:
    inputs, lam = make([[-2, 3, -1, 2], [], [-1, 4, -2, 1, -1]], 8)
    estimate = SKIP_OBSERVATION.estimate(inputs, lam)
    packed = inputs.values, inputs.rewards, inputs.mask, inputs.cu_seqlens
    keywords: dict[str, Any] = {"gamma": inputs.gamma, "lam": lam, "bootstrap": inputs.bootstrap}
    assert torch.equal(estimate.advantages, skip_observation_gae(*packed, **keywords))
    assert torch.equal(estimate.returns, value_targets(*packed, **keywords))


@each_critic
def test_one_action_token(name: str) -> None:
    """A = r + gamma * bootstrap - V, whatever lambda is."""
    inputs, _ = make([[-3, 1, -2]], 2)
    inputs = changed(inputs, rewards=torch.tensor([0.0, 0, 0, 1, 0, 0]), bootstrap=torch.tensor([0.5]))
    estimate = CRITICS[name].estimate(inputs, 0.3)
    assert estimate.advantages.nonzero().tolist() == [[3]]
    close(estimate.advantages[3], 1 + 0.9 * 0.5 - inputs.values[3].item())
    close(estimate.returns[3], 1 + 0.9 * 0.5)
    assert CRITICS[name].length(inputs).tolist() == [1]


@each_critic
@pytest.mark.parametrize("rows", [[[]], [[-2]], [[], [-3], []]])
def test_nothing_to_do(name: str, rows: list[list[int]]) -> None:
    inputs, lam = make(rows, 3)
    estimate = CRITICS[name].estimate(inputs, lam)
    assert estimate.advantages.shape == estimate.returns.shape == inputs.mask.shape
    assert not estimate.advantages.any() and not estimate.returns.any()
    assert CRITICS[name].length(inputs).tolist() == [0] * len(rows)
    assert not CRITICS[name].supervised(inputs).any()


@each_critic
def test_a_reward_on_an_observation_is_refused(name: str) -> None:
    inputs, lam = make([[-1, 1, -1, 1]], 3)
    for reward in (1.0, math.nan):
        with pytest.raises(ValueError, match="observation token"):
            CRITICS[name].estimate(changed(inputs, rewards=torch.tensor([0.0, 0.0, reward, 0.0])), lam)


@each_critic
def test_estimates_carry_no_gradient(name: str) -> None:
    inputs, lam = make([[-1, 2, -1, 1]], 4)
    estimate = CRITICS[name].estimate(changed(inputs, values=inputs.values.requires_grad_()), lam)
    assert not estimate.advantages.requires_grad and not estimate.returns.requires_grad


# Outcomes.

FLAGS = [1.0, 0.0, 0.25]
EPISODES = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(FLAGS)), max_size=24)


def batch(episodes: list[tuple[str, float]], drift: float = 0.0) -> Outcomes:
    return Outcomes(torch.tensor([r for _, r in episodes], dtype=torch.float64), tuple(p for p, _ in episodes), drift)


def naive_group(name: str, rewards: list[float], i: int) -> float:
    centred = rewards[i] - statistics.fmean(rewards)
    others = rewards[:i] + rewards[i + 1 :]
    return {
        "population": lambda: centred / (statistics.pstdev(rewards) + 1e-6),
        "sample": lambda: centred / ((statistics.stdev(rewards) if others else 0.0) + 1e-6),
        "leave_one_out": lambda: rewards[i] - statistics.fmean(others),
        "centred": lambda: centred,
        "batch": lambda: centred / (statistics.pstdev(rewards) + 1e-8),
        "baseline": lambda: statistics.fmean(rewards),
    }[name]()


GROUPED: dict[str, Callable[[Outcomes, State], tuple[Tensor, State]]] = {
    "population": group_normalised,
    "sample": partial(group_normalised, std="sample"),
    "leave_one_out": leave_one_out,
    "centred": group_centred,
    "batch": batch_normalised,
    "baseline": group_baseline,
}


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=100, deadline=None)
@given(EPISODES)
def test_groups_equal_the_naive_loop(name: str, episodes: list[tuple[str, float]]) -> None:
    if name == "leave_one_out":  # everybody twice: no group of one
        episodes = [*episodes, *((p, 1 - r) for p, r in episodes)]
    expected = []
    for i, (prompt, _) in enumerate(episodes):
        members = [j for j, (p, _) in enumerate(episodes) if p == prompt or name == "batch"]
        expected.append(naive_group(name, [episodes[j][1] for j in members], members.index(i)))
    actual, state = GROUPED[name](batch(episodes), {})
    assert actual.dtype == torch.float64
    assert state == {}
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["population", "sample", "leave_one_out", "centred", "batch"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e6 / 7])
def test_equal_rewards_give_exactly_0(name: str, reward: float) -> None:
    for n in (2, 3, 7, 10):
        actual, _ = GROUPED[name](batch([("a", reward)] * n), {})
        assert actual.tolist() == [0.0] * n


def test_a_group_of_one() -> None:
    one = batch([("a", 1.0), ("a", 0.0), ("b", 1.0)])
    for name in ("population", "sample", "centred"):
        assert GROUPED[name](one, {})[0][2].item() == 0.0
    with pytest.raises(ValueError, match="at least two episodes"):
        leave_one_out(one, {})


def test_running_mean_first_visits_use_the_average_of_all_rewards_so_far() -> None:
    """By hand: the average goes .5, .525, .54875, .5713125, .542746875."""
    actual, state = running_mean_prompt(batch([("a", 1.0), ("b", 1.0), ("a", 1.0), ("a", 0.0), ("c", 1.0)]), {})
    close(actual, [0.5, 0.475, 0.0, -1.0, 0.457253125], 1e-12)
    assert state["recent"] == {"a": [1.0, 1.0, 0.0], "b": [1.0], "c": [1.0]}


def naive_running_mean(episodes: list[tuple[str, float]], window: int, per_prompt: bool, inclusive: bool) -> list[float]:
    out, average = [], 0.3
    for i, (prompt, reward) in enumerate(episodes):
        seen = [r for p, r in episodes[: i + inclusive] if p == prompt or not per_prompt][-window:]
        out.append(reward - (statistics.fmean(seen) if seen else average))
        average = 0.95 * average + 0.05 * reward
    return out


@pytest.mark.parametrize("per_prompt", [True, False])
@pytest.mark.parametrize("inclusive", [True, False])
@settings(max_examples=60, deadline=None)
@given(EPISODES, st.integers(1, 5))
def test_running_mean_equals_the_naive_loop(
    per_prompt: bool, inclusive: bool, episodes: list[tuple[str, float]], window: int
) -> None:
    keywords: dict[str, Any] = {"window": window, "per_prompt": per_prompt, "inclusive": inclusive}
    actual, _ = running_mean(batch(episodes), {}, initial=0.3, **keywords)
    close(actual, naive_running_mean(episodes, **keywords), 1e-12)
    if (per_prompt, inclusive) == (True, False):
        assert torch.equal(actual, running_mean_prompt(batch(episodes), {}, window=window, initial=0.3)[0])
    elif (per_prompt, inclusive) == (False, True):
        assert torch.equal(actual, running_mean_global(batch(episodes), {}, window=window)[0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(EPISODES, st.floats(-0.01, 0.1)), max_size=6))
def test_spo_equals_the_naive_loop(batches: list[tuple[list[tuple[str, float]], float]]) -> None:
    alpha, beta, last = dict.fromkeys("abcd", 4.0), dict.fromkeys("abcd", 4.0), dict[str, float]()
    state: State = {}
    drift = 0.0
    for episodes, moved in batches:
        drift += moved
        actual, state = spo(batch(episodes, drift), state)
        for got, (p, r) in zip(actual.tolist(), episodes, strict=True):
            assert got == pytest.approx(r - alpha[p] / (alpha[p] + beta[p]), abs=1e-12)
            rho = min(0.96, max(0.875, math.exp(-math.log(2) * (drift - last.get(p, drift)) / 0.06)))
            alpha[p], beta[p], last[p] = rho * alpha[p] + r, rho * beta[p] + 1 - r, drift


@pytest.mark.parametrize("reward", [-0.01, 1.01, math.nan, math.inf])
def test_spo_refuses_what_is_no_success_rate(reward: float) -> None:
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\]"):
        spo(batch([("a", 1.0), ("b", reward)]), {})


def test_spo_starts_where_it_is_told() -> None:
    """v0 with 1 / (1 - rho_min) pseudo-counts: 2 of them here, .8 and 1.2, so rho = 1 gives 1.8 / 3 next."""
    actual, state = spo(batch([("a", 1.0), ("a", 1.0)]), {}, rho_min=0.5, rho_max=1.0, v0=0.4)
    close(actual, [0.6, 0.4], 1e-12)
    assert state["a"] == pytest.approx([2.8, 1.2, 0.0])


REMEMBERING: dict[str, Callable[[Outcomes, State], tuple[Tensor, State]]] = {
    "running_mean_prompt": partial(running_mean_prompt, window=3),
    "running_mean_global": partial(running_mean_global, window=5),
    "spo": spo,
}


@pytest.mark.parametrize("name", REMEMBERING)
@settings(max_examples=60, deadline=None)
@given(EPISODES, EPISODES)
def test_a_saved_state_goes_on_and_the_given_one_stays(
    name: str, first: list[tuple[str, float]], second: list[tuple[str, float]]
) -> None:
    """Two batches with a checkpoint between are one batch in the same order."""
    f = REMEMBERING[name]
    whole, end = f(batch(first + second), {})
    a, state = f(batch(first), {})
    saved = json.dumps(state, allow_nan=False)
    b, resumed = f(batch(second), json.loads(saved))
    assert torch.equal(torch.cat([a, b]), whole)
    assert json.loads(json.dumps(resumed)) == json.loads(json.dumps(end))
    f(batch(second), state)
    assert json.dumps(state) == saved


@pytest.mark.parametrize("name", REMEMBERING)
def test_order_counts(name: str) -> None:
    f = REMEMBERING[name]
    episodes = [("a", 1.0), ("b", 0.0), ("a", 0.0), ("b", 1.0), ("b", 1.0)]
    forward, backward = f(batch(episodes), {})[0], f(batch(episodes[::-1]), {})[0]
    assert (forward - backward.flip(0)).abs().max() > 0.01


@pytest.mark.parametrize("name", [*GROUPED, *REMEMBERING])
def test_no_episodes(name: str) -> None:
    actual, _ = (GROUPED | REMEMBERING)[name](batch([]), {})
    assert actual.shape == (0,) and actual.dtype == torch.float64


# Returns and whitening.


@settings(max_examples=100, deadline=None)
@given(ROWS, SEEDS)
def test_return_to_go_equals_the_naive_loop(rows: list[list[int]], seed: int) -> None:
    i, _ = make(rows, seed)
    expected = [0.0] * len(i.mask)
    for start, stop in pairwise(i.cu_seqlens.tolist()):
        to_come = 0.0
        for t in reversed(range(start, stop)):
            if i.mask[t]:
                expected[t] = to_come = i.rewards[t].item() + i.gamma * to_come
    actual = return_to_go(i.rewards, i.mask, i.cu_seqlens, gamma=i.gamma)
    assert actual.dtype == torch.float32
    close(actual, expected)


def test_baselines_of_reinforce() -> None:
    episodes = batch([("a", 1.0), ("b", 0.25), ("a", 0.0)])
    assert no_baseline(episodes, {})[0].tolist() == [0.0, 0.0, 0.0]
    assert group_baseline(episodes, {})[0].tolist() == [0.5, 0.25, 0.5]


def test_whitening_without_centring_only_divides() -> None:
    rng = torch.Generator().manual_seed(2)
    mask = torch.rand(1000, generator=rng) < 0.3
    advantages = torch.where(mask, torch.randn(1000, generator=rng) * 3 + 2, math.nan)
    scaled = whiten(advantages, mask, centre=False)
    close(scaled[mask], advantages[mask].double() / advantages[mask].double().std())
    assert scaled[~mask].count_nonzero() == 0


@pytest.mark.parametrize("centre", [True, False])
def test_whitening_is_exact_far_from_zero(centre: bool) -> None:
    """E[x^2] - E[x]^2 would lose all digits of this variance."""
    advantages = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64) * 1e-3 + 1e7
    expected = (advantages - centre * 1e7 - centre * 3e-3) / math.sqrt(1e-6 + 1e-8)
    torch.testing.assert_close(
        whiten(advantages, torch.ones(3, dtype=torch.bool), centre=centre), expected.float(), rtol=1e-5, atol=1e-4
    )


def test_whitening_without_centring_leaves_a_constant_alone() -> None:
    constant = torch.full((5,), 0.3)
    assert torch.equal(whiten(constant, torch.ones(5, dtype=torch.bool), centre=False), constant)
