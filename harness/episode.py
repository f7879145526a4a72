"""One episode: sandbox, environment, agent, verdict. A bad episode is a result, never an exception.

Flows in: a task and the plug-ins. Flows out: an `Episode` with its trajectories, why it ended, and who caused it: what the
policy can cause keeps its reward, what it cannot (lost sandbox, dead engine, crashed grader) has none and is retried by the
scheduler.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.errors import EnvironmentFault, EpisodeEnd, InfrastructureError, SandboxError, SaoError, VerifierFault
from harness.protocols import Agent, ChatSession, Environment, Sandbox, SandboxProvider
from harness.task import Limits, Score, Task, Termination, Usage
from harness.tools import turn_of_episode
from harness.trajectory import Trajectory

log = logging.getLogger("sao")


@dataclass(frozen=True, slots=True)
class Episode:
    """How one episode went."""

    id: str
    task_id: str
    termination: Termination
    trajectories: tuple[Trajectory, ...] = ()
    reward: float | None = None
    error: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Files of the verdict, by name."""
    usage: Usage | None = None
    """Of a session that counts it; None: it is that of the trajectories."""

    @property
    def used(self) -> Usage:
        """What the episode has used."""
        made = self.trajectories
        return self.usage or Usage(
            turns=sum(t.n_turns for t in made), tokens=sum(map(len, made)), action_tokens=sum(t.n_actions for t in made)
        )

    @property
    def trainable(self) -> bool:
        """True if it was judged and the policy said something."""
        return self.reward is not None and any(t.n_actions for t in self.trajectories)


class Session(ChatSession, Protocol):
    """The model of one episode: a `TokenSession`, or one that only talks.

    An attribute `usage`, where there is one, is what the episode has used.
    """

    @property
    def turns(self) -> int:
        """Model calls answered."""
        ...

    def restore(self) -> None:
        """Take up what an earlier process recorded in the folder."""
        ...

    def trajectories(self, task_id: str, info: dict[str, Any]) -> tuple[Trajectory, ...]:
        """What was recorded, without reward; empty where nothing is."""
        ...


Sessions = Callable[[str, int | None], Session]
"""(episode id, seed) -> a fresh session."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The plug-ins that every episode of a run shares."""

    environment: Environment
    agent: Agent
    sandboxes: SandboxProvider
    limits: Limits
    session: Sessions


@contextmanager
def boundary(fault: type[InfrastructureError], what: str) -> Iterator[None]:
    """Code of a plug-in: anything but the harness's own errors becomes `fault`, with the original as its cause."""
    try:
        yield
    except SaoError:
        raise
    except Exception as error:
        raise fault(f"{what}: {type(error).__name__}: {error}") from error


async def run_episode(stage: Stage, task: Task, episode_id: str, seed: int | None = None, *, resume: bool = False) -> Episode:
    """Play and judge one episode. Cancellation, `ConfigError` and `InvariantError` pass through.

    With `resume` it goes on where a killed process stood: same sandbox, same tokens. That needs the folder of its session, and
    a provider and an environment that can (`adopt`, `rejoin`); it is lost as any other episode if the sandbox is.
    """
    session = stage.session(episode_id, seed)
    start = time.monotonic()
    sandbox: Sandbox | None = None
    live: Any = None
    turn_of_episode.set(lambda: session.turns - 1)
    try:
        limit = stage.limits.wall_s
        with boundary(SandboxError, f"{task.id}: sandbox"):
            place = _place(session) if resume else None
            async with asyncio.timeout(limit):
                provider: Any = stage.sandboxes
                sandbox = await (provider.acquire(task) if place is None else provider.adopt(task, place["sandbox"]))
                assert sandbox is not None
        with boundary(EnvironmentFault, f"{task.id}: begin"):
            async with asyncio.timeout(limit):
                environment: Any = stage.environment
                if place is None:
                    live = await environment.begin(task, sandbox)
                    _leave_word(session, sandbox, live)
                else:
                    live = await environment.rejoin(task, sandbox, place["state"])
        termination = await _act(stage, task, live, sandbox, session)
        if not termination.policy_caused:
            return Episode(episode_id, task.id, termination, error="the agent gave up")
        with boundary(VerifierFault, f"{task.id}: score"):
            async with asyncio.timeout(getattr(live, "score_s", limit)):
                score = _sound(await live.score())
    except InfrastructureError as error:
        return Episode(episode_id, task.id, error.termination, error=_chain(error))
    finally:
        if hasattr(live, "close"):
            await _close_task(live, stage.limits.wall_s)
        if sandbox is not None:
            await _close(sandbox)
        if session.folder is not None:
            shutil.rmtree(session.folder, ignore_errors=True)
    info = {**score.info, "termination": termination.value, "wall_s": round(time.monotonic() - start, 4)}
    trajectories = tuple(
        t.judged(score.reward, score.turn_rewards if t.segment == 0 else None) for t in session.trajectories(task.id, info)
    )
    usage = getattr(session, "usage", None)
    return Episode(
        episode_id, task.id, termination, trajectories, score.reward, info=info, artifacts=score.artifacts, usage=usage
    )


