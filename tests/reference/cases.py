"""Random ragged batches, the same for a seed on every machine: float64 arrays whose numbers are exact in float32.

Tokens are packed as the trainer packs them: trajectory b is tokens cu_seqlens[b]:cu_seqlens[b+1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
GAMMAS = (1.0, 0.99, 0.9)
LAMBDAS: tuple[float | Literal["adaptive"], ...] = (0.0, 0.5, 0.95, 1.0, "adaptive")
SPREADS = (0.0, 3e-4, 1e-2, 0.3, 1.5)
"""Standard deviations of Delta = logp - rollout_logp, one per trajectory: from no staleness to far outside every band."""


@dataclass(frozen=True, slots=True)
class Case:
    """N tokens of B trajectories."""

    values: Array
    """[N]; arbitrary finite numbers on observations, which only the recursion through observations may read."""
    rewards: Array
    """[N]; turn rewards and the terminal one on last action tokens, 0 elsewhere."""
    mask: Array
    """[N] bool."""
    turn_ids: Array
    """[N] int64; -1 on observations."""
    cu_seqlens: Array
    """[B+1] int64."""
    bootstrap: Array
    """[B]; 0 for about two thirds."""
    gamma: float
    lam: float | Literal["adaptive"]
    logp: Array
    """[N]; NaN on observations, as the next three."""
    rollout_logp: Array
    old_logp: Array
    advantages: Array

    def bounds(self) -> Iterator[tuple[int, slice]]:
        """(b, its tokens) for each trajectory."""
        for b in range(len(self.bootstrap)):
            yield b, slice(int(self.cu_seqlens[b]), int(self.cu_seqlens[b + 1]))


def make_case(rng: np.random.Generator, *, zero_actions: bool = False) -> Case:
    """One batch of 1 to 6 trajectories of 1 to 40 tokens; with `zero_actions` some have nothing but observations."""
    layouts = [_layout(rng, zero_actions) for _ in range(rng.integers(1, 7))]
    turn_ids = np.concatenate(layouts)
    mask = turn_ids >= 0
    n, b = len(turn_ids), len(layouts)
    spread = np.concatenate([np.full(len(layout), rng.choice(SPREADS)) for layout in layouts])
    logp = -rng.exponential(1.0, n)
    return Case(
        values=_float32(np.where(mask, rng.normal(0.5, 0.5, n), rng.normal(0.0, 3.0, n))),
        rewards=_float32(np.concatenate([_rewards(rng, layout) for layout in layouts])),
        mask=mask,
        turn_ids=turn_ids,
        cu_seqlens=np.cumsum([0, *map(len, layouts)]),
        bootstrap=_float32(rng.normal(0.5, 0.3, b) * (rng.random(b) < 1 / 3)),
        gamma=float(rng.choice(GAMMAS)),
        lam=LAMBDAS[rng.integers(len(LAMBDAS))],
        logp=_only(mask, logp),
        rollout_logp=_only(mask, logp - rng.normal(0, 1, n) * spread),
        old_logp=_only(mask, logp - rng.normal(0, 1, n) * spread),
        advantages=_only(mask, rng.normal(0, 1, n) * (rng.random(n) < 0.95)),
    )


def make_cases(count: int, seed: int, *, zero_actions: bool = False) -> list[Case]:
    """`count` independent batches."""
    return [make_case(rng, zero_actions=zero_actions) for rng in np.random.default_rng(seed).spawn(count)]


def pack(cases: Sequence[Case]) -> Case:
    """Several batches as one; gamma and lambda are those of the first."""
    names = ("values", "rewards", "mask", "turn_ids", "bootstrap", "logp", "rollout_logp", "old_logp", "advantages")
    joined = {name: np.concatenate([getattr(case, name) for case in cases]) for name in names}
    lengths = np.concatenate([np.diff(case.cu_seqlens) for case in cases])
    return Case(cu_seqlens=np.cumsum([0, *lengths]), gamma=cases[0].gamma, lam=cases[0].lam, **joined)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The finished episodes of one batch, in order."""

    rewards: list[float]
    prompts: tuple[str, ...]
    drift: float


def make_run(rng: np.random.Generator) -> list[Episodes]:
    """Four batches of a run: prompts that return within a batch and across batches, binary or real rewards."""
    prompts, binary, drift, run = rng.integers(1, 8), rng.random() < 0.7, 0.0, []
    for _ in range(4):
        n = int(rng.integers(1, 25))
        rewards = rng.integers(0, 2, n).astype(float) if binary else rng.random(n)
        run.append(Episodes(rewards.tolist(), tuple(f"p{i}" for i in rng.integers(0, prompts, n)), drift))
        drift += float(rng.exponential(0.03))
    return run


def _layout(rng: np.random.Generator, zero_actions: bool) -> Array:
    """Turn ids: a prompt or none, then actions and observations by turns; the last span may be either."""
    length = int(rng.integers(1, 41))
    if zero_actions and rng.random() < 0.2:
        return np.full(length, -1)
    turn_ids = [-1] * int(rng.integers(0, min(length, 8)))
    turn = 0
    while len(turn_ids) < length:
        turn_ids += [turn] * (1 if rng.random() < 0.3 else int(rng.geometric(0.2)))
        if rng.random() < 0.9:  # else the next turn follows without an observation
            turn_ids += [-1] * int(rng.geometric(0.25))
        turn += 1
    return np.array(turn_ids[:length])


def _rewards(rng: np.random.Generator, turn_ids: Array) -> Array:
    rewards = np.zeros(len(turn_ids))
    actions = np.flatnonzero(turn_ids >= 0)
    if len(actions):
        rewards[actions[-1]] += float(rng.integers(0, 2)) if rng.random() < 0.7 else rng.normal()
        for turn in range(int(turn_ids.max()) + 1):
            if rng.random() < 0.3:
                rewards[np.flatnonzero(turn_ids == turn)[-1]] += rng.normal(0, 0.3)
    return rewards


def _float32(array: Array) -> Array:
    return array.astype(np.float32).astype(np.float64)


def _only(mask: Array, array: Array) -> Array:
    return np.where(mask, _float32(array), np.nan)
