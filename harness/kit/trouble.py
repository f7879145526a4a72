"""Checks of what the policy cannot cause: a sandbox that is lost or hangs, in each phase in which the task uses it."""

from __future__ import annotations

import asyncio

from harness.kit.episodes import owned
from harness.kit.play import Played, Subject
from harness.kit.verdicts import Broken, Check
from harness.kit.watch import Phase, Trouble

PHASES: tuple[Phase, ...] = ("begin", "tool", "score")
HANG_S = 1.0
"""Limit of an episode whose sandbox hangs; more where a healthy one is slower."""


async def limits(subject: Subject) -> str:
    """What hangs is ended by the limits, and an unknown verdict is not a score."""
    healthy = await owned(subject, "limits")
    wall_s = max(HANG_S, 2 * healthy.seconds)

    async def hang(phase: Phase) -> Played:
        trouble = Trouble(phase, "hangs")
        try:
            return await subject.play(healthy.task, subject.best(healthy.task), trouble, wall_s=wall_s)
        finally:
            trouble.released.set()

    used = _used(healthy)
    for phase, played in zip(used, await asyncio.gather(*map(hang, used)), strict=True):
        if played.episode is None:
            seen = played.broken or f"has not ended in {played.seconds:.0f} s"
            raise Broken(
                f"a sandbox that hangs in `{phase}`: the episode {seen}", "never catch asyncio.CancelledError: let it pass"
            )
        if phase != "tool" and played.episode.reward is not None:
            raise Broken(
                f"a sandbox that hangs in `{phase}` was scored {played.episode.reward:g}",
                "never catch asyncio.CancelledError: let it pass",
            )
    return f"a sandbox that hangs in {_and(used)} ends the episode" if used else "the sandbox is not used; every play ended"


async def lost_sandbox(subject: Subject) -> str:
    """A sandbox that is lost is an infrastructure error, never a score."""
    healthy = await owned(subject, "lost_sandbox")
    used = _used(healthy)
    for phase in used:
        played = await subject.play(healthy.task, subject.best(healthy.task), Trouble(phase, "lost"))
        if played.episode is None:
            raise Broken(f"a sandbox lost in `{phase}` broke the harness: {played.broken}", "let SandboxError pass")
        if played.episode.reward is not None:
            raise Broken(
                f"a sandbox lost in `{phase}` was scored {played.episode.reward:g}",
                "catch what the policy can cause (FileNotFoundError, an exit code), and let SandboxError pass",
            )
    return f"a sandbox lost in {_and(used)} is never scored" if used else "the sandbox is not used"


def _used(healthy: Played) -> list[Phase]:
    return [phase for phase in PHASES if healthy.notes.operations[phase]]


def _and(phases: list[Phase]) -> str:
    return " and ".join(f"`{phase}`" for phase in phases)


LIMITS = Check("limits", limits, ("begin",))
LOST = Check("lost_sandbox", lost_sandbox, ("limits", "blocking"))