PLACE = "place.json"


def _leave_word(session: Session, sandbox: Any, live: Any) -> None:
    """Say in the session's folder where another process finds this episode, if one can take it up."""
    if session.folder is not None and hasattr(sandbox, "name") and hasattr(live, "state"):
        session.folder.mkdir(parents=True, exist_ok=True)
        part = session.folder / f"{PLACE}.part"
        part.write_text(json.dumps({"sandbox": sandbox.name, "state": live.state()}))
        os.replace(part, session.folder / PLACE)


def _place(session: Session) -> dict[str, Any]:
    """Where an earlier process has left the episode; the session is restored, and counts that. Raises `SandboxError` if it
    left no word."""
    if session.folder is None or not (session.folder / PLACE).is_file():
        raise SandboxError(f"episode {session.episode_id} cannot be resumed: it left no word of its sandbox")
    place: dict[str, Any] = json.loads((session.folder / PLACE).read_text())
    session.restore()
    session.count("resumed")
    return place


async def _act(stage: Stage, task: Task, live: Any, sandbox: Sandbox, session: Session) -> Termination:
    try:
        async with asyncio.timeout(stage.limits.wall_s):
            with boundary(EnvironmentFault, f"{task.id}: agent"):
                return Termination(await stage.agent.run(task, live, sandbox, session, stage.limits))
    except EpisodeEnd as end:
        return end.termination
    except TimeoutError:
        return Termination.WALL_CLOCK


def _sound(score: Score) -> Score:
    """The verdict, if it can be trained on and stored. Raises `TypeError` or `ValueError`, as a broken grader would."""
    if not isinstance(score, Score):
        raise TypeError(f"the verdict is not a Score but {score!r}")
    rewards = [score.reward, *score.turn_rewards.values()]
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward is not finite: {rewards}")
    json.dumps(score.info)
    return score


async def _close(sandbox: Sandbox) -> None:
    """Close it to the end, even if cancelled meanwhile; what cannot be removed now is removed with the run."""
    try:
        await asyncio.shield(sandbox.close())
    except InfrastructureError as error:
        log.warning("a sandbox could not be closed: %s", error)


async def _close_task(live: Any, limit: float) -> None:
    """Let a live task go, even if cancelled meanwhile. What it raises there changes no verdict: it is logged."""

    async def close() -> None:
        try:
            async with asyncio.timeout(limit):
                await live.close()
        except Exception:  # code of a plug-in
            log.warning("a task could not be closed", exc_info=True)

    await asyncio.shield(close())


def _chain(error: BaseException) -> str:
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None and len(lines) < 5:
        lines.append(f"{type(current).__name__}: {current}")
        current = current.__cause__
    return " <- ".join(lines)
