"""What trajectories say by themselves, and sizes of gradients and parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harness.trajectory import Trajectory, TrajectoryBuilder
from tests.unit.measure_formulas import mean
from tests.unit.measure_support import case, same
from trainer.measure import batch, gradients


def four_grams(t: Trajectory) -> tuple[int, int]:
    grams = []
    for span in t.spans:
        if span.kind == "action":
            tokens = t.tokens[span.start : span.stop].tolist()
            grams += [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(grams), len(set(grams))


@pytest.mark.parametrize("seed", range(5))
def test_facts_of_a_batch(seed: int) -> None:
    made = case(seed, n=12).trajectories
    fork = replace(made[0], segment=1)
    counted = [replace(t, info={**t.info, "malformed_calls": i}) if i % 3 == 0 else t for i, t in enumerate(made)]
    everything = [*counted, fork]
    turns = [t.n_turns * (2 if t is made[0] else 1) for t in made]
    endings = [t.info["termination"] for t in made]
    actions, tokens = sum(t.n_actions for t in everything), sum(len(t) for t in everything)
    grams = [four_grams(t) for t in everything]
    rates = [i for i in range(12) if i % 3 == 0]
    expected: dict[str, Any] = {
        "rollout/truncated": mean(e != "finished" for e in endings),
        "rollout/turns": mean(turns),
        "rollout/action_tokens": actions / 12,
        "rollout/observation_tokens": (tokens - actions) / 12,
        "rollout/action_frac": actions / tokens,
        "rollout/repeated_4gram": sum(n - d for n, d in grams) / sum(n for n, _ in grams),
        "rollout/malformed_call_rate": sum(rates) / sum(turns[i] for i in rates),
        "batch/episodes": 12,
        "batch/unique_prompts": len({t.task_id for t in made}),
    }
    for limit in ("max_turns", "max_context", "max_tokens_per_turn", "wall_clock"):
        expected[f"rollout/truncated_{limit}"] = mean(e == limit for e in endings)
    for ending in ("finished", "max_turns", "max_context", "max_tokens_per_turn", "wall_clock"):
        rewards = [t.reward for t, e in zip(made, endings, strict=True) if e == ending and t.reward is not None]
        expected[f"reward/{ending}"] = mean(rewards)
    for name, some in (("le_2", range(1, 3)), ("le_5", range(3, 6)), ("le_10", range(6, 11)), ("gt_10", range(11, 99))):
        won = [t.reward is not None and t.reward > 0.5 for t, k in zip(made, turns, strict=True) if k in some]
        expected[f"rollout/success_turns_{name}"] = mean(won)
    same(batch.report(everything), expected)


def test_four_grams() -> None:
    builder = TrajectoryBuilder()
    builder.observe([9])
    builder.act([1] * 6, [-1.0] * 6, [0] * 6)
    builder.observe([1])
    builder.act([1, 1, 1], [-1.0] * 3, [0] * 3)
    builder.act([150_000, 2, 3, 4], [-1.0] * 4, [0] * 4)
    assert batch.four_grams(builder.build("e", "t", reward=0.0)) == (4, 2)
    builder = TrajectoryBuilder()
    builder.observe([9])
    builder.act([1, 1, 1], [-1.0] * 3, [0] * 3)
    assert batch.report([builder.build("e", "t", reward=0.0)])["rollout/repeated_4gram"] is None


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"up_proj": nn.Linear(5, 3, bias=False), "down_proj": nn.Linear(3, 5, bias=False)})
    model = nn.ModuleDict({"mlp": layer, "norm": nn.RMSNorm(5), "v_head": nn.Linear(5, 1)})
    model["norm"].requires_grad_(False)
    return model


def test_group_norms_and_update_ratios() -> None:
    model = small_model()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    norms = gradients.group_norms(model)
    mlp = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n.startswith("mlp") and p.grad is not None])
    assert norms["dense_mlp"] == pytest.approx((float(mlp.norm()), float(mlp.norm()) / 30**0.5))
    assert norms["norms"] == (0.0, 0.0)
    rows = gradients.report_norms("critic_0", {"a": (1.0, 0.5), "b": (math.nan, math.nan)})
    assert rows == {"grad/critic_0/a": 1.0, "grad/critic_0/a_rms": 0.5, "grad/critic_0/b": None, "grad/critic_0/b_rms": None}

    with torch.no_grad():
        model["v_head"].weight.zero_()
        model["v_head"].bias.zero_()
        before = gradients.Snapshot(model)
        for name, p in model.named_parameters():
            if name.startswith("mlp"):
                p.mul_(1.25)
    ratios = gradients.report_ratios("policy", before.update_ratio())
    assert ratios == {
        "update/policy/dense_mlp": pytest.approx(0.25),
        "update/policy/norms": 0.0,
        "update/policy/value_head": None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_sees_every_bit_of_the_frozen_and_nothing_else(dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    model["mlp"].requires_grad_(False)
    start = gradients.frozen_checksum(model)
    with torch.no_grad():
        model["v_head"].weight.add_(1)
    assert gradients.frozen_checksum(model) == start
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    weight = model["mlp"]["up_proj"].weight.data.view(integers)
    seen = {start}
    for row, column in ((0, 0), (2, 4), (1, 3)):
        for bit in range(32 if dtype == torch.float32 else 16):
            flip = torch.tensor(-(1 << bit) if bit in (15, 31) else 1 << bit).to(integers)
            weight[row, column] ^= flip
            seen.add(gradients.frozen_checksum(model))
            weight[row, column] ^= flip
    assert len(seen) == 1 + 3 * (32 if dtype == torch.float32 else 16)
    assert gradients.frozen_checksum(model) == start
    weight[:] = weight.flip(0)
    assert gradients.frozen_checksum(model) != start
