"""Checks of real episodes on a healthy sandbox: they begin alike, end, are won by the solver and by nobody else, and are judged
alike whenever and beside whatever they are played. Trouble with the sandbox is in `trouble.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from harness.engines.scripted import in_turn
from harness.errors import SaoError
from harness.kit.leaks import holdings, left_since, outside
from harness.kit.play import Played, Subject
from harness.kit.replies import answered_alike
from harness.kit.rubbish import TEXTS, rubbish_calls
from harness.kit.verdicts import Broken, Check, Skipped, short
from harness.kit.watch import Notes, WatchedEnvironment, WatchedProvider
from harness.task import Task, Termination
from harness.tools import NAME

TOGETHER = 16
IDLE_TURNS = 3


async def begin(subject: Subject) -> str:
    """Begun twice, in two fresh sandboxes, a task has the same tools and the same files."""
    subject.kept["outside"] = outside()
    (task,) = subject.tasks("train", 1)
    one, other = await begun(subject, task), await begun(subject, task)
    for schema in one.tools:
        function = schema["function"]
        if not NAME.fullmatch(function["name"]) or function["parameters"].get("type") != "object":
            raise Broken(f"tool {function['name']!r} has no callable name or no object of arguments", "use harness.tools.tool")
    names = [schema["function"]["name"] for schema in one.tools]
    if len(set(names)) < len(names):
        raise Broken(f"two tools have one name: {names}", "give each its own")
    if json.dumps(one.tools) != json.dumps(other.tools):
        raise Broken(f"task {task.id} offers other tools when it is begun again", "make them of the task alone")
    if one.written != other.written:
        wrong = sorted(k for k in one.written.keys() | other.written.keys() if one.written.get(k) != other.written.get(k))
        raise Broken(f"task {task.id} has another {wrong[0]} when it is begun again", "make the files of the task alone")
    return f"{len(names)} tools, {len(one.written)} files, the same twice"


async def begun(subject: Subject, task: Task) -> Notes:
    """What `begin` has done with a sandbox of its own."""
    notes = Notes()
    sandbox: Any = await WatchedProvider(subject.sandboxes, notes).acquire(task)
    try:
        async with asyncio.timeout(subject.limits.wall_s):
            live = await WatchedEnvironment(subject.environment, notes).begin(task, sandbox)
        await live.close()
    except TimeoutError:
        raise Broken(f"task {task.id} has not begun in {subject.limits.wall_s:g} s", "bound every wait in `begin`") from None
    except Exception as error:
        todo = (error.hint if isinstance(error, SaoError) else "") or "mend it"
        raise Broken(f"`begin` raised {type(error).__name__}: {short(error)}", todo) from error
    finally:
        await sandbox.close()
    return notes


def diagnosis(played: Played, wall_s: float) -> tuple[str, str, str] | None:
    """(name of the check that a bad episode on a healthy sandbox fails, what was seen, what to do)."""
    episode, score = played.episode, played.notes.score
    if played.raised:
        return "solver", f"the solver raised {short(played.raised)} on {played.task.id}", "correct `solver`"
    turns = [turn for turn in getattr(score, "turn_rewards", {}) if turn not in range(played.turns)]
    if turns:
        return "turn_rewards", f"turn {turns[0]} is given a reward, but there are {played.turns}", _TURN
    if episode is None:
        seen = played.broken or f"an episode with a limit of {wall_s:g} s has not ended in {played.seconds:.0f} s"
        todo = "let harness errors pass" if played.broken else "never catch asyncio.CancelledError without raising it again"
        return ("episodes" if played.broken else "limits"), seen, todo
    if episode.termination is Termination.WALL_CLOCK or "TimeoutError" in episode.error:
        return "limits", f"an episode ran into its limit of {wall_s:g} s: {episode.error or played.notes.last_call}", _BOUND
    if episode.termination is Termination.VERIFIER_ERROR:
        return "verdict", short(episode.error), "return a Score with finite rewards for whatever state it finds"
    if episode.reward is None:
        return "episodes", f"{episode.termination.value}: {short(episode.error)}", "mend what raised it"
    return None


_TURN = "take the index from harness.tools.current_turn() in the tool call"
_BOUND = "give every wait in tools and in `score` a limit of its own"


async def first(subject: Subject) -> Played:
    """The first episode, played once: the solver's, or an idle one."""
    if "first" not in subject.kept:
        (task,) = subject.tasks("train", 1)
        subject.kept["first"] = await subject.play(task, subject.best(task))
    played: Played = subject.kept["first"]
    return played


