"""The held-out number of a training run: success with its 95 % interval.

Flows in: judged episodes. Flows out: `success`, `low`, `high`, `n` and `missing`. Episodes lost to infrastructure are
missing, never failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals.statistics import wilson
from harness.episode import Episode


def evaluate(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Success means a reward above 0.5."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    wins = sum(r > 0.5 for r in rewards)
    low, high = wilson(wins, len(rewards))
    return {
        "success": wins / len(rewards) if rewards else 0.0,
        "low": low,
        "high": high,
        "n": len(rewards),
        "missing": len(episodes) - len(rewards),
    }
