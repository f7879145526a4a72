"""From rewards and values to the advantages of a batch, whatever the estimator.

Flows in: the micro-batches of this rank, the outcomes of the whole batch. Flows out: `MicroBatch.advantages`. What an estimator
remembers from batch to batch is in `Memory` and goes into every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.trajectory import Trajectory
from trainer.advantages.reinforce import return_to_go
from trainer.advantages.types import AdvantageInput, Outcomes, State
from trainer.batch import MicroBatch
from trainer.objective import Objective


@dataclass(slots=True)
class Memory:
    """What outlives a batch. The same on every rank; JSON-serialisable."""

    state: State = field(default_factory=dict)
    """The estimator's own."""
    drift: float = 0.0
    """Estimated KL, nats, between the policies of all steps so far, added up."""


def outcomes(trajectories: Sequence[Trajectory], rewards: Sequence[float], drift: float) -> tuple[Outcomes, list[int]]:
    """Episodes in order of first appearance, and the episode of each trajectory; segments of one episode count once.

    rewards: of each trajectory, its terminal reward and its turn rewards together.
    """
    index: dict[str, int] = {}
    prompts: list[str] = []
    totals: list[float] = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        if trajectory.episode_id not in index:
            index[trajectory.episode_id] = len(index)
            prompts.append(trajectory.task_id)
            totals.append(reward)
    batch = Outcomes(torch.tensor(totals, dtype=torch.float64), tuple(prompts), drift)
    return batch, [index[t.episode_id] for t in trajectories]


def advantage_input(batch: MicroBatch, values: Tensor, gamma: float) -> AdvantageInput:
    """A micro-batch as critic estimators read it."""
    packed = batch.packed
    return AdvantageInput(
        values, packed.rewards, packed.mask, packed.turn_ids, packed.boundaries, batch.truncated.double(), gamma
    )


def critic_advantages(batch: MicroBatch, values: Tensor, objective: Objective) -> Tensor:
    """A of one micro-batch from given values, [N] fp32."""
    assert objective.critic is not None and objective.policy_lambda is not None
    inputs = advantage_input(batch, values, objective.settings["gamma"])
    lam = objective.policy_lambda(objective.critic.length(inputs))
    return objective.critic.estimate(inputs, lam).advantages


def estimate(batches: Sequence[MicroBatch], seen: Outcomes, objective: Objective, memory: Memory) -> None:
    """Set the advantages of every micro-batch and move the memory on. A collective if it whitens."""
    settings = objective.settings
    if objective.outcome is None:
        for batch in batches:
            batch.advantages = critic_advantages(batch, batch.values, objective)
    else:
        per_episode, memory.state = objective.outcome(seen, memory.state)
        for batch in batches:
            batch.advantages = _spread(batch, per_episode, objective)
    if settings["control"] == "flip_sign":
        for batch in batches:
            batch.advantages = -batch.advantages
    if objective.kind == "return" or settings["advantage_norm"] != "none":
        _whiten(batches, objective)


def _spread(batch: MicroBatch, per_episode: Tensor, objective: Objective) -> Tensor:
    """The episode's advantage on all its action tokens; of kind "return", their own returns minus the episode's baseline."""
    packed = batch.packed
    chosen = per_episode.to(packed.rewards.device)[batch.episodes]
    each = torch.repeat_interleave(chosen, batch.counts).float()
    spread = torch.zeros_like(packed.rewards).masked_scatter_(packed.mask, each)
    if objective.kind == "outcome":
        return spread
    returns = return_to_go(packed.rewards, packed.mask, packed.boundaries, gamma=objective.settings["gamma"])
    return torch.where(packed.mask, returns - spread, 0.0)


def _whiten(batches: Sequence[MicroBatch], objective: Objective) -> None:
    centre = objective.kind == "return" or objective.settings["advantage_norm"] == "global_mean_std"
    lengths = [len(b.packed.mask) for b in batches]
    advantages, masks = (torch.cat(x) for x in ([b.advantages for b in batches], [b.packed.mask for b in batches]))
    white = objective.whiten(advantages, masks, centre=centre)
    for batch, part in zip(batches, torch.split(white, lengths), strict=True):
        batch.advantages = part
