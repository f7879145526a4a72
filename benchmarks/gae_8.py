"""GAE plus global whitening at 8 x 131,072 tokens: ours, packed, against the per-position loop, padded.

The loop is verl's algorithm, written here from its description: walk back over the padded positions and carry
(next value, last advantage) unchanged over observation tokens, then whiten over the mask. Both are timed in this process, on
one thread, in process CPU time (wall time on a shared machine measures the neighbours); ours is the best of several runs,
the loop runs once. `max_error` is ours against a float64 reference, over advantages and whitened advantages.

    python -m benchmarks.gae_8
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.advantages.gae import length_adaptive_lambda, skip_observation_gae
from trainer.advantages.whiten import whiten

ROWS, LENGTH, RUNS = 8, 131_072, 9
ACTION_RUN, OBSERVATION_RUN = 150, 450
"""Mean run lengths in tokens: bursts of actions, a quarter of all tokens."""


def make_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Values and rewards ([ROWS, LENGTH] fp32) and the action mask (bool) of synthetic agent trajectories."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    rewards = torch.zeros(ROWS, LENGTH)
    for row in range(ROWS):
        turns = 2 * LENGTH // (ACTION_RUN + OBSERVATION_RUN)
        runs = torch.rand(turns, 2, generator=rng) * 2 * torch.tensor([OBSERVATION_RUN, ACTION_RUN])
        kinds = torch.tensor([False, True]).repeat(turns).repeat_interleave(runs.ceil().long().flatten())
        mask[row, : len(kinds)] = kinds[:LENGTH]
        rewards[row, mask[row].nonzero()[-1]] = float(row % 2)
    return torch.rand(ROWS, LENGTH, generator=rng), rewards, mask


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


def main() -> None:
    """Print one JSON line."""
    torch.set_num_threads(1)
    values, rewards, mask = make_batch()
    lam = length_adaptive_lambda(mask.sum(1), alpha=1.5)
    packed = values.flatten(), rewards.flatten(), mask.flatten(), torch.arange(ROWS + 1) * LENGTH

    ours_ms, white = cpu_ms(lambda: whiten(skip_observation_gae(*packed, gamma=1.0, lam=lam), packed[2]), RUNS)
    loop_ms, _ = cpu_ms(lambda: carry_loop(values, rewards, mask, 1.0, lam.float()), 1)

    exact = reference(values, rewards, mask, 1.0, lam)
    std, mean = torch.std_mean(exact[mask])
    exact_white = torch.where(mask, (exact - mean) / (std**2 + 1e-8).sqrt(), 0.0)
    advantages = skip_observation_gae(*packed, gamma=1.0, lam=lam).view(ROWS, LENGTH)
    errors = [(advantages - exact).abs().max().item(), (white.view(ROWS, LENGTH) - exact_white).abs().max().item()]
    print(
        json.dumps(
            {
                "bench": "gae_8",
                "value": round(ours_ms, 2),
                "unit": "ms",
                "ratio": round(loop_ms / ours_ms, 1),
                "against": "per-position loop (verl's algorithm)",
                "against_ms": round(loop_ms, 1),
                "max_error": max(errors),
                "clock": "process CPU time, 1 thread",
                "tokens": ROWS * LENGTH,
                "action_tokens": int(mask.sum()),
                "whitened": True,
            }
        )
    )


if __name__ == "__main__":
    main()