async def owned(subject: Subject, name: str) -> Played:
    """The first episode; raises `Broken` if its fault is this check's, `Skipped` if it is another's."""
    played = await first(subject)
    found = diagnosis(played, subject.limits.wall_s)
    if found is not None and found[0] == name:
        raise Broken(*found[1:])
    if found is not None:
        raise Skipped(f"`{found[0]}` comes first")
    return played


async def episodes(subject: Subject) -> str:
    """An episode on a healthy sandbox is played, and judged."""
    played = await owned(subject, "episodes")
    return f"one of {played.turns} turns in {played.seconds:.1f} s"


async def turn_rewards(subject: Subject) -> str:
    """Rewards of turns are given to turns that there were."""
    played = await owned(subject, "turn_rewards")
    given = len(played.notes.score.turn_rewards)
    return f"{given} given" if given else "none given"


async def blocking(subject: Subject) -> str:
    """Nothing blocks the event loop, in which every other episode waits."""
    await owned(subject, "blocking")
    stalls: list[str] = subject.kept["stalls"]
    if stalls:  # a busy machine can be slow once
        before = len(stalls)
        (task,) = subject.tasks("train", 1)
        await subject.play(task, subject.best(task))
        if len(stalls) > before:
            raise Broken(f"the event loop stood still at {stalls[-1]}", "await it, or put it into asyncio.to_thread")
    return "the event loop never stood still"


async def solver(subject: Subject) -> str:
    """The environment's own solver gets the full reward: the tasks can be solved."""
    if not subject.solvable:
        raise Skipped("there is no `solver`: nobody has proved that the tasks can be solved", "add `solver(task)`")
    await owned(subject, "solver")
    full = float(getattr(subject.environment, "full_reward", 1.0))
    for played in await alone(subject):
        _sound(subject, played)
        got = _total(played)
        if not math.isclose(got, full):
            raise Broken(
                f"the solver gets {got:g} of {full:g} on {played.task.id}: last call {played.notes.last_call}",
                "correct `solver` or `score`, or set `full_reward`",
            )
    return f"{full:g} on each of {len(await alone(subject))} tasks"


async def idle(subject: Subject) -> str:
    """Who does nothing gets nothing."""
    for task in subject.some():
        played = await subject.play(task, in_turn(), max_turns=IDLE_TURNS)
        _sound(subject, played)
        if _total(played) > 0:
            raise Broken(f"saying nothing gets {_total(played):g} on {task.id}", "reward what only work can bring about")
    return f"nothing for silence on {len(subject.some())} tasks"


async def verdict(subject: Subject) -> str:
    """The same play gets the same verdict, a finite one."""
    await owned(subject, "verdict")
    task = subject.some()[0]
    most = subject.limits.max_turns
    for script, what, turns in ((subject.best, "the solver's play", most), (lambda _: in_turn(), "silence", IDLE_TURNS)):
        one, other = [await subject.play(task, script(task), max_turns=turns) for _ in range(2)]
        _sound(subject, other)
        if one.verdict != other.verdict:
            raise Broken(f"{what} on {task.id} got {_said(one)}, then {_said(other)}", "judge by the final state alone")
        if not math.isfinite(other.notes.score.reward):
            raise Broken(f"the reward is {other.notes.score.reward}", "return a finite one")
    return "judged the same twice"


