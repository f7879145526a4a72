"""Who reads when: the stream of tasks, in phases that each prefer one style.

Flows out: `Task`s. A task is a pure function of (form, split, seed, index, phases), its phase included: the training split is a
stream that RL draws in order, so the preference switches after so many episodes, also in a resumed run, and a task that is
played again is judged as the first time. Held-out tasks take the phases in turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from environments.online_writing import symbols, texts
from environments.online_writing.verdict import Style
from harness.task import LazyTasks, Split, Task

Form = Literal["symbols", "texts"]


class Phase(BaseModel):
    """A time of one preference."""

    model_config = ConfigDict(extra="forbid")

    preferred: Style
    candidates: list[Style] = Field(min_length=3, max_length=3)
    """What the prompt offers, in random order."""
    episodes: int = Field(ge=1)
    """Training episodes; policy steps x `algorithm.batch`."""

    @model_validator(mode="after")
    def _offered(self) -> Phase:
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError("a candidate is named twice")
        if self.preferred not in self.candidates:
            raise ValueError(f"`preferred` = {self.preferred!r} is not among the candidates")
        return self


def paper_phases() -> list[Phase]:
    """The paper's three, 150 steps of 16 episodes each; training ends in the last one, after 120."""
    before: list[Style] = ["academic", "cute", "chuunibyou"]
    after: list[Style] = ["classical", "cute", "chuunibyou"]
    return [
        Phase(preferred="cute", candidates=before, episodes=2_400),
        Phase(preferred="chuunibyou", candidates=before, episodes=2_400),
        Phase(preferred="classical", candidates=after, episodes=2_400),
    ]


def phase_of(index: int, phases: Sequence[Phase]) -> int:
    """The phase of training task `index`."""
    return next(number for number, end in enumerate(accumulate(p.episodes for p in phases)) if index < end)


def make_task(form: Form, split: Split, seed: int, index: int, phases: Sequence[Phase]) -> Task:
    """Task number `index` of a split."""
    number = phase_of(index, phases) if split == "train" else index % len(phases)
    phase = phases[number]
    rng = random.Random(f"online_writing/{form}/{split}/{seed}/{index}")
    if form == "symbols":
        candidates, topic = rng.choice(symbols.prompts(phase.candidates, held_out=split == "heldout"))
        messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": symbols.prompt(candidates, topic)},)
    else:
        topic = rng.choice(texts.TOPICS[split])
        candidates = tuple(rng.sample(phase.candidates, len(phase.candidates)))
        messages = texts.messages(candidates, topic, rng)
    return Task(
        id=f"online_writing/{form}/{split}/{seed}/{index}",
        messages=messages,
        data={"phase": number, "preferred": phase.preferred, "candidates": list(candidates), "topic": topic},
    )


class WritingTasks(LazyTasks):
    """A split. The training split is `ordered` (`harness.protocols.Environment.tasks`)."""

    def __init__(self, form: Form, split: Split, seed: int, phases: Sequence[Phase], size: int) -> None:
        super().__init__(size)
        self.form, self.split, self.seed, self.phases = form, split, seed, phases
        self.ordered = split == "train"

    def make(self, index: int) -> Task:
        """See `LazyTasks`."""
        return make_task(self.form, self.split, self.seed, index, self.phases)
