"""What the trajectories of a batch say by themselves: the same on every rank, without a collective.

The unit is the episode: its segments (forks of a rewritten history) count together and its verdict once. Success: reward > 0.5.
A turn is a model call.

| name | formula |
|---|---|
| `reward/finished`, `reward/max_turns`, .. | mean reward of the episodes with that termination |
| `rollout/truncated` | share of episodes that a limit ended |
| `rollout/truncated_max_turns`, `_max_context`, `_max_tokens_per_turn`, `_wall_clock` | share that this limit ended |
| `rollout/turns`, `rollout/action_tokens`, `rollout/observation_tokens` | means per episode |
| `rollout/action_frac` | f = action tokens / tokens of the batch |
| `rollout/success_turns_le_2`, `_le_5`, `_le_10`, `_gt_10` | success of the episodes with 1-2, 3-5, 6-10, 11 and more turns |
| `rollout/repeated_4gram` | share of the 4-grams inside turns that occurred before in the same trajectory |
| `rollout/malformed_call_rate`, `rollout/tool_error_rate` | sum of info["malformed_calls"], info["tool_errors"] per turn |
| `batch/episodes`, `batch/unique_prompts` | numbers of episodes, of tasks |

The two rates are over the episodes that carry the fact; absent if none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from harness.task import Termination
from harness.trajectory import Trajectory
from trainer.measure.sums import Metrics, divide, finite

LIMITS = tuple(t for t in Termination if t.policy_caused and t is not Termination.FINISHED)
_TURNS = (("le_2", 1, 2), ("le_5", 3, 5), ("le_10", 6, 10), ("gt_10", 11, float("inf")))
_RATES = {"malformed_calls": "rollout/malformed_call_rate", "tool_errors": "rollout/tool_error_rate"}


def report(trajectories: Sequence[Trajectory]) -> Metrics:
    """Of the whole batch, all segments of an episode included."""
    by_episode: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        by_episode.setdefault(t.episode_id, []).append(t)
    episodes = list(by_episode.values())
    heads = [segments[0] for segments in episodes]
    n = len(episodes)
    turns = [sum(t.n_turns for t in segments) for segments in episodes]
    rewards = [t.reward or 0.0 for t in heads]
    endings = [t.info.get("termination") for t in heads]
    actions, tokens = sum(t.n_actions for t in trajectories), sum(len(t) for t in trajectories)

    metrics = {
        "rollout/truncated": divide(sum(e in LIMITS for e in endings), n),
        "rollout/turns": divide(sum(turns), n),
        "rollout/action_tokens": divide(actions, n),
        "rollout/observation_tokens": divide(tokens - actions, n),
        "rollout/action_frac": divide(actions, tokens),
        "rollout/repeated_4gram": _repeated(trajectories),
        "batch/episodes": float(n),
        "batch/unique_prompts": float(len({t.task_id for t in heads})),
    }
    for limit in LIMITS:
        metrics[f"rollout/truncated_{limit}"] = divide(endings.count(limit), n)
    for ending in (Termination.FINISHED, *LIMITS):
        metrics[f"reward/{ending}"] = _mean(r for r, e in zip(rewards, endings, strict=True) if e == ending)
    for name, least, most in _TURNS:
        won = (r > 0.5 for r, k in zip(rewards, turns, strict=True) if least <= k <= most)
        metrics[f"rollout/success_turns_{name}"] = _mean(won)
    for fact, name in _RATES.items():
        known = [(t.info[fact], k) for t, k in zip(heads, turns, strict=True) if fact in t.info]
        if known:
            metrics[name] = divide(sum(count for count, _ in known), sum(k for _, k in known))
    return finite(metrics)


def _mean(x: Iterable[float]) -> float:
    values = list(x)
    return divide(sum(values), len(values))


def _repeated(trajectories: Sequence[Trajectory]) -> float:
    counts = [four_grams(t) for t in trajectories]
    return divide(sum(n - distinct for n, distinct in counts), sum(n for n, _ in counts))


def four_grams(t: Trajectory) -> tuple[int, int]:
    """(4-grams of action tokens, none across two turns; distinct ones among them)."""
    mask = t.loss_mask
    tokens, turns = t.tokens[mask].astype(np.int64), t.turn_ids[mask]
    if len(tokens) < 4:
        return 0, 0
    # Two int64 keys in turn: a pair of tokens becomes an id, and two of those ids are a 4-gram.
    pairs = np.unique((tokens[:-1] << 32) | tokens[1:], return_inverse=True)[1]
    grams = ((pairs[:-2] << 32) | pairs[2:])[turns[:-3] == turns[3:]]
    return len(grams), len(np.unique(grams))
