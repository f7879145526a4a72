"""Skip-observation GAE against a float64 loop and against its defining properties."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.advantages.gae import length_adaptive_lambda, skip_observation_gae, value_targets
from trainer.advantages.whiten import whiten

Row = list[bool]
ROWS = st.lists(st.lists(st.booleans(), max_size=24), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31)


class Case:
    """Random packed inputs for the given masks; a single action token, rows without one and empty rows all occur."""

    def __init__(self, rows: list[Row], seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.rng = rng
        self.mask = torch.tensor([m for row in rows for m in row], dtype=torch.bool)
        self.cu = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        self.values = torch.randn(len(self.mask), generator=rng)
        self.rewards = torch.where(self.mask & (torch.rand(len(self.mask), generator=rng) < 0.3), self.values.flip(0), 0.0)
        self.gamma = 1.0 if seed % 2 else float(torch.rand(1, generator=rng))
        self.lam = torch.rand(len(rows), generator=rng, dtype=torch.float64)
        self.lam[torch.rand(len(rows), generator=rng) < 0.2] = 1.0
        self.lam[torch.rand(len(rows), generator=rng) < 0.2] = 0.0
        self.bootstrap = torch.randn(len(rows), generator=rng)

    def gae(self, **changed: Tensor) -> Tensor:
        a = {"values": self.values, "rewards": self.rewards, "mask": self.mask, "cu_seqlens": self.cu} | changed
        return skip_observation_gae(
            a["values"],
            a["rewards"],
            a["mask"],
            a["cu_seqlens"],
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=self.bootstrap,
        )


def naive(values: Tensor, rewards: Tensor, mask: Tensor, cu: Tensor, gamma: float, lam: Tensor, bootstrap: Tensor) -> Tensor:
    """The definition, one Python float at a time; [N] fp64."""
    out = [0.0] * len(mask)
    for b in range(len(cu) - 1):
        next_value, next_advantage = bootstrap[b].item(), 0.0
        for t in reversed(range(int(cu[b]), int(cu[b + 1]))):
            if mask[t]:
                delta = rewards[t].item() + gamma * next_value - values[t].item()
                next_advantage = out[t] = delta + gamma * lam[b].item() * next_advantage
                next_value = values[t].item()
    return torch.tensor(out, dtype=torch.float64)


@settings(max_examples=1000, deadline=None)
@given(ROWS, SEEDS)
def test_equals_the_naive_loop(rows: list[Row], seed: int) -> None:
    case = Case(rows, seed)
    expected = naive(case.values, case.rewards, case.mask, case.cu, case.gamma, case.lam, case.bootstrap)
    actual = case.gae()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)
    targets = value_targets(
        case.values, case.rewards, case.mask, case.cu, gamma=case.gamma, lam=case.lam, bootstrap=case.bootstrap
    )
    expected_targets = torch.where(case.mask, expected + case.values.double(), 0.0)
    torch.testing.assert_close(targets.double(), expected_targets, atol=1e-6, rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(ROWS, SEEDS)
def test_equals_the_carry_loop_of_padded_frameworks(rows: list[Row], seed: int) -> None:
    """A loop over padded positions that keeps (next value, last advantage) over observations; no bootstrap there."""
    case = Case(rows, seed)
    case.bootstrap = torch.zeros(len(rows))
    longest = max(len(row) for row in rows)
    padded = torch.zeros(3, len(rows), longest, dtype=torch.float64)
    for b, (start, stop) in enumerate(pairwise(case.cu)):
        for i, x in enumerate((case.values, case.rewards, case.mask)):
            padded[i, b, : stop - start] = x[start:stop]
    values, rewards, mask = padded
    next_value = last = torch.zeros(len(rows), dtype=torch.float64)
    loop = torch.zeros(len(rows), longest, dtype=torch.float64)
    for t in reversed(range(longest)):
        m = mask[:, t]
        now = rewards[:, t] + case.gamma * next_value - values[:, t] + case.gamma * case.lam * last
        next_value, last = m * values[:, t] + (1 - m) * next_value, m * now + (1 - m) * last
        loop[:, t] = m * last
    expected = torch.cat([loop[b, : len(row)] for b, row in enumerate(rows)])
    torch.testing.assert_close(case.gae().double(), expected, atol=1e-6, rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(ROWS, SEEDS, st.sampled_from([9.9e9, -9.9e9, math.nan, math.inf]))
def test_observation_values_are_never_read(rows: list[Row], seed: int, poison: float) -> None:
    case = Case(rows, seed)
    poisoned = torch.where(case.mask, case.values, poison)
    assert torch.equal(case.gae(), case.gae(values=poisoned))


@settings(max_examples=200, deadline=None)
@given(ROWS, SEEDS, st.integers(0, 40))
def test_inserting_observations_changes_nothing(rows: list[Row], seed: int, n: int) -> None:
    case = Case(rows, seed)
    # Each inserted token goes before a random token, or to the end of the pack.
    before = torch.randint(0, len(case.mask) + 1, (n,), generator=case.rng).sort().values
    old = torch.arange(len(case.mask)) + torch.searchsorted(before, torch.arange(len(case.mask)), right=True)
    mask = torch.zeros(len(case.mask) + n, dtype=torch.bool)
    values, rewards = torch.full((len(mask),), 7.7), torch.zeros(len(mask))
    mask[old], values[old], rewards[old] = case.mask, case.values, case.rewards
    cu = case.cu + torch.searchsorted(before, case.cu, right=False)
    cu[-1] = len(mask)
    longer = case.gae(values=values, rewards=rewards, mask=mask, cu_seqlens=cu)
    assert torch.equal(longer[old], case.gae())
    assert longer.count_nonzero() == longer[old].count_nonzero()


@settings(max_examples=200, deadline=None)
@given(ROWS, SEEDS)
def test_packing_and_order_change_nothing(rows: list[Row], seed: int) -> None:
    case = Case(rows, seed)
    packed = case.gae()
    for b, (start, stop) in enumerate(pairwise(case.cu)):
        part = slice(int(start), int(stop))
        alone = skip_observation_gae(
            case.values[part],
            case.rewards[part],
            case.mask[part],
            torch.tensor([0, stop - start]),
            gamma=case.gamma,
            lam=float(case.lam[b]),
            bootstrap=case.bootstrap[b : b + 1],
        )
        torch.testing.assert_close(packed[part], alone, atol=1e-6, rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(ROWS, SEEDS)
def test_lambda_1_telescopes(rows: list[Row], seed: int) -> None:
    """gamma = lambda = 1: the target is the sum of the rewards to come plus the bootstrap, for any values at all."""
    case = Case(rows, seed)
    expected = torch.zeros(len(case.mask), dtype=torch.float64)
    for b, (start, stop) in enumerate(pairwise(case.cu)):
        to_come = case.rewards[start:stop].double().flip(0).cumsum(0).flip(0) + case.bootstrap[b]
        expected[start:stop] = torch.where(case.mask[start:stop], to_come, 0.0)
    for values in (case.values, torch.zeros_like(case.values)):
        arguments = values, case.rewards, case.mask, case.cu
        targets = value_targets(*arguments, gamma=1.0, lam=1.0, bootstrap=case.bootstrap)
        torch.testing.assert_close(targets.double(), expected, atol=1e-6, rtol=1e-6)
        advantages = skip_observation_gae(*arguments, gamma=1.0, lam=1.0, bootstrap=case.bootstrap)
        residual = torch.where(case.mask, expected - values, 0.0)
        torch.testing.assert_close(advantages.double(), residual, atol=1e-6, rtol=1e-6)


def test_terminal_reward_is_the_exact_target_of_every_action() -> None:
    mask = torch.rand(10_001, generator=torch.Generator().manual_seed(0)) < 0.4
    rewards = torch.zeros(10_001)
    rewards[mask.nonzero()[-1]] = 1.0
    targets = value_targets(torch.randn(10_001), rewards, mask, torch.tensor([0, 10_001]), gamma=1.0, lam=1.0)
    torch.testing.assert_close(targets, mask.float(), atol=1e-6, rtol=0)


def test_an_observation_costs_one_lambda_whatever_its_length() -> None:
    for n in (0, 1, 10_000):
        mask = torch.tensor([True] + [False] * n + [True])
        rewards = torch.zeros(n + 2)
        rewards[-1] = 1.0
        advantages = skip_observation_gae(torch.zeros(n + 2), rewards, mask, torch.tensor([0, n + 2]), gamma=1.0, lam=0.9)
        assert advantages[0].item() == pytest.approx(0.9)


def test_a_reward_on_an_observation_is_refused() -> None:
    mask = torch.tensor([True, False])
    for reward in (1.0, math.nan):
        with pytest.raises(ValueError, match="observation token"):
            skip_observation_gae(torch.zeros(2), torch.tensor([0.0, reward]), mask, torch.tensor([0, 2]), gamma=1.0, lam=0.9)


def test_one_long_row_among_many_short_ones() -> None:
    lengths = torch.tensor([1] * 300 + [131_072] + [3] * 300)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rng = torch.Generator().manual_seed(1)
    mask = torch.rand(int(cu[-1]), generator=rng) < 0.25
    values = torch.rand(len(mask), generator=rng)
    rewards = torch.where(mask, torch.rand(len(mask), generator=rng), 0.0) * 1e-3
    counts = torch.tensor([int(mask[a:b].sum()) for a, b in pairwise(cu)])
    lam = length_adaptive_lambda(counts, 1.5)
    assert lam.dtype == torch.float64
    assert lam[300] > 0.9999
    actual = skip_observation_gae(values, rewards, mask, cu, gamma=1.0, lam=lam)
    expected = naive(values, rewards, mask, cu, 1.0, lam, torch.zeros(len(lengths)))
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)


def test_advantages_and_targets_carry_no_gradient() -> None:
    values = torch.zeros(2, requires_grad=True)
    arguments = values, torch.tensor([0.0, 1.0]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    assert not skip_observation_gae(*arguments, gamma=1.0, lam=0.9).requires_grad
    assert not value_targets(*arguments, gamma=1.0, lam=1.0).requires_grad


def test_whitening_reads_action_tokens_only() -> None:
    rng = torch.Generator().manual_seed(2)
    mask = torch.rand(1000, generator=rng) < 0.3
    advantages = torch.where(mask, torch.randn(1000, generator=rng) * 3 + 2, math.nan)
    white = whiten(advantages, mask)
    assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[mask].std().item() == pytest.approx(1.0, abs=1e-5)
    assert white[~mask].count_nonzero() == 0
    expected = (advantages[mask] - advantages[mask].mean()) / advantages[mask].std()
    torch.testing.assert_close(white[mask], expected, atol=1e-5, rtol=0)


def test_whitening_needs_two_actions_and_survives_a_constant() -> None:
    one = torch.tensor([0.0, 0.7])
    assert torch.equal(whiten(one, torch.tensor([False, True])), one)
    assert whiten(torch.full((5,), 0.3), torch.ones(5, dtype=torch.bool)).abs().max() < 1e-3
