"""One SAO step on one batch of completed trajectories (arXiv 2607.07508; algorithm.md 3.3): the trainer's story.

Flows in: trajectories, the consuming policy version. Flows out: a moved critic (K updates with fixed targets), a moved
policy (one DIS update), metrics. Every sum is divided by a count over the global batch, so layout and rank count change
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.task import Termination
from harness.trajectory import Trajectory
from trainer import metrics, parallel
from trainer.advantages.gae import length_adaptive_lambda, skip_observation_gae, value_targets
from trainer.advantages.whiten import whiten
from trainer.batch import Packed, pack, plan
from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput
from trainer.losses.value import value_loss
from trainer.model import Critic, Policy
from trainer.optimizer import Optimizer

TRUNCATED = {Termination.MAX_CONTEXT, Termination.MAX_TOKENS_PER_TURN, Termination.MAX_TURNS, Termination.WALL_CLOCK}


@dataclass(slots=True)
class Learners:
    """What a step moves."""

    policy: Policy
    policy_optimizer: Optimizer
    critic: Critic
    critic_optimizer: Optimizer


@dataclass(slots=True)
class MicroBatch:
    """One packed micro-batch and what the step computes about it, all per token [N]."""

    packed: Packed
    bootstrap: Tensor
    """[B], value after the last token of a truncated trajectory, else 0."""
    values: Tensor
    targets: Tensor
    advantages: Tensor


def train_step(
    learners: Learners,
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    algorithm: dict[str, Any],
    critic_updates: int,
    update_policy: bool,
    micro_batch_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Critic, advantages, policy. `algorithm` holds the fields of `AlgorithmConfig`. A collective."""
    batches = _prepare(trajectories, algorithm, micro_batch_tokens, seed)
    actions = parallel.total(sum(int(b.packed.mask.sum()) for b in batches))
    sums = metrics.Sums()

    for batch in batches:
        _evaluate(learners.critic, batch, algorithm)
        metrics.add_value(sums, batch.values, batch.targets, batch.packed.mask, batch.packed.boundaries)
    norms, losses = [], []
    for _ in range(critic_updates):
        loss, norm = critic_update(learners, batches, actions)
        losses.append(loss)
        norms.append(norm)
    before = [batch.values for batch in batches]
    if algorithm["advantage_values"] == "post":
        for batch in batches:
            batch.values = state_values(learners.critic, batch.packed)[0]
    leak = _leak(batches, before, algorithm)

    for batch in batches:
        batch.advantages = advantages(batch, batch.values, algorithm)
        if algorithm["control"] == "flip_sign":
            batch.advantages = -batch.advantages
    if algorithm["advantage_norm"] == "global_mean_std":
        _whiten(batches)
    kept, policy_norm = policy_update(learners, batches, actions, version, algorithm, sums, update_policy)
    stepped = update_policy and kept > 0 and np.isfinite(policy_norm)

    report = metrics.report(metrics.reduce(sums))
    report |= {f"value/mse_{k}": _finite(loss) for k, loss in enumerate(losses)} | leak
    report |= {f"grad/critic_{k}": _finite(norm) for k, norm in enumerate(norms)} | {"grad/policy": _finite(policy_norm)}
    report |= {"batch/action_tokens": actions, "dis/all_masked": float(kept == 0)}
    return {"stepped": bool(stepped), "metrics": report}


def _prepare(trajectories: Sequence[Trajectory], algorithm: dict[str, Any], budget: int, seed: int) -> list[MicroBatch]:
    rewards = [t.token_rewards() for t in trajectories]
    if algorithm["control"] == "shuffle_rewards":
        rewards = shuffled_rewards(trajectories, seed)
    mine = plan([len(t) for t in trajectories], dist.get_world_size(), budget)[dist.get_rank()]
    batches = []
    for indices in mine:
        packed = pack([trajectories[i] for i in indices], [rewards[i] for i in indices])
        packed = packed.to(parallel.device())
        truncated = [float(trajectories[i].info.get("termination") in TRUNCATED) for i in indices] or [0.0]
        empty = torch.zeros(len(packed.tokens), device=parallel.device())
        bootstrap = torch.tensor(truncated, device=parallel.device())
        batches.append(MicroBatch(packed, bootstrap, empty, empty, empty))
    return batches


def shuffled_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[np.ndarray]:
    """Control: the batch's terminal rewards, dealt to other trajectories."""
    order = list(range(len(trajectories)))
    random.Random(seed).shuffle(order)
    return [t.judged(trajectories[i].reward or 0.0).token_rewards() for t, i in zip(trajectories, order, strict=True)]


