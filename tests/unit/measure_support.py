"""Random ragged batches and what the step measures of them; also for two ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.trajectory import Trajectory, TrajectoryBuilder
from trainer.batch import pack
from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput
from trainer.measure import advantages, critic, off_policy, staleness
from trainer.measure.sums import Metrics, Sums, reduce
from trainer.measure.tokens import TokenFacts, length_deciles, token_facts

BAND = {"eps_low": 0.3, "eps_high": 5.0}
VERSION = 14
Token = dict[str, Any]


@dataclass
class Case:
    """Trajectories, and per trajectory the columns of its action tokens."""

    trajectories: list[Trajectory]
    columns: list[dict[str, Tensor]]
    lam: list[float]

    @property
    def deciles(self) -> list[int]:
        return length_deciles([t.n_actions for t in self.trajectories])

    def inputs(self, rows: list[int]) -> tuple[TokenFacts, dict[str, Tensor]]:
        """What the step has of one micro-batch."""
        facts = token_facts(pack([self.trajectories[i] for i in rows]), VERSION, [self.deciles[i] for i in rows])
        names = self.columns[0]
        return facts, {n: torch.cat([torch.zeros(0), *(self.columns[i][n] for i in rows)]) for n in names}

    def tokens(self) -> list[Token]:
        """All action tokens as plain numbers."""
        out = []
        for row, (t, columns) in enumerate(zip(self.trajectories, self.columns, strict=True)):
            where = np.flatnonzero(t.loss_mask)
            for j, i in enumerate(where.tolist()):
                token = {name: float(x[j]) for name, x in columns.items()} | {"row": row, "j": j, "l": len(where)}
                token["s"] = VERSION - int(t.policy_versions[i])
                token["delta"] = float(columns["logprobs"][j] - columns["rollout"][j])
                token["turn_first"] = i == 0 or t.turn_ids[i - 1] != t.turn_ids[i]
                token["keep"] = math.log(0.7) < token["delta"] < math.log(6.0)
                token["success"] = (t.reward or 0.0) > 0.5
                out.append(token)
        return out


def case(seed: int, n: int = 7, longest: int = 9) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    trajectories, columns = [], []
    for i in range(n):
        builder = TrajectoryBuilder()
        builder.observe([1] * rng.randint(1, 4))
        version = rng.randint(2, VERSION)
        for _ in range(rng.randint(1, 5)):
            k = rng.randint(1, longest)
            versions = [version := min(VERSION, version + (rng.random() < 0.2)) for _ in range(k)]
            builder.act([rng.randrange(3) for _ in range(k)], [-rng.random() for _ in range(k)], versions)
            if rng.random() < 0.7:
                builder.observe([1] * rng.randint(1, 3))
        ending = rng.choice(["finished", "max_turns", "wall_clock"])
        made = builder.build(
            f"e{i}", f"task{rng.randrange(4)}", reward=rng.choice([0.0, 0.4, 1.0]), info={"termination": ending}
        )
        count = made.n_actions
        draw: Callable[..., Tensor] = lambda f, k=count: f(k, generator=generator)  # noqa: E731
        rollout = -3 * draw(torch.rand)
        trajectories.append(made)
        columns.append(
            {
                "rollout": rollout,
                "logprobs": rollout + draw(torch.randn) * (draw(torch.rand) < 0.7),
                "advantages": draw(torch.randn) * (draw(torch.rand) < 0.9),
                "post": draw(torch.randn),
                "values": draw(torch.randn) * 0.4 + 0.5,
                "targets": draw(torch.rand),
                "entropy": draw(torch.rand),
            }
        )
    return Case(trajectories, columns, [rng.random() for _ in range(n)])


def measured(made: Case, *micro_batches: list[int]) -> Metrics:
    sums = Sums()
    for rows in micro_batches:
        facts, x = made.inputs(rows)
        inputs = PolicyLossInput(x["logprobs"], x["rollout"], x["advantages"], torch.ones_like(x["rollout"], dtype=torch.bool))
        off_policy.add(sums, inputs, dis_loss(inputs, **BAND), facts, x["entropy"])
        staleness.add(sums, facts)
        success = torch.tensor([(made.trajectories[i].reward or 0.0) > 0.5 for i in rows], dtype=torch.bool)
        critic.add(sums, x["values"], x["targets"], facts, success, r_min=0.0, r_max=1.0)
        critic.leak(sums, x["advantages"], x["post"])
        advantages.add(sums, x["advantages"], facts)
        lam = torch.tensor([made.lam[i] for i in rows] or [0.0], dtype=torch.float64)
        advantages.add_lambda(sums, lam, facts.counts)
    sums = reduce(sums)
    return off_policy.report(sums) | staleness.report(sums) | critic.report(sums) | advantages.report(sums)


def plain_facts(counts: list[int], staleness: list[int] | None = None) -> TokenFacts:
    """Trajectories of single turns."""
    ages = iter(staleness or [0] * sum(counts))
    made = []
    for n in counts:
        builder = TrajectoryBuilder()
        builder.observe([1])
        builder.act([1] * n, [-1.0] * n, [VERSION - next(ages) for _ in range(n)])
        made.append(builder.build("e", "t", reward=1.0))
    return token_facts(pack(made), VERSION, length_deciles(counts))


def same(got: Metrics, expected: dict[str, Any], rel: float = 1e-6) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        if x is None or not math.isfinite(x):
            assert got[name] is None, name
        else:
            assert got[name] == pytest.approx(x, rel=rel, abs=1e-7), name
