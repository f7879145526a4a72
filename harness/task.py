"""A task, its limits and how an episode can end: plain data that every folder shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, overload

Split = Literal["train", "heldout"]


class Termination(StrEnum):
    """Why an episode ended (`docs/algorithm.md`, "How an episode can end")."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_CONTEXT = "max_context"
    MAX_TOKENS_PER_TURN = "max_tokens_per_turn"
    WALL_CLOCK = "wall_clock"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_ERROR = "engine_error"
    ENVIRONMENT_ERROR = "environment_error"
    VERIFIER_ERROR = "verifier_error"
    ABORTED = "aborted"

    @property
    def policy_caused(self) -> bool:
        """True if the episode keeps its reward and is trained; False if it is dropped and retried."""
        return self in _POLICY_CAUSED


_POLICY_CAUSED = frozenset(
    {
        Termination.FINISHED,
        Termination.MAX_TURNS,
        Termination.MAX_CONTEXT,
        Termination.MAX_TOKENS_PER_TURN,
        Termination.WALL_CLOCK,
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use."""

    max_turns: int = 50
    """Model calls."""
    max_context: int = 131_072
    """Tokens of prompt, actions and observations together."""
    max_tokens_per_turn: int = 8_192
    """Sampled tokens of one model call; a longer answer ends the episode."""
    wall_s: float = 3_600.0
    """Seconds for the whole episode."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one episode has used: model calls, tokens of its conversations, and those of them that were sampled."""

    turns: int
    tokens: int
    action_tokens: int


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    `id` is stable and unique within its environment; `messages` is the opening of the conversation (chat format);
    `data` belongs to the environment (files, tests, image name) and is never shown to the agent as such.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)
    image: str | None = None
    """Container image, for sandboxes that use one; None takes the sandbox's default."""


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict: `reward` in the environment's units, optional rewards of single turns, facts for the record, and files."""

    reward: float
    turn_rewards: dict[int, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Files by name that the run folder keeps beside the trajectory, such as the patch that was graded."""


class LazyTasks(Sequence[Task]):
    """A split whose tasks are made when they are asked for: `size` of them, number `index` by `make`."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def make(self, index: int) -> Task:
        """Task number `index`, from 0; the same whenever it is asked for."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(index % self.size)
