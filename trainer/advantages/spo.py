"""Single-stream policy optimization: a Beta-distributed success rate per prompt that forgets as the policy moves.

SPO, arXiv 2509.13232, the value tracker. At a visit of a prompt with reward r in [0, 1]:

    v      = alpha / (alpha + beta)              A = r - v, before the update
    rho    = clip(2^(-D / d_half), rho_min, rho_max)
    alpha <- rho * alpha + r                     beta <- rho * beta + 1 - r

with D the KL divergence that the policy moved through since the prompt's last visit. At first N0 = 1 / (1 - rho_min)
pseudo-counts say v0. The paper normalises A over the batch afterwards: `advantage_norm`. Our choices: v0 is one number for all
prompts, where the paper estimates it offline; D is a difference of accumulated drift, 0 at a first visit; several visits in one
batch count in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.advantages.types import Outcomes, State


def spo(
    outcomes: Outcomes,
    state: State,
    *,
    d_half: float = 0.06,
    rho_min: float = 0.875,
    rho_max: float = 0.96,
    v0: float = 0.5,
) -> tuple[Tensor, State]:
    """State: [alpha, beta, drift at the last visit] by prompt. d_half: nats that halve the memory.

    Raises `ValueError` for a reward outside [0, 1]: the tracker is a success rate.
    """
    trackers = dict(state)
    count = 1 / (1 - rho_min)
    advantages = []
    for reward, prompt in zip(outcomes.rewards.tolist(), outcomes.prompts, strict=True):
        if not 0 <= reward <= 1:
            raise ValueError(f"SPO tracks a success rate, and needs rewards in [0, 1]; prompt {prompt!r} got {reward}")
        alpha, beta, drift = trackers.get(prompt, (count * v0, count * (1 - v0), outcomes.drift))
        advantages.append(reward - alpha / (alpha + beta))
        rho = min(max(2.0 ** ((drift - outcomes.drift) / d_half), rho_min), rho_max)
        trackers[prompt] = [rho * alpha + reward, rho * beta + 1 - reward, outcomes.drift]
    return torch.tensor(advantages, dtype=torch.float64), trackers
