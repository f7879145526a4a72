"""Invariants 4 and 5 on stored trajectories: what stands on observations reaches nothing, and layout changes nothing.

Flows in: trajectories and the run's configuration. Flows out: what was proved, what could not be, and every fault. The
trainer's own functions run (`step`, `critic_step`, `estimate`, `policy_step`) with look-up tables in place of the models: each
stored token gets an id of its own, under which its drawn log-prob and value stand, and under which its gradients come back.
Rewards are drawn too, so that a sample of equal rewards proves something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.config import Config
from harness.trajectory import Trajectory
from trainer import critic_step, objective, parallel, policy_step, step
from trainer.advantages.types import Outcomes
from trainer.batch import MicroBatch, pack
from trainer.estimate import Memory, estimate, outcomes
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.normalise import kept_correction
from trainer.objective import Objective

Proof = tuple[str, str, list[str]]
"""(what was proved, what could not be and why, faults)."""
FILLS = {"1e9": 1e9, "infinity": math.inf, "NaN": math.nan}
"""What observations are filled with, beside random numbers."""
TOLERANCE = 1e-5
"""Of the largest element, for sums of float32 in another order."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Tables:
    """What the models would say about T stored tokens, [T] each, by token id; log-probs and values are leaves."""

    logprobs: Tensor
    """Current log-probs, nats, fp32."""
    values: Tensor
    """V before the token, fp32."""
    after: Tensor
    """V after the token; read at the end of a trajectory only."""

    def policy(self, tokens: Tensor, positions: Tensor, cu_seqlens: list[int], where: Tensor) -> tuple[Tensor, Tensor]:
        """As `trainer.model.Policy`."""
        chosen = self.logprobs[tokens[where].long()]
        return chosen, torch.zeros_like(chosen)

    def critic(self, tokens: Tensor, positions: Tensor, cu_seqlens: list[int]) -> Tensor:
        """As `trainer.model.Critic`: V after each token."""
        ids = tokens.long()
        ends = torch.zeros_like(ids, dtype=torch.bool)
        ends[torch.tensor(cu_seqlens[1:], device=ids.device) - 1] = True
        return torch.where(ends, self.after[ids], self.values[ids].roll(-1))


@dataclass(frozen=True, slots=True)
class Result:
    """What one pass gives, [T] by token id."""

    advantages: Tensor
    policy_gradient: Tensor
    value_gradient: Tensor
    loss: float
    """Policy loss."""
    size: float
    """The same of absolute values."""


