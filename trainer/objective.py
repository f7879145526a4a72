"""What a step optimises: the policy loss, the advantage estimator and the settings around them, resolved once at the start.

Flows in: the tables `[loss]`, `[advantage]`, `[algorithm]`. Flows out: functions to call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from harness.registry import load_object, plugin_config
from trainer.advantages.gae import length_adaptive_lambda
from trainer.advantages.types import AdvantageInput, CriticEstimator, Estimate, OutcomeEstimator
from trainer.advantages.whiten import whiten
from trainer.losses.types import PolicyLossInput, PolicyLossOutput


@dataclass(frozen=True, slots=True)
class Objective:
    """One arm."""

    loss: Callable[[PolicyLossInput], PolicyLossOutput]
    kind: Literal["critic", "outcome", "return"]
    critic: CriticEstimator | None
    """Of kind "critic": the recursion."""
    outcome: OutcomeEstimator | None
    """Of the other kinds: advantages, or baselines of the token returns, per episode."""
    whiten: Callable[..., Tensor]
    """`trainer.advantages.whiten.whiten`, or the same in C++."""
    policy_lambda: Callable[[Tensor], float | Tensor] | None
    """Of kind "critic": (steps of the recursion per trajectory [B]) -> lambda of the policy's advantages, one or [B]."""
    settings: dict[str, Any]
    """Fields of `AlgorithmConfig`, and `lam`, `value_clip`, `advantage_values` of `CriticConfig`."""


def build(loss: dict[str, Any], advantage: dict[str, Any], settings: dict[str, Any], compiled_gae: bool = False) -> Objective:
    """Resolve the tables. Raises `ConfigError` for what cannot be honoured."""
    loss_class, loss_options = plugin_config("loss", loss)
    advantage_class, advantage_options = plugin_config("advantage", advantage)
    options = advantage_options.model_dump()
    estimator = _load(advantage_class.function)
    critic = outcome = policy_lambda = None
    whitener: Callable[..., Tensor] = whiten
    if advantage_class.kind == "critic":
        critic, policy_lambda = estimator, _policy_lambda(**options)
        if compiled_gae:
            solve, whitener = _compiled()
            critic = replace(estimator, estimate=solve)
    else:
        outcome = functools.partial(estimator, **options)
    return Objective(
        loss=functools.partial(_load(loss_class.function), **loss_options.model_dump()),
        kind=advantage_class.kind,
        critic=critic,
        outcome=outcome,
        whiten=whitener,
        policy_lambda=policy_lambda,
        settings=settings,
    )


def _load(function: Any) -> Any:
    return load_object(function) if isinstance(function, str) else function


def _compiled() -> tuple[Callable[[AdvantageInput, float | Tensor], Estimate], Callable[..., Tensor]]:
    """Skip-observation GAE and whitening in C++. Raises `ConfigError` where there is no compiler."""
    from trainer.advantages import compiled

    compiled.load()

    def estimate(inputs: AdvantageInput, lam: float | Tensor) -> Estimate:
        packed = inputs.values, inputs.rewards, inputs.mask, inputs.cu_seqlens
        return Estimate(*compiled.solve(*packed, gamma=inputs.gamma, lam=lam, bootstrap=inputs.bootstrap))

    return estimate, compiled.whiten_


def _policy_lambda(alpha: float | None, lam: float | None) -> Callable[[Tensor], float | Tensor]:
    """Exactly one of the two is given (`trainer.advantages.catalog`)."""
    if alpha is not None:
        return functools.partial(length_adaptive_lambda, alpha=alpha)
    assert lam is not None
    return lambda lengths: lam
