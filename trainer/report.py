"""The metrics of one step: collected while it runs, reduced over ranks once at its end (formulas: `trainer/measure/*`).

Flows in: what the step computes, when it computes it. Flows out: one flat table of numbers, None where undefined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.errors import InvariantError
from harness.trajectory import Trajectory
from trainer.batch import MicroBatch
from trainer.estimate import advantage_input
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.measure import advantages, batch, critic, gradients, off_policy, staleness
from trainer.measure.sums import Metrics, Sums, reduce
from trainer.measure.tokens import TokenFacts, token_facts
from trainer.objective import Objective
from trainer.optimizer import Optimizer


class Report:
    """One step's. Methods that say so are collectives; all ranks call all methods in the same order."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        version: int,
        update_ratio: bool,
    ) -> None:
        self._trajectories, self._objective, self._update_ratio = trajectories, objective, update_ratio
        self._facts = {id(b): token_facts(b.packed, version, b.length_deciles) for b in batches}
        rewards = [t.reward or 0.0 for t in trajectories]
        self._range = {"r_min": min(0.0, *rewards), "r_max": max(1.0, *rewards)}
        self._sums = Sums()
        self._after = Sums()
        self._metrics: Metrics = {}
        self.value_losses: list[float] = []

    def values(self, batches: Sequence[MicroBatch], *, after: bool) -> None:
        """The critic's values as they are now, before or after this step's updates."""
        for b in batches:
            where = b.packed.where
            sums = self._after if after else self._sums
            critic.add(sums, b.values[where], b.targets[where], self._facts[id(b)], b.success, **self._range)

    def leak(self, b: MicroBatch, before: Tensor, after: Tensor) -> None:
        """Advantages of one micro-batch from the values before and after the updates."""
        where = b.packed.where
        critic.leak(self._sums, before[where], after[where])

    def advantages(self, batches: Sequence[MicroBatch]) -> None:
        """The advantages that the policy takes, and the lambda behind them."""
        for b in batches:
            advantages.add(self._sums, b.advantages[b.packed.where], self._facts[id(b)])
            if self._objective.critic is not None and self._objective.policy_lambda is not None:
                inputs = advantage_input(b, b.values, self._objective.settings["gamma"])
                length = self._objective.critic.length(inputs)
                advantages.add_lambda(self._sums, self._objective.policy_lambda(length), length)

    def policy(self, b: MicroBatch, inputs: PolicyLossInput, output: PolicyLossOutput, entropy: Tensor) -> None:
        """The policy loss on one micro-batch's action tokens."""
        facts: TokenFacts = self._facts[id(b)]
        off_policy.add(self._sums, inputs, output, facts, entropy)
        staleness.add(self._sums, facts)

    def move(self, who: str, model: nn.Module, optimizer: Optimizer) -> bool:
        """An optimizer step, with the sizes of its gradients and now and then of its update; False if it was skipped.

        A collective.
        """
        self._metrics |= gradients.report_norms(who, gradients.group_norms(model))
        snapshot = gradients.Snapshot(model) if self._update_ratio else None
        norm = optimizer.step()
        moved = math.isfinite(norm)
        self._metrics[f"grad/{who}"] = norm if moved else None
        self._metrics[f"clip/{who}"] = min(1.0, optimizer.clip / norm) if moved and norm > 0 else None
        self._metrics[f"lr/{who}"] = optimizer.lr
        if snapshot is not None:
            self._metrics |= gradients.report_ratios(who, snapshot.update_ratio())
        return moved

    def finish(self, kept: float) -> Metrics:
        """The whole table. A collective."""
        sums = reduce(self._sums)
        self._metrics |= batch.report(self._trajectories)
        self._metrics |= off_policy.report(sums) | staleness.report(sums) | advantages.report(sums)
        if self._objective.critic is not None:
            self._metrics |= critic.report(sums)
            self._metrics |= {f"value/mse_{k}": finite(loss) for k, loss in enumerate(self.value_losses)}
            if self._after.totals:
                self._metrics["value/ev_post"] = critic.report(reduce(self._after))["value/ev"]
        actions = sums.scalar("adv/n")
        self._metrics |= {"batch/action_tokens": actions, "dis/all_masked": float(kept == 0 and actions > 0)}
        return self._metrics

    def drift(self) -> float:
        """KL that one policy step moves through, nats: k3 of this batch per version of staleness (our estimate, for SPO)."""
        k3, age = self._metrics["kl/k3"] or 0.0, self._metrics["staleness/mean"] or 0.0
        return k3 / max(age, 1.0)


class FrozenGuard:
    """Proves now and then that the frozen parameters are bit for bit those of the start."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._at_start = gradients.frozen_checksum(model)

    def check(self) -> None:
        """Raises `InvariantError` if one moved. A collective."""
        if gradients.frozen_checksum(self._model) != self._at_start:
            raise InvariantError("a frozen parameter of the critic has moved")


def finite(x: float) -> float | None:
    """None in place of what JSON cannot hold."""
    return x if math.isfinite(x) else None


def success_of(trajectories: Sequence[Trajectory], device: torch.device) -> Tensor:
    """Reward > 0.5, [B] bool; one False for the empty micro-batch."""
    return torch.tensor([(t.reward or 0.0) > 0.5 for t in trajectories] or [False], device=device)