class Sample:
    """Stored trajectories whose tokens are their ids, 0 to T - 1 in stored order, with drawn rewards, log-probs and values."""

    def __init__(self, stored: Sequence[Trajectory], config: Config, arm: Objective, *, estimator: bool) -> None:
        self.config, self.objective, self.estimator = config, arm, estimator
        rng = np.random.default_rng(SEED)
        rewards = {t.episode_id: rng.uniform(0.25, 0.75) for t in stored}
        self.starts = np.cumsum([0, *map(len, stored)])[:-1]
        self.trajectories = [
            replace(
                t.judged(rewards[t.episode_id] - sum(t.turn_rewards.values()), t.turn_rewards),
                tokens=np.arange(start, start + len(t), dtype=np.int32),
            )
            for t, start in zip(stored, self.starts, strict=True)
        ]
        self.rewards = [float(t.token_rewards().sum()) for t in self.trajectories]
        packed, device = pack(self.trajectories), parallel.device()
        self.mask = packed.mask.to(device)
        noise = [rng.choice([1e-4, 1e-2, 0.5]) * rng.standard_normal(len(t)) for t in stored]  # so that any band keeps some
        near = (packed.rollout_logprobs.double() + torch.from_numpy(np.concatenate(noise))).clamp(max=0.0)
        drawn = torch.from_numpy(rng.standard_normal((4, len(near))))
        self.logprobs = torch.where(packed.mask, near, drawn[0]).float().to(device)
        self.values, self.after, self.alone = drawn[1:].float().to(device)

    def tables(self, fill: float | None) -> Tables:
        """Fresh leaves."""
        logprobs, values = (_filled(x, self.mask, fill).clone().requires_grad_() for x in (self.logprobs, self.values))
        return Tables(logprobs, values, self.after)

    def place(self, token: int) -> str:
        """File and position of a token id."""
        index = int(np.searchsorted(self.starts, token, side="right")) - 1
        t = self.trajectories[index]
        return f"{t.episode_id}.{t.segment}.parquet: position {token - int(self.starts[index])}"

    def lay_out(self, order: Sequence[int], budget: int, fill: float | None) -> tuple[list[MicroBatch], float, Outcomes]:
        """(micro-batches, action tokens of them all, outcomes) of one order and one micro-batch size in tokens."""
        chosen = [self.trajectories[i] for i in order]
        seen, episodes = outcomes(self.trajectories, self.rewards, 0.0)
        episodes = [episodes[i] for i in order]
        if self.estimator and self.objective.outcome is not None and not self.objective.outcome(seen, {})[1]:
            # One that remembers counts episodes in their order of completion; to any other their order is layout too.
            seen, episodes = outcomes(chosen, [self.rewards[i] for i in order], 0.0)
        options = step.StepOptions(1, 0, 1, True, budget, self.config.limits.max_context, SEED)
        batches, totals = step._lay_out(chosen, episodes, self.objective, options)
        for batch in batches:
            batch.packed.rollout_logprobs = _filled(batch.packed.rollout_logprobs, batch.packed.mask, fill)
        return batches, totals.actions, seen

    def run(self, order: Sequence[int], budget: int, fill: float | None = None) -> Result:
        """One step's forward and backward passes; observations hold `fill`, or random numbers."""
        tables = self.tables(fill)
        batches, actions, seen = self.lay_out(order, budget, fill)
        if self.objective.critic is not None:
            critic_step.evaluate(tables.critic, batches, self.objective)  # type: ignore[arg-type]
            critic_step.backward(tables.critic, batches, self.objective)  # type: ignore[arg-type]
        if self.estimator:
            estimate(batches, seen, self.objective, Memory())
        else:
            for batch in batches:
                batch.advantages = torch.where(batch.packed.mask, self.alone[batch.packed.tokens.long()], 0.0)
        terms: list[Tensor] = []

        def observe(batch: MicroBatch, _: PolicyLossInput, output: PolicyLossOutput, entropy: Tensor) -> None:
            terms.append(output.token_loss.detach().double() * torch.repeat_interleave(batch.weights, batch.counts))

        kept = policy_step.backward(tables.policy, batches, self.objective, update=True, observe=observe)  # type: ignore[arg-type]
        scale = kept_correction(self.objective.settings["loss_norm"], actions, kept)
        advantages = torch.zeros_like(self.values)
        for batch in batches:
            where = batch.packed.where
            advantages[batch.packed.tokens[where].long()] = batch.advantages[where]
        loss = torch.cat(terms) * scale
        gradients = _gradient(tables.logprobs) * scale, _gradient(tables.values)
        return Result(advantages, *gradients, float(loss.sum()), float(loss.abs().sum()))

    def loss_alone(self, budget: int, advantages: Tensor, fill: float | None) -> tuple[Tensor, Tensor]:
        """(loss, gradient by log-prob), [T] each: of the loss function with the observations left in, holding `fill`."""
        tables, advantages = self.tables(fill), _filled(advantages, self.mask, fill)
        losses = torch.zeros_like(self.values)
        for batch in self.lay_out(range(len(self.trajectories)), budget, fill)[0]:
            p, ids = batch.packed, batch.packed.tokens.long()
            inputs = PolicyLossInput(tables.logprobs[ids], p.rollout_logprobs, advantages[ids], p.mask, p.boundaries)
            output = self.objective.loss(inputs)
            output.token_loss.sum().backward()  # type: ignore[no-untyped-call]
            losses[ids] = output.token_loss.detach()
        return losses, _gradient(tables.logprobs)


