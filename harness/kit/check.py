"""`sao check NAME`: the contract suite of an environment, as a table of verdicts.

Flows in: a name, an entry point or `module:Class`, and key=value words: options of the environment, `sandbox.*` (default: plain
processes) and `limits.*`. Flows out: one `Verdict` per check. Everything is played for real, in this process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.config import LimitsConfig
from harness.configfile import overlay, overrides
from harness.kit import episodes, secrets, tasks, trouble
from harness.kit.leaks import adopting
from harness.kit.play import Subject, subject
from harness.kit.stalls import stalls
from harness.kit.verdicts import Check, Verdict
from harness.registry import config_error

LIMITS: dict[str, Any] = {"max_turns": 64, "max_context": 10**8, "max_tokens_per_turn": 10**7, "wall_s": 120.0}
"""Generous but for the clock, since a token is a byte here."""
ENDING_S = 5.0

CHECKS: tuple[Check, ...] = (
    *tasks.CHECKS,
    Check("begin", episodes.begin, ("plain_tasks",)),
    Check("episodes", episodes.episodes, ("begin",)),
    Check("turn_rewards", episodes.turn_rewards, ("begin",)),
    trouble.LIMITS,
    Check("blocking", episodes.blocking, ("episodes", "turn_rewards", "limits")),
    *episodes.CHECKS,
    secrets.SECRETS,
    trouble.LOST,
)


def check(spec: str, words: Sequence[str] = ()) -> list[Verdict]:
    """Run the suite. Raises `ConfigError` for a name, option or sandbox that cannot be had."""
    options = overrides(words)
    sandbox = overlay({"id": "process"}, options.pop("sandbox", {}))
    try:
        limits = LimitsConfig(**{**LIMITS, **options.pop("limits", {})}).limits()
    except ValidationError as error:
        raise config_error(error, LimitsConfig, "limits") from None
    with _own_temp() as folder, adopting():
        run_id = f"check-{os.getpid()}-{folder.name}"
        made = subject(spec, options, sandbox, limits, folder, run_id)
        if not made.solvable:  # every play is silence
            made.limits = replace(limits, max_turns=episodes.IDLE_TURNS)
        return _run(_suite(made))


async def _suite(subject: Subject) -> list[Verdict]:
    verdicts: dict[str, Verdict] = {}
    try:
        await subject.sandboxes.start()
        async with stalls() as found:
            subject.kept["stalls"] = found
            for each in CHECKS:
                verdicts[each.name] = await each.verdict(subject, verdicts)
    finally:
        await subject.sandboxes.close()
    return list(verdicts.values())


def passed(verdicts: Sequence[Verdict], *, without_solver: bool = False) -> bool:
    """True if every check has passed; with `without_solver` the solver's may have been skipped."""
    return all(v.outcome == "passed" or (without_solver and v.name == "solver" and v.outcome == "skipped") for v in verdicts)


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per check, and one more with the next step for what has not passed."""
    width = max(len(v.name) for v in verdicts)
    lines = []
    for v in verdicts:
        lines.append(f"{v.name:<{width}}  {v.outcome:<7}  {v.said}")
        if v.todo:
            lines.append(f"{'':<{width}}           -> {v.todo}")
    return "\n".join(lines)


def as_json(spec: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The same as one object."""
    return {"environment": spec, "checks": [asdict(v) for v in verdicts], "ok": passed(verdicts)}


@contextmanager
def _own_temp() -> Iterator[Path]:
    """A folder for this suite's temporary files, so that what is left there is this environment's."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with (
        tempfile.TemporaryDirectory(prefix="sao-check-", ignore_cleanup_errors=True) as outer,
        tempfile.TemporaryDirectory(prefix="sao-model-") as model,
    ):
        tempfile.tempdir = os.environ["TMPDIR"] = outer
        try:
            yield Path(model)
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def _run[T](job: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, but an episode that cannot be cancelled does not keep the process for ever."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(job)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=ENDING_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
