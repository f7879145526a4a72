"""The four styles, and what a judge says about one piece of writing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, get_args

Style = Literal["academic", "cute", "chuunibyou", "classical"]
STYLES: tuple[Style, ...] = get_args(Style)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two binary judgements; the reward is their product."""

    style: bool
    """Written in the preferred style."""
    quality: bool
    """Complete, about the topic, and no padding."""
    written: Style | None = None
    """The style that it is written in, where the judge can tell."""

    @property
    def reward(self) -> float:
        """1 if both, else 0."""
        return float(self.style and self.quality)


Judge = Callable[[str, str, Style], Awaitable[Verdict]]
"""(reply, topic, preferred style) -> verdict. Raises `VerifierFault` where there is none."""