async def arguments(subject: Subject) -> str:
    """Whatever the model writes is answered to the model; nothing raises."""
    task = subject.some()[0]
    notes = await begun(subject, task)
    turns = [turn for schema in notes.tools for turn in rubbish_calls(schema["function"])] or list(TEXTS)
    left = iter(turns)
    said = 0

    def script(conversation: str, rng: Any) -> str:
        nonlocal said
        said += 1
        return next(left, "")

    while said < len(turns):
        played = await subject.play(task, script, max_turns=len(turns) - said)
        episode = played.episode
        if episode is None or episode.reward is None:
            seen = played.broken or (episode.error if episode else "the episode does not end")
            where = f" after {played.notes.last_call}" if played.notes.last_call else ""
            raise Broken(f"{short(seen)}{where}", "answer what the model can cause with a sentence, or judge it with 0")
        if episode.termination is Termination.WALL_CLOCK:
            raise Broken(f"{played.notes.last_call} ran into the episode's limit", _BOUND)
    return f"{len(turns)} bad turns answered"


async def clean_up(subject: Subject) -> str:
    """An episode leaves nothing behind: no sandbox, process, port, task, thread, open file, or file here or at home."""
    task = subject.some()[0]
    before = holdings()
    plays = [await subject.play(task, subject.best(task)), await subject.play(task, in_turn(), max_turns=IDLE_TURNS)]
    for played in plays:
        if played.notes.open:
            count = len(played.notes.open)
            for sandbox in list(played.notes.open):
                await sandbox.close()
            raise Broken(f"{count} sandboxes of `sandbox.fresh()` are left open", "close what `fresh` gave in a `finally`")
    for left, todo in (
        (await left_since(before), "let go of it in the live task's `close()`, which is always called"),
        (sorted(outside() - subject.kept["outside"]), "write into the sandbox; if it is another program's, check again"),
    ):
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise Broken(f"left behind: {left[0]}{more}", todo)
    return "nothing is left behind"


async def concurrency(subject: Subject) -> str:
    """Sixteen episodes at once go as they go one by one."""
    once = await alone(subject)
    if any(played.raised for played in once):
        raise Skipped("`solver` comes first")
    jobs = [once[i % len(once)] for i in range(TOGETHER)]
    together = await asyncio.gather(*(subject.play(p.task, subject.best(p.task)) for p in jobs))
    for one, other in zip(jobs, together, strict=True):
        if one.verdict != other.verdict:
            raise Broken(
                f"{one.task.id} got {_said(one)} alone and {_said(other)} among {TOGETHER}",
                "keep an episode's state in its live task and its sandbox, not in the class, the environment or a fixed path",
            )
    return f"{TOGETHER} at once are judged as one by one{await answered_alike(subject, list(zip(jobs, together, strict=True)))}"


async def alone(subject: Subject) -> list[Played]:
    """Some tasks, each played by the solver, one by one; once."""
    if "alone" not in subject.kept:
        rest = [await subject.play(task, subject.best(task)) for task in subject.some()[1:]]
        subject.kept["alone"] = [await first(subject), *rest]
    plays: list[Played] = subject.kept["alone"]
    return plays


def _sound(subject: Subject, played: Played) -> None:
    """Raises `Broken` if the episode has no verdict, whatever check meets it first."""
    found = diagnosis(played, subject.limits.wall_s)
    if found is not None:
        raise Broken(found[1] if played.raised else f"{played.task.id}: {found[1]}", found[2])


def _total(played: Played) -> float:
    """The terminal reward and those of turns."""
    return float(played.notes.score.reward + sum(played.notes.score.turn_rewards.values()))


def _said(played: Played) -> str:
    termination, reward, turns, count = played.verdict
    per_turn = f", {dict(turns)} by turn" if turns else ""
    return f"{reward} ({termination} after {count} turns{per_turn})" if termination else re.sub(r"\s+", " ", played.broken)


_PLAYED = ("episodes", "turn_rewards", "limits", "blocking")
CHECKS = (
    Check("solver", solver, ("begin",)),
    Check("idle", idle, _PLAYED),
    Check("verdict", verdict, ("begin",)),
    Check("arguments", arguments, (*_PLAYED, "verdict")),
    Check("clean_up", clean_up, _PLAYED),
    Check("concurrency", concurrency, (*_PLAYED, "verdict")),
)
