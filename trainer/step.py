"""One step on one batch of completed trajectories (arXiv 2607.07508; algorithm.md 3.3): the trainer's story.

Flows in: trajectories, the consuming policy version. Flows out: a moved critic (K updates with fixed targets), a moved
policy (one update), metrics. Every sum is divided by a count over the global batch, so layout and rank count change
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.task import Termination
from harness.trajectory import Trajectory
from trainer import critic_step, parallel, policy_step
from trainer.batch import MicroBatch, pack, plan
from trainer.estimate import Memory, critic_advantages, estimate, outcomes
from trainer.measure.tokens import length_deciles
from trainer.model import Critic, Policy
from trainer.normalise import Totals, kept_correction, trajectory_weights
from trainer.objective import Objective
from trainer.optimizer import Optimizer
from trainer.report import FrozenGuard, Report, success_of

TRUNCATED = {Termination.MAX_CONTEXT, Termination.MAX_TOKENS_PER_TURN, Termination.MAX_TURNS, Termination.WALL_CLOCK}
OCCASIONALLY, SELDOM = 10, 50
"""Steps between looks at what costs a pass of its own, and between proofs that frozen parameters stand still."""


@dataclass(slots=True)
class Learners:
    """What a step moves. Arms whose estimator reads no values have no critic."""

    policy: Policy
    policy_optimizer: Optimizer
    critic: Critic | None = None
    critic_optimizer: Optimizer | None = None
    guard: FrozenGuard | None = None
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What the harness says about one step."""

    number: int
    """Of the batch, from 1."""
    version: int
    """Of the policy that consumes it."""
    critic_updates: int
    """K"""
    update_policy: bool
    """False while only the critic learns."""
    micro_batch_tokens: int
    max_length: int
    """L_max of `loss_norm = "seq_sum_const"`, tokens."""
    seed: int


def train_step(
    learners: Learners, trajectories: Sequence[Trajectory], objective: Objective, options: StepOptions
) -> dict[str, Any]:
    """Critic, advantages, policy: {"stepped": whether the policy moved, "metrics": ...}. A collective."""
    settings = objective.settings
    if settings["control"] == "shuffle_rewards":
        trajectories = shuffled_rewards(trajectories, options.seed)
    rewards = [float(t.token_rewards().sum()) for t in trajectories]
    seen, episodes = outcomes(trajectories, rewards, learners.memory.drift)
    batches, totals = _lay_out(trajectories, episodes, objective, options)
    report = Report(trajectories, batches, objective, version=options.version, update_ratio=options.number % OCCASIONALLY == 0)
    if learners.critic is not None and learners.critic_optimizer is not None:
        critic_step.evaluate(learners.critic, batches, objective)
        report.values(batches, after=False)
        _update_critic(learners.critic, learners.critic_optimizer, batches, objective, options, report)
    estimate(batches, seen, objective, learners.memory)
    report.advantages(batches)

    kept = policy_step.backward(learners.policy, batches, objective, update=options.update_policy, observe=report.policy)
    stepped = False
    if options.update_policy and kept:
        learners.policy_optimizer.scale_gradients(kept_correction(settings["loss_norm"], totals.actions, kept))
        stepped = report.move("policy", learners.policy, learners.policy_optimizer)
    else:
        learners.policy_optimizer.clear()
    if learners.guard is not None and options.number % SELDOM == 0:
        learners.guard.check()
    metrics = report.finish(kept)
    if stepped:
        learners.memory.drift += report.drift()
    return {"stepped": stepped, "metrics": metrics}


def _update_critic(
    critic: Critic,
    optimizer: Optimizer,
    batches: list[MicroBatch],
    objective: Objective,
    options: StepOptions,
    report: Report,
) -> None:
    """K updates with fixed targets; then the values that the advantages take, compared with those before where both exist."""
    for k in range(options.critic_updates):
        loss = critic_step.backward(critic, batches, objective)
        if loss is None:  # all were left out; momentum and decay would move it all the same
            optimizer.clear()
            break
        report.value_losses.append(loss)
        report.move(f"critic_{k}", critic, optimizer)
    post = objective.settings["advantage_values"] == "post"
    if not post and options.number % OCCASIONALLY:
        return
    before = [batch.values for batch in batches]
    after = [critic_step.state_values(critic, batch.packed)[0] for batch in batches]
    for batch, old, new in zip(batches, before, after, strict=True):
        report.leak(batch, critic_advantages(batch, old, objective), critic_advantages(batch, new, objective))
        batch.values = new
    report.values(batches, after=True)
    if not post:
        for batch, old in zip(batches, before, strict=True):
            batch.values = old


def _lay_out(
    trajectories: Sequence[Trajectory], episodes: Sequence[int], objective: Objective, options: StepOptions
) -> tuple[list[MicroBatch], Totals]:
    """This rank's micro-batches with their loss weights, and the global counts behind these.

    `truncation = "mask"` leaves truncated trajectories out.
    """
    truncated = [t.info.get("termination") in TRUNCATED for t in trajectories]
    used = [i for i, cut in enumerate(truncated) if not (cut and objective.settings["truncation"] == "mask")]
    counts = [trajectories[i].n_actions for i in used]
    totals = Totals(float(sum(counts)), float(sum(n > 0 for n in counts)), float(options.max_length))
    deciles = length_deciles(counts)
    device = parallel.device()
    batches = []
    mine = plan([len(trajectories[i]) for i in used], dist.get_world_size(), options.micro_batch_tokens)[dist.get_rank()]
    for chosen in mine:
        indices = [used[i] for i in chosen]
        packed = pack([trajectories[i] for i in indices]).to(device)
        empty = torch.zeros(len(packed.tokens), device=device)
        batch = MicroBatch(
            packed,
            episodes=torch.tensor([episodes[i] for i in indices] or [0], device=device),
            truncated=torch.tensor([float(truncated[i]) for i in indices] or [0.0], device=device),
            success=success_of([trajectories[i] for i in indices], device),
            length_deciles=[deciles[i] for i in chosen] or [0],
            weights=empty,
            values=empty,
            targets=empty,
            advantages=empty,
        )
        batch.weights = trajectory_weights(objective.settings["loss_norm"], batch.counts, totals)
        batches.append(batch)
    return batches, totals


def shuffled_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """Control: the batch's terminal rewards, dealt to other episodes."""
    ids = list(dict.fromkeys(t.episode_id for t in trajectories))
    rewards = {t.episode_id: t.reward or 0.0 for t in trajectories}
    order = ids.copy()
    random.Random(seed).shuffle(order)
    dealt = {episode: rewards[other] for episode, other in zip(ids, order, strict=True)}
    return [t.judged(dealt[t.episode_id]) for t in trajectories]