def prove(trajectories: Sequence[Trajectory], config: Config, *, estimator: bool = True) -> dict[int, Proof]:
    """Proofs of invariants 4 and 5 for the arm of `config`. estimator=False: only the losses, with drawn advantages, where a
    group estimator has no complete group. Raises `ConfigError` for an arm that cannot be built here.
    """
    settings = config.algorithm.model_dump()
    if config.critic is not None:
        settings |= config.critic.model_dump(include={"lam", "value_clip", "advantage_values"})
    arm = objective.build(config.loss.table(), config.advantage.table(), settings, config.trainer.compiled_gae)
    with _one_rank():
        sample = Sample(trajectories, config, arm, estimator=estimator)
        reference = sample.run(range(len(trajectories)), config.trainer.micro_batch_tokens)
        trained = int(reference.policy_gradient.count_nonzero())
        proved = f"sample of {len(trajectories):,} trajectories, {len(sample.mask):,} tokens, {trained:,} with a gradient"
        unproved = "" if estimator else f"no complete group for {config.advantage.id}, so only the loss"
        if not trained:
            proved, unproved = "", "no token of the sample has a gradient"
        return {4: (proved, unproved, influence(sample, reference)), 5: (proved, unproved, layout(sample, reference))}


def influence(sample: Sample, reference: Result) -> list[str]:
    """Invariant 4: no gradient on observations, and all else bit-equal whatever stands there."""
    loss, budget = sample.config.loss.id, sample.config.trainer.micro_batch_tokens
    alone = sample.loss_alone(budget, reference.advantages, None)
    faults: list[str] = []
    for what, found in (
        ("the policy loss has a gradient", reference.policy_gradient),
        ("the value loss has a gradient", reference.value_gradient),
        (f"{loss} is not 0", alone[0]),
        (f"{loss} has a gradient", alone[1]),
    ):
        faults += _first(sample, ~sample.mask & (found != 0), f"{what} on an observation", torch.zeros_like(found), found)
    for name, fill in FILLS.items():
        filled = sample.run(range(len(sample.trajectories)), budget, fill)
        pairs = _pairs(reference, filled)
        pairs += zip(
            (f"loss of {loss}", f"gradient of {loss}"),
            alone,
            sample.loss_alone(budget, reference.advantages, fill),
            strict=True,
        )
        for what, before, now in pairs:
            faults += _first(sample, before != now, f"the {what} moves when observations hold {name}", before, now)
    return faults


def layout(sample: Sample, reference: Result) -> list[str]:
    """Invariant 5: the same loss and gradients for other orders and micro-batch sizes."""
    n, total = len(sample.trajectories), len(sample.mask)
    shuffled = [int(i) for i in np.random.default_rng(SEED).permutation(n)]
    layouts = {
        "all in one micro-batch": (list(range(n)), total),
        "one trajectory per micro-batch, backwards": (list(reversed(range(n))), 1),
        "shuffled, about 3 micro-batches": (shuffled, total // 3),
        "shuffled, about 7 micro-batches": (shuffled[::-1], total // 7),
    }
    faults = []
    for name, (order, budget) in layouts.items():
        found = sample.run(order, max(budget, 1))
        for what, before, now in _pairs(reference, found):
            apart = ~((now - before).abs() <= TOLERANCE * before.abs().max())
            faults += _first(sample, apart, f"the {what} differs with {name}", before, now)
        if not abs(found.loss - reference.loss) <= TOLERANCE * reference.size:
            faults.append(f"the policy loss is {found.loss:.8g} with {name}, not {reference.loss:.8g}")
    return faults


def _pairs(a: Result, b: Result) -> list[tuple[str, Tensor, Tensor]]:
    return [
        ("advantage", a.advantages, b.advantages),
        ("gradient of the policy loss", a.policy_gradient, b.policy_gradient),
        ("gradient of the value loss", a.value_gradient, b.value_gradient),
    ]


def _first(sample: Sample, wrong: Tensor, what: str, before: Tensor, now: Tensor) -> list[str]:
    """One fault for all tokens of `wrong` [T] bool, with the first."""
    where = wrong.nonzero()[:, 0].tolist()
    if not where:
        return []
    first = where[0]
    more = f" (and {len(where) - 1:,} more)" if len(where) > 1 else ""
    return [f"{sample.place(first)}: {what}: {float(now[first]):.8g}, not {float(before[first]):.8g}{more}"]


def _filled(x: Tensor, mask: Tensor, fill: float | None) -> Tensor:
    """x with `fill` wherever `mask` is False."""
    return x if fill is None else torch.where(mask, x, fill)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@contextmanager
def _one_rank() -> Iterator[None]:
    """A world of one rank, whose sums come out the same to the bit each time."""
    before = torch.are_deterministic_algorithms_enabled()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        dist.destroy_process_group()
