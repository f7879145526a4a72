"""What the GAE benchmarks share: GAE plus global whitening, packed, against the per-position loop, padded.

The loop is verl's algorithm, written here from its description: walk back over the padded positions and carry
(next value, last advantage) unchanged over observation tokens, then whiten over the mask. Both are timed in this process, on
one thread, in process CPU time (wall time on a shared machine measures the neighbours); ours is the best of several runs, half
of them before and half after the loop, which runs once. `max_error` is ours against a float64 reference, over advantages and
whitened advantages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.advantages.gae import length_adaptive_lambda

LENGTH, RUNS = 131_072, 7
ACTION_RUN, OBSERVATION_RUN = 150, 450
"""Mean run lengths in tokens: bursts of actions, a quarter of all tokens."""


class Gae(Protocol):
    """`trainer.advantages.gae.skip_observation_gae` or its equal."""

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: Tensor
    ) -> Tensor: ...


def compare(rows: int, gae: Gae, whiten: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Fields of the JSON line for `rows` trajectories of 131,072 tokens."""
    torch.set_num_threads(1)
    values, rewards, mask = make_batch(rows)
    lam = length_adaptive_lambda(mask.sum(1), alpha=1.5)
    packed = values.flatten(), rewards.flatten(), mask.flatten(), torch.arange(rows + 1) * LENGTH

    def ours() -> Tensor:
        return whiten(gae(*packed, gamma=1.0, lam=lam), packed[2])

    before, _ = cpu_ms(ours, RUNS)
    loop_ms, _ = cpu_ms(lambda: carry_loop(values, rewards, mask, 1.0, lam.float()), 1)
    after, white = cpu_ms(ours, RUNS)
    ours_ms = min(before, after)

    exact = reference(values, rewards, mask, 1.0, lam)
    std, mean = torch.std_mean(exact[mask])
    exact_white = torch.where(mask, (exact - mean) / (std**2 + 1e-8).sqrt(), 0.0)
    advantages = gae(*packed, gamma=1.0, lam=lam).view(rows, LENGTH)
    errors = [(advantages - exact).abs().max().item(), (white.view(rows, LENGTH) - exact_white).abs().max().item()]
    return {
        "value": round(ours_ms, 2),
        "unit": "ms",
        "ratio": round(loop_ms / ours_ms, 1),
        "against": "per-position loop (verl's algorithm)",
        "against_ms": round(loop_ms, 1),
        "max_error": max(errors),
        "clock": "process CPU time, 1 thread",
        "tokens": rows * LENGTH,
        "action_tokens": int(mask.sum()),
        "whitened": True,
    }


def make_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Values and rewards ([rows, LENGTH] fp32) and the action mask (bool) of synthetic agent trajectories."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
    rewards = torch.zeros(rows, LENGTH)
    for row in range(rows):
        turns = 2 * LENGTH // (ACTION_RUN + OBSERVATION_RUN)
        runs = torch.rand(turns, 2, generator=rng) * 2 * torch.tensor([OBSERVATION_RUN, ACTION_RUN])
        kinds = torch.tensor([False, True]).repeat(turns).repeat_interleave(runs.ceil().long().flatten())
        mask[row, : len(kinds)] = kinds[:LENGTH]
        rewards[row, mask[row].nonzero()[-1]] = float(row % 2)
    return torch.rand(rows, LENGTH, generator=rng), rewards, mask


def carry_loop(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """Whitened advantages [B, T] fp32 by a loop over T; lam is [B]."""
    m = mask.float()
    next_value = torch.zeros(len(values))
    last = torch.zeros(len(values))
    columns = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * last
        next_value = values[:, t] * m[:, t] + next_value * (1 - m[:, t])
        last = advantage * m[:, t] + last * (1 - m[:, t])
        columns.append(last)
    advantages = torch.stack(columns[::-1], 1)
    n = m.sum()
    mean = (advantages * m).sum() / n
    variance = ((advantages - mean).square() * m).sum() / (n - 1)
    return (advantages - mean) * torch.rsqrt(variance + 1e-8) * m


def reference(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """Advantages [B, T] fp64, one Python float at a time."""
    out = torch.zeros(values.shape, dtype=torch.float64)
    for row in range(len(values)):
        where = mask[row].nonzero().squeeze(1)
        v, u, decay = values[row, where].tolist(), rewards[row, where].tolist(), gamma * lam[row].item()
        next_value = last = 0.0
        for j in reversed(range(len(v))):
            last = u[j] + gamma * next_value - v[j] + decay * last
            next_value = v[j]
            u[j] = last
        out[row, where] = torch.tensor(u, dtype=torch.float64)
    return out


def cpu_ms(call: Callable[[], Tensor], runs: int) -> tuple[float, Tensor]:
    """Best process CPU time of `runs` calls in ms, and the last result."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        result = call()
        best = min(best, (time.process_time() - start) * 1e3)
    return best, result
