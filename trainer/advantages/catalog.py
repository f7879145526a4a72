"""The advantage estimators by name: what each is, where its function lies, and its options. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Options(BaseModel):
    """The options of an estimator; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Estimator:
    """What every entry says."""

    kind: ClassVar[Literal["critic", "outcome", "return"]]
    """A recursion over a critic's values, one advantage per episode, or a whitened return (`trainer.advantages.types`)."""
    function: ClassVar[str]
    """`module:attribute` of a `CriticEstimator`, or of a function that takes the options as keywords."""
    groups: ClassVar[bool] = False
    """Whether it needs several episodes of one prompt in a batch."""
    Config: ClassVar[type[Options]] = Options


class Critic(Estimator):
    """A recursion over values with the policy's lambda: length-adaptive, or fixed."""

    kind = "critic"

    class Config(Options):
        """Exactly one of the two; `lam` alone switches `alpha` off."""

        alpha: float | None = Field(1.5, gt=0)
        """lambda = 1 - 1 / (alpha * l) per trajectory of l steps."""
        lam: float | None = Field(None, ge=0, le=1)
        """One lambda for all trajectories."""

        @model_validator(mode="after")
        def _exactly_one(self) -> Self:
            if self.lam is not None and "alpha" not in self.model_fields_set:
                self.alpha = None
            if (self.alpha is None) == (self.lam is None):
                raise ValueError("give either `alpha` (length-adaptive lambda) or `lam` (a fixed one)")
            return self


class SkipObservation(Critic):
    """Token-level GAE over action tokens: SAO."""

    function = "trainer.advantages.gae:SKIP_OBSERVATION"


class ThroughObservation(Critic):
    """Token-level GAE over action and observation tokens."""

    function = "trainer.advantages.through:THROUGH_OBSERVATIONS"


class StepAverage(Critic):
    """GAE over turns; a turn's value is the mean of its tokens'."""

    function = "trainer.advantages.step:STEP_AVERAGE"


class StepLast(Critic):
    """GAE over turns; a turn's value is its last token's."""

    function = "trainer.advantages.step:STEP_LAST"


class Grpo(Estimator):
    """Reward normalised within its group."""

    kind = "outcome"
    function = "trainer.advantages.group:group_normalised"
    groups = True

    class Config(Options):
        """Which standard deviation."""

        std: Literal["population", "sample"] = "population"


class Rloo(Estimator):
    """Reward minus the mean of the group's others."""

    kind = "outcome"
    function = "trainer.advantages.group:leave_one_out"
    groups = True


class DrGrpo(Estimator):
    """Reward minus the mean of its group."""

    kind = "outcome"
    function = "trainer.advantages.group:group_centred"
    groups = True


class RunningMeanPrompt(Estimator):
    """Reward minus the mean of the prompt's last ones."""

    kind = "outcome"
    function = "trainer.advantages.running_mean:running_mean_prompt"

    class Config(Options):
        """The window, and what the mean of all rewards starts at."""

        window: int = Field(8, ge=1)
        initial: float = 0.5


class RunningMeanGlobal(Estimator):
    """Reward minus the mean of the last ones of all prompts, itself included."""

    kind = "outcome"
    function = "trainer.advantages.running_mean:running_mean_global"

    class Config(Options):
        """The window."""

        window: int = Field(128, ge=1)


class Spo(Estimator):
    """Reward minus a success rate that is tracked per prompt."""

    kind = "outcome"
    function = "trainer.advantages.spo:spo"

    class Config(Options):
        """How fast the tracker forgets, and where it starts."""

        d_half: float = Field(0.06, gt=0)
        """KL in nats that halves the memory."""
        rho_min: float = Field(0.875, ge=0, lt=1)
        rho_max: float = Field(0.96, ge=0, le=1)
        v0: float = Field(0.5, ge=0, le=1)

        @model_validator(mode="after")
        def _ordered(self) -> Self:
            if self.rho_min > self.rho_max:
                raise ValueError("`rho_min` is above `rho_max`")
            return self


class BatchNorm(Estimator):
    """Reward normalised over the batch."""

    kind = "outcome"
    function = "trainer.advantages.batch_norm:batch_normalised"


class ReinforcePP(Estimator):
    """Whitened discounted return."""

    kind = "return"
    function = "trainer.advantages.reinforce:no_baseline"


class ReinforcePPBaseline(Estimator):
    """Whitened discounted return minus the mean reward of the group."""

    kind = "return"
    function = "trainer.advantages.reinforce:group_baseline"
    groups = True
