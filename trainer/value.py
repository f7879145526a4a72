"""Value pre-training: regress the critic on the initial policy's own returns before RL (algorithm.md 3.5).

Flows in: stored trajectories with rewards. Flows out: a critic with its held-out explained variance, and whether it may start
RL. The split is by prompt; all parameters train; the optimizer is forgotten afterwards, because RL freezes part of them.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness.errors import ConfigError
from harness.trajectory import Trajectory
from trainer import parallel
from trainer.advantages.gae import value_targets
from trainer.batch import Packed, pack, plan
from trainer.critic_step import state_values
from trainer.losses.value import value_loss
from trainer.measure import critic as measure
from trainer.measure.sums import Metrics, Sums, reduce
from trainer.measure.tokens import token_facts
from trainer.model import Critic
from trainer.optimizer import Optimizer
from trainer.report import success_of

EVALUATIONS = 10
"""Per epoch; also how many may pass without a gain of `MIN_GAIN` before it stops."""
MIN_GAIN = 0.01


def held_out(task_id: str, share: float) -> bool:
    """Whether a prompt is held out: a hash of its id, so that all its trajectories are on one side."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:4]) < share * 2**32


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Mean terminal reward: what the head's bias starts from. Raises `ConfigError` if there is none."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if len(rewards) < len(trajectories) or not rewards:
        raise ConfigError(
            f"value pre-training: {len(trajectories) - len(rewards)} of {len(trajectories)} trajectories have no reward",
            hint="give a run folder whose episodes were judged",
        )
    return sum(rewards) / len(rewards)


def data_hash(trajectories: Sequence[Trajectory]) -> str:
    """sha256 of the tokens, turns and rewards, whatever their order."""
    digest = hashlib.sha256()
    for t in sorted(trajectories, key=lambda t: (t.episode_id, t.segment)):
        digest.update(f"{t.episode_id}/{t.segment}/{t.task_id}/{t.reward}/{t.turn_rewards}".encode())
        digest.update(t.tokens.tobytes() + t.turn_ids.tobytes())
    return digest.hexdigest()


def pretrain(
    critic: Critic, trajectories: Sequence[Trajectory], settings: dict[str, Any], *, budget: int, seed: int
) -> dict[str, Any]:
    """Train for `epochs`, or until, the first epoch and the warm-up over, the held-out explained variance gains less than 0.01
    in ten evaluations. A collective.

    Raises `ConfigError` if either side of the split is empty.
    """
    trajectories = sorted(trajectories, key=lambda t: (t.episode_id, t.segment))  # the data decide, not who stored them how
    train = [t for t in trajectories if not held_out(t.task_id, settings["heldout"])]
    test = [t for t in trajectories if held_out(t.task_id, settings["heldout"])]
    if not train or not test:
        raise ConfigError(
            f"value pre-training: {len(train)} training and {len(test)} held-out trajectories",
            hint="raise value.episodes",
        )
    optimizer = Optimizer(critic, settings["optimizer"], settings["head_lr_mult"])
    per_epoch = math.ceil(len(train) / settings["batch"])
    every = max(1, per_epoch // EVALUATIONS)
    curve = [evaluate(critic, test, budget)]
    order: list[int] = []
    steps = settings["epochs"] * per_epoch
    for step in range(steps):
        if not order:
            order = list(range(len(train)))
            random.Random(f"{seed}/{step // per_epoch}").shuffle(order)
        chosen, order = order[: settings["batch"]], order[settings["batch"] :]
        _update(critic, optimizer, [train[i] for i in chosen], budget)
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append(evaluate(critic, test, budget))
            if step + 1 >= per_epoch + settings["optimizer"]["warmup_steps"] and settled([_ev(point) for point in curve]):
                break
    return {"train": len(train), "heldout": len(test), "steps": optimizer.steps, "curve": curve, **curve[-1]}


def settled(curve: Sequence[float]) -> bool:
    """Whether the last ten evaluations gained less than `MIN_GAIN` over the best one before them; -inf is undefined."""
    if len(curve) <= EVALUATIONS:
        return False
    best = max(curve[-EVALUATIONS:])
    return best == -math.inf or best < max(curve[:-EVALUATIONS]) + MIN_GAIN


def gate(report: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Whether RL may start on this critic, and if not, why."""
    ev, bias = report["value/ev"], report["value/bias"]
    reason = ""
    if ev is None or bias is None:
        reason = "its held-out explained variance is undefined: all held-out rewards are equal, or values are not finite"
    elif ev <= settings["min_ev"]:
        reason = f"its held-out explained variance is {ev:.3f}, not above value.min_ev = {settings['min_ev']}"
    elif abs(bias) > settings["max_bias"]:
        reason = f"its held-out bias mean(V - G) is {bias:+.3f}, beyond value.max_bias = {settings['max_bias']}"
    return {"passed": not reason, "reason": reason}


def _ev(point: Metrics) -> float:
    ev = point["value/ev"]
    return -math.inf if ev is None else ev


def _targets(packed: Packed) -> Tensor:
    return value_targets(
        packed.rewards, packed.rewards, packed.mask, packed.boundaries, gamma=1.0, lam=1.0
    )  # Monte-Carlo: independent of the values


def _update(critic: Critic, optimizer: Optimizer, trajectories: list[Trajectory], budget: int) -> None:
    actions = max(1, sum(t.n_actions for t in trajectories))
    for indices in plan([len(t) for t in trajectories], dist.get_world_size(), budget)[dist.get_rank()]:
        packed = pack([trajectories[i] for i in indices]).to(parallel.device())
        after = critic(packed.tokens, packed.positions, packed.cu_seqlens)
        loss = value_loss(after.roll(1), _targets(packed), packed.mask).sum() / actions
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def evaluate(critic: Critic, trajectories: list[Trajectory], budget: int) -> Metrics:
    """Held-out critic metrics. A collective."""
    sums = Sums()
    rewards = [t.reward or 0.0 for t in trajectories]
    span = {"r_min": min(0.0, *rewards), "r_max": max(1.0, *rewards)}
    for indices in plan([len(t) for t in trajectories], dist.get_world_size(), budget)[dist.get_rank()]:
        chosen = [trajectories[i] for i in indices]
        packed = pack(chosen).to(parallel.device())
        values, where = state_values(critic, packed)[0], packed.where
        facts = token_facts(packed, 0, [0] * max(1, len(chosen)))
        success = success_of(chosen, parallel.device())
        measure.add(sums, values[where], _targets(packed)[where], facts, success, **span)
    return measure.report(reduce(sums))
