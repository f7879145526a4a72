"""Policy losses (specification, sections 1.3 and 5.1): the action tokens of one trajectory, nothing normalised.

Each returns one `Token` per action token. What the gradient must be is `slope`, the same -w * A for all; the value `loss` is
-w * A * log pi where the weight is a detached factor, and -ratio * A where the objective is a surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Token(NamedTuple):
    """What a loss makes of one action token."""

    keep: bool
    weight: float
    loss: float
    slope: float
    """d loss / d log pi."""


REJECTED = Token(False, 0.0, 0.0, 0.0)
Numbers = Sequence[float]


def _delta(logp: Numbers, behaviour: Numbers) -> list[float]:
    return [float(new) - float(old) for new, old in zip(logp, behaviour, strict=True)]


def _weighted(weight: float, advantage: float, logp: float) -> Token:
    return Token(True, weight, -weight * advantage * logp, -weight * advantage)


def _surrogate(ratio: float, advantage: float, low: float, high: float) -> Token:
    """-min(ratio A, clip(ratio, low, high) A), reported as 0 where the minimum is the clipped one."""
    if (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
        return REJECTED
    return Token(True, ratio, -ratio * advantage, -ratio * advantage)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _geometric_mean(deltas: list[float]) -> float:
    """exp(mean Delta); NaN, inside no band, for a sequence with a broken record: the specification gives it no ratio."""
    return _exp(sum(deltas) / len(deltas)) if deltas and all(math.isfinite(d) for d in deltas) else math.nan


def dis(logp: Numbers, behaviour: Numbers, advantages: Numbers, eps_low: float, eps_high: float) -> list[Token]:
    """Weight rho strictly inside (1 - eps_low, 1 + eps_high), no gradient elsewhere."""
    low = math.log(1.0 - eps_low) if eps_low < 1 else -math.inf
    high = math.log(1.0 + eps_high)
    found = []
    for delta, new, advantage in zip(_delta(logp, behaviour), logp, advantages, strict=True):
        inside = math.isfinite(delta) and low < delta < high
        found.append(_weighted(math.exp(delta), advantage, new) if inside else REJECTED)
    return found


def ppo_clip(logp: Numbers, behaviour: Numbers, advantages: Numbers, eps_low: float, eps_high: float) -> list[Token]:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)."""
    found = []
    for delta, advantage in zip(_delta(logp, behaviour), advantages, strict=True):
        finite = math.isfinite(delta)
        found.append(_surrogate(_exp(delta), advantage, 1 - eps_low, 1 + eps_high) if finite else REJECTED)
    return found


def gspo(logp: Numbers, behaviour: Numbers, advantages: Numbers, eps_low: float, eps_high: float) -> list[Token]:
    """GSPO-token: every token has the ratio s = exp(mean Delta) of its sequence, and the gradient of its own log pi."""
    s = _geometric_mean(_delta(logp, behaviour))
    found = []
    for advantage in advantages:
        found.append(REJECTED if math.isnan(s) else _surrogate(s, advantage, 1 - eps_low, 1 + eps_high))
    return found


def cispo(logp: Numbers, behaviour: Numbers, advantages: Numbers, eps_high: float) -> list[Token]:
    """Weight min(rho, 1 + eps_high); no token is dropped."""
    return tis(logp, behaviour, advantages, 1 + eps_high)


def tis(logp: Numbers, behaviour: Numbers, advantages: Numbers, cap: float) -> list[Token]:
    """Weight min(rho, cap); no token is dropped."""
    found = []
    for delta, new, advantage in zip(_delta(logp, behaviour), logp, advantages, strict=True):
        weight = math.exp(min(delta, math.log(cap))) if math.isfinite(delta) else 0.0
        found.append(_weighted(weight, advantage, new) if math.isfinite(delta) else REJECTED)
    return found


def mis(logp: Numbers, behaviour: Numbers, advantages: Numbers, low: float, high: float) -> list[Token]:
    """Weight rho where low <= rho <= high, no gradient elsewhere (IcePop)."""
    found = []
    for delta, new, advantage in zip(_delta(logp, behaviour), logp, advantages, strict=True):
        inside = math.isfinite(delta) and low <= _exp(delta) <= high
        found.append(_weighted(math.exp(delta), advantage, new) if inside else REJECTED)
    return found


def sequence_rejection(logp: Numbers, behaviour: Numbers, advantages: Numbers, low: float, high: float) -> list[Token]:
    """Weight 1 on the whole trajectory where low <= exp(mean Delta) <= high, no gradient elsewhere."""
    inside = low <= _geometric_mean(_delta(logp, behaviour)) <= high
    found = []
    for new, advantage in zip(logp, advantages, strict=True):
        found.append(_weighted(1.0, advantage, new) if inside else REJECTED)
    return found