@torch.no_grad()
def state_values(critic: Critic, packed: Packed) -> tuple[Tensor, Tensor]:
    """(V before each token [N], V after each trajectory's last token [B])."""
    after = critic(packed.tokens, packed.positions, packed.cu_seqlens)
    return after.roll(1), after[packed.boundaries[1:] - 1]


def _evaluate(critic: Critic, batch: MicroBatch, algorithm: dict[str, Any]) -> None:
    """Values before any update, and targets that stay fixed through all of them."""
    batch.values, last = state_values(critic, batch.packed)
    batch.bootstrap = batch.bootstrap * last if algorithm["truncation"] == "bootstrap" else torch.zeros_like(last)
    batch.targets = value_targets(
        batch.values,
        batch.packed.rewards,
        batch.packed.mask,
        batch.packed.boundaries,
        gamma=algorithm["gamma"],
        lam=algorithm["lam_value"],
        bootstrap=batch.bootstrap,
    )


def advantages(batch: MicroBatch, values: Tensor, algorithm: dict[str, Any]) -> Tensor:
    """Skip-observation GAE with the length-adaptive lambda of each trajectory, [N] fp32."""
    packed = batch.packed
    ends = torch.cat([packed.mask.new_zeros(1, dtype=torch.int64), packed.mask.cumsum(0)])[packed.boundaries]
    return skip_observation_gae(
        values,
        packed.rewards,
        packed.mask,
        packed.boundaries,
        gamma=algorithm["gamma"],
        lam=length_adaptive_lambda(ends.diff(), algorithm["alpha"]),
        bootstrap=batch.bootstrap,
    )


def critic_update(learners: Learners, batches: list[MicroBatch], actions: float) -> tuple[float, float]:
    """One critic optimizer step on the full batch. Returns (mean squared error before it, gradient norm)."""
    total = 0.0
    for batch in batches:
        after = learners.critic(batch.packed.tokens, batch.packed.positions, batch.packed.cu_seqlens)
        loss = value_loss(after.roll(1), batch.targets, batch.packed.mask).sum() / max(actions, 1.0)
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return parallel.total(total), learners.critic_optimizer.step()


def policy_update(
    learners: Learners,
    batches: list[MicroBatch],
    actions: float,
    version: int,
    algorithm: dict[str, Any],
    sums: metrics.Sums,
    update: bool,
) -> tuple[float, float]:
    """One DIS step (or, while the policy is frozen, only its metrics). Returns (kept tokens, gradient norm)."""
    kept = 0.0
    band = {"eps_low": algorithm["eps_low"], "eps_high": algorithm["eps_high"]}
    with torch.set_grad_enabled(update):
        for batch in batches:
            packed, where = batch.packed, batch.packed.where
            logprobs, entropy = learners.policy(packed.tokens, packed.positions, packed.cu_seqlens, where)
            chosen = PolicyLossInput(
                logprobs,
                packed.rollout_logprobs[where],
                batch.advantages[where],
                torch.ones_like(where, dtype=torch.bool),
            )
            output = dis_loss(chosen, **band)
            kept += float(output.keep.sum())
            if update:
                loss = output.token_loss.sum() / max(actions, 1.0)
                (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            staleness = version - packed.versions
            metrics.add_policy(sums, chosen, output, staleness[where], entropy, **band)
            metrics.add_staleness(sums, staleness, packed.mask, packed.boundaries)
    kept = parallel.total(kept)
    if not update:
        return kept, 0.0
    if kept == 0:
        learners.policy_optimizer.clear()
        return kept, 0.0
    return kept, learners.policy_optimizer.step()


def _leak(batches: list[MicroBatch], before: list[Tensor], algorithm: dict[str, Any]) -> dict[str, float | None]:
    """mean |A_post - A_pre| / mean |A_pre|: how much the updates told the advantages about their own outcomes."""
    if algorithm["advantage_values"] == "pre":
        return {}
    change = size = 0.0
    for batch, values in zip(batches, before, strict=True):
        pre, post = advantages(batch, values, algorithm), advantages(batch, batch.values, algorithm)
        change += float((post - pre).abs().sum())
        size += float(pre.abs().sum())
    change, size = parallel.total(change), parallel.total(size)
    return {"value/leak": _finite(change / size) if size else None}


def _whiten(batches: list[MicroBatch]) -> None:
    lengths = [len(b.packed.mask) for b in batches]
    white = whiten(torch.cat([b.advantages for b in batches]), torch.cat([b.packed.mask for b in batches]))
    for batch, part in zip(batches, torch.split(white, lengths), strict=True):
        batch.advantages = part


def _finite(x: float) -> float | None:
    return x if np.isfinite(x) else None
