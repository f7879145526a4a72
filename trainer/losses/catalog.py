"""The policy losses as plug-ins: where the function is, which denominator its paper uses, which options it takes.

No torch here, so that a configuration is validated on a machine without it. `Config` has exactly the keyword options of the
function; ratios are plain numbers (1 = on-policy), bounded so that their exponentials stay finite in fp32.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Norm = Literal["token_global", "token_kept", "seq_mean", "seq_sum_const"]
"""Action tokens of the global batch; kept ones; mean over trajectories of token means; trajectories times a constant length."""
Behaviour = Literal["rollout", "trainer"]
"""As `trainer.losses.types.Behaviour`."""
Ratio = Annotated[float, Field(gt=0, le=1e9)]


class Options(BaseModel):
    """Base of the options: unknown names and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Band(Options):
    """Options `low` and `high` of a band."""

    low: Ratio
    high: Ratio

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


class Dis:
    """SAO's direct importance sampling: an open band around the engine's policy."""

    function: ClassVar[str] = "trainer.losses.dis:dis_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Options):
        """Tokens with 1 - eps_low < rho < 1 + eps_high train; eps_low >= 1: no lower bound."""

        eps_low: Ratio = 0.8
        eps_high: Ratio = 3.0


class PpoClip:
    """PPO's clipped surrogate."""

    function: ClassVar[str] = "trainer.losses.ppo_clip:ppo_clip_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Options):
        """Clipped to [1 - eps_low, 1 + eps_high]; old: the policy below the ratio."""

        eps_low: Ratio = 0.2
        eps_high: Ratio = 0.2
        old: Behaviour = "trainer"


class Grpo:
    """The clipped surrogate as GRPO averages it."""

    function: ClassVar[str] = "trainer.losses.grpo:grpo_loss"
    norm: ClassVar[Norm] = "seq_mean"

    class Config(PpoClip.Config):
        """As PPO's."""


class DrGrpo:
    """The clipped surrogate as Dr. GRPO sums it."""

    function: ClassVar[str] = "trainer.losses.dr_grpo:dr_grpo_loss"
    norm: ClassVar[Norm] = "seq_sum_const"

    class Config(PpoClip.Config):
        """As PPO's."""


class Dapo:
    """The clipped surrogate with clip-higher, as DAPO averages it."""

    function: ClassVar[str] = "trainer.losses.dapo:dapo_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(PpoClip.Config):
        """As PPO's, with a wider upper bound."""

        eps_high: Ratio = 0.28


class Gspo:
    """One clipped ratio per trajectory."""

    function: ClassVar[str] = "trainer.losses.gspo:gspo_loss"
    norm: ClassVar[Norm] = "seq_mean"

    class Config(Options):
        """Clipped to [1 - eps_low, 1 + eps_high], in units of the sequence ratio; old: the policy below the ratio."""

        eps_low: Ratio = 3e-4
        eps_high: Ratio = 4e-4
        old: Behaviour = "rollout"


class Cispo:
    """The weight is clipped, no token dropped."""

    function: ClassVar[str] = "trainer.losses.cispo:cispo_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Options):
        """Weights up to 1 + eps_high; old: the policy below the ratio."""

        eps_high: Ratio = 0.28
        old: Behaviour = "rollout"


class Tis:
    """Truncated importance sampling."""

    function: ClassVar[str] = "trainer.losses.tis:tis_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Options):
        """Weights up to cap."""

        cap: Ratio = 2.0


class Mis:
    """Masked importance sampling (IcePop): a closed band."""

    function: ClassVar[str] = "trainer.losses.mis:mis_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Band):
        """Tokens with low <= rho <= high train."""

        low: Ratio = 0.5
        high: Ratio = 5.0


class SequenceRejection:
    """Whole trajectories by their mean log-ratio."""

    function: ClassVar[str] = "trainer.losses.sequence_rejection:sequence_rejection_loss"
    norm: ClassVar[Norm] = "token_global"

    class Config(Band):
        """Trajectories with low <= exp(mean log-ratio) <= high train."""

        low: Ratio = 0.999
        high: Ratio = 1.002
