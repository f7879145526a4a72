"""Every failure has a type that says who caused it, because that decides what happens to the episode.

SaoError
├── ConfigError          the user can fix it: field, value, next step; no traceback is shown
├── InvariantError       a bug or corrupt data: the run stops
├── InfrastructureError  the policy could not have caused it: the episode is retried or dropped, never scored 0
│   ├── SandboxError     container or process lost, image missing, disk full
│   ├── EngineError      the inference engine failed, or answered something inexact
│   ├── EnvironmentFault an environment's own code raised (set-up, tool)
│   └── VerifierFault    the grader failed: the verdict is unknown
├── LearnerError         the trainer process failed: the run stops with everything recorded
└── EpisodeEnd           the policy caused it: the episode ends, is judged and trained (carries the termination reason)
"""

from __future__ import annotations

from harness.task import Termination


class SaoError(Exception):
    """Base class. `hint` is the next step for the user, shown on a line of its own."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(SaoError):
    """A setting, file or argument that the user can correct."""


class InvariantError(SaoError):
    """Data that breaks an invariant of `docs/architecture.md`; never repaired silently."""


class InfrastructureError(SaoError):
    """Not caused by the policy. `termination` is the recorded cause of the drop."""

    termination = Termination.ENVIRONMENT_ERROR


class SandboxError(InfrastructureError):
    """The sandbox was lost or could not be made."""

    termination = Termination.SANDBOX_LOST


class EngineError(InfrastructureError):
    """The inference engine failed."""

    termination = Termination.ENGINE_ERROR


class EnvironmentFault(InfrastructureError):
    """An environment's own code raised; the original exception is the cause."""

    termination = Termination.ENVIRONMENT_ERROR


class VerifierFault(InfrastructureError):
    """The grader itself failed; its verdict is unknown."""

    termination = Termination.VERIFIER_ERROR


class LearnerError(SaoError):
    """The trainer process failed or answered an error; the run stops with everything recorded."""


class EpisodeEnd(SaoError):
    """The policy reached a limit: the episode is over and still counts."""

    def __init__(self, termination: Termination, message: str = "") -> None:
        super().__init__(message or termination.value)
        self.termination = termination
