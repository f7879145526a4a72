"""Over random batches: a token's loss depends on its trajectory alone, and on nothing that stands on an observation."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses import catalog
from trainer.losses.types import PolicyLossInput, PolicyLossOutput

PLUGINS: list[Any] = sorted(
    (value for value in vars(catalog).values() if isinstance(value, type) and hasattr(value, "function")),
    key=lambda plugin: plugin.__name__,
)
ALL = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
ROWS = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31)
SCALES = st.sampled_from([1e-4, 1e-3, 0.3, 2.0])
FIELDS = ("logprobs", "rollout_logprobs", "advantages", "mask", "old_logprobs")
EXAMPLES = settings(max_examples=50, deadline=None)


def batch(rows: list[list[bool]], seed: int, scale: float) -> PolicyLossInput:
    rng = torch.Generator().manual_seed(seed)
    n = sum(map(len, rows))
    logprobs = -torch.rand(n, generator=rng) * 4
    rollout, old = (logprobs - scale * torch.randn(n, generator=rng) for _ in range(2))
    mask = torch.tensor([m for row in rows for m in row], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return PolicyLossInput(logprobs.requires_grad_(), rollout, torch.randn(n, generator=rng), mask, cu_seqlens, old)


def pick(inputs: PolicyLossInput, index: Tensor, lengths: list[int]) -> PolicyLossInput:
    """The tokens at `index`, as trajectories of `lengths`."""
    picked = {key: getattr(inputs, key).detach()[index] for key in FIELDS}
    picked["logprobs"].requires_grad_()
    return replace(inputs, **picked, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))


def evaluate(plugin: Any, inputs: PolicyLossInput) -> tuple[PolicyLossOutput, Tensor]:
    """The output and the gradient, under the engine's policy where there is a choice: its ratios are not 1."""
    module, attribute = plugin.function.split(":")
    old = {"old": "rollout"} if "old" in plugin.Config.model_fields else {}
    output = getattr(importlib.import_module(module), attribute)(inputs, **plugin.Config(**old).model_dump())
    return output, torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)[0]


def assert_same(a: tuple[PolicyLossOutput, Tensor], b: tuple[PolicyLossOutput, Tensor], index: Tensor) -> None:
    """b is a at `index`."""
    assert torch.equal(a[0].keep[index], b[0].keep)
    for x, y in ((a[0].token_loss, b[0].token_loss), (a[0].weight, b[0].weight), (a[1], b[1])):
        torch.testing.assert_close(x[index], y, atol=1e-6, rtol=1e-5)


@ALL
@EXAMPLES
@given(ROWS, SEEDS, SCALES)
def test_order_of_trajectories_and_of_tokens_within_them(plugin: Any, rows: list[list[bool]], seed: int, scale: float) -> None:
    inputs, rng = batch(rows, seed, scale), torch.Generator().manual_seed(seed)
    assert inputs.cu_seqlens is not None
    starts = inputs.cu_seqlens.tolist()
    order = torch.randperm(len(rows), generator=rng).tolist()
    index = torch.cat([starts[b] + torch.randperm(len(rows[b]), generator=rng) for b in order])
    shuffled = pick(inputs, index, [len(rows[b]) for b in order])
    assert_same(evaluate(plugin, inputs), evaluate(plugin, shuffled), index)


@ALL
@EXAMPLES
@given(ROWS, SEEDS, SCALES)
def test_packing(plugin: Any, rows: list[list[bool]], seed: int, scale: float) -> None:
    inputs = batch(rows, seed, scale)
    together = evaluate(plugin, inputs)
    assert inputs.cu_seqlens is not None
    for b, row in enumerate(rows):
        index = int(inputs.cu_seqlens[b]) + torch.arange(len(row))
        assert_same(together, evaluate(plugin, pick(inputs, index, [len(row)])), index)


@ALL
@EXAMPLES
@given(ROWS, SEEDS, SCALES, st.sampled_from([math.nan, math.inf, -math.inf, 1e9, -1e9]))
def test_observations_are_never_read(plugin: Any, rows: list[list[bool]], seed: int, scale: float, poison: float) -> None:
    inputs = batch(rows, seed, scale)
    dirty = {key: torch.where(inputs.mask, getattr(inputs, key).detach(), poison) for key in FIELDS if key != "mask"}
    dirty["logprobs"].requires_grad_()
    (a, grad_a), (b, grad_b) = evaluate(plugin, inputs), evaluate(plugin, replace(inputs, **dirty))
    assert torch.equal(a.token_loss, b.token_loss)
    assert torch.equal(a.keep, b.keep) and torch.equal(a.weight, b.weight)
    assert torch.equal(grad_a, grad_b)
