"""The reward minus a running mean of rewards: SAO's baselines without a critic (arXiv 2607.07508, Table 4 and section 4.5).

    prompt   A = R - mean(last 8 rewards of this prompt, before R)
    global   A = R - mean(last 128 rewards of all prompts, R included)

The paper gives the windows, and that the second includes the current reward. Our choices: the first excludes it, so that a
first visit is not 0; a prompt's first visit uses the moving average m <- .95 m + .05 R of all rewards so far, which starts at
`initial`. Episodes count in their order, also within a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.advantages.types import Outcomes, State

DECAY = 0.95


def running_mean_prompt(outcomes: Outcomes, state: State, *, window: int = 8, initial: float = 0.5) -> tuple[Tensor, State]:
    """Per prompt, exclusive."""
    return running_mean(outcomes, state, window=window, per_prompt=True, inclusive=False, initial=initial)


def running_mean_global(outcomes: Outcomes, state: State, *, window: int = 128) -> tuple[Tensor, State]:
    """Over all prompts, inclusive: the window is never empty, so nothing needs an initial value."""
    return running_mean(outcomes, state, window=window, per_prompt=False, inclusive=True, initial=0.0)


def running_mean(
    outcomes: Outcomes, state: State, *, window: int, per_prompt: bool, inclusive: bool, initial: float
) -> tuple[Tensor, State]:
    """State: `recent`, the last rewards by prompt (by "" if not `per_prompt`), and `average`, the moving average of all."""
    recent: dict[str, list[float]] = dict(state.get("recent", {}))
    average: float = state.get("average", initial)
    advantages = []
    for reward, prompt in zip(outcomes.rewards.tolist(), outcomes.prompts, strict=True):
        key = prompt if per_prompt else ""
        before = recent.get(key, [])[-window:]
        recent[key] = [*before, reward][-window:]
        seen = recent[key] if inclusive else before
        advantages.append(reward - (sum(seen) / len(seen) if seen else average))
        average = DECAY * average + (1 - DECAY) * reward
    return torch.tensor(advantages, dtype=torch.float64), {"recent": recent, "average": average}
