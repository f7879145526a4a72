"""Is a task what it says? Played before it is ever trained on.

Flows in: a row, a sandbox provider. Flows out: a `Verdict`. In the untouched image (a no-op) every FAIL_TO_PASS test must
fail and every PASS_TO_PASS test pass; with the gold patch all must pass and pytest must exit 0; in three runs each, under
different hash seeds. One of the three is the judge of the training itself, in a container of its own: it must not resolve
the no-op and must resolve the gold patch. The others share a container: what an earlier run leaves can only make them
differ, and a difference rejects. A row that our pytest cannot run is judged three times by its own script instead.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from environments.swe.factory.running import Limits, Run, run_tests
from environments.swe.factory.tasks import ORIGIN
from environments.swe.grading import GradingLimits, grade
from environments.swe.prepare import probe, whole
from environments.swe.rows import SweRow
from harness.errors import SandboxError
from harness.protocols import Sandbox, SandboxProvider
from harness.task import Task

SEEDS = (1, 4242)
"""Beside 0, the judge's."""
COMMAND_S = 60.0
PATCH = "/tmp/sao-factory/patch"


@dataclass(slots=True)
class Verdict:
    """Valid, or the first reason why not."""

    instance_id: str
    valid: bool = False
    reason: str = ""
    """hangs, survived, pass_to_pass, gold_fails, flaky, apply_failed, base_commit, row or sandbox; details after a colon."""
    unstable: list[str] = field(default_factory=list)
    """Tests whose outcome depends on the run."""
    seconds: float = 0.0


class Rejected(Exception):  # noqa: N818 - it ends a validation, with a verdict
    """The reason."""

    def __init__(self, reason: str, unstable: list[str] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.unstable = reason, unstable or []


async def validate(
    row: SweRow, sandboxes: SandboxProvider, limits: Limits | None = None, screened: Run | None = None
) -> Verdict:
    """See the module docstring. A sandbox that is lost is a verdict too: the task cannot be trusted on this machine.

    `screened`: a run of the no-op state under the first of `SEEDS` that the factory has made already.
    """
    verdict, started = Verdict(row.instance_id), time.monotonic()
    try:
        await _validate(row, sandboxes, limits or Limits(), screened)
        verdict.valid = True
    except Rejected as rejected:
        verdict.reason, verdict.unstable = rejected.reason, rejected.unstable
    except SandboxError as error:
        verdict.reason = f"sandbox: {error.message}"
    verdict.seconds = time.monotonic() - started
    return verdict


async def _validate(row: SweRow, sandboxes: SandboxProvider, limits: Limits, screened: Run | None) -> None:
    """Three runs of both states; the first that is wrong, or unlike those before it, raises `Rejected`."""
    states: dict[bool, list[Run]] = {False: [screened] if screened else [], True: []}
    if row.pytest_args is not None:
        async with _sandbox(row, sandboxes) as sandbox:
            await _check_commit(row, sandbox)
            await _apply(row, sandbox, row.setup_patch)
            await _apply(row, sandbox, row.test_patch)
            for gold, runs in states.items():
                if gold:
                    await _apply(row, sandbox, row.patch)
                for seed in SEEDS[len(runs) :]:
                    runs.append(await run_tests(sandbox, row.pytest_args, seed=seed, limits=limits, workdir=row.workdir))
                    _judge(row, runs, gold=gold)
    for gold, runs in states.items():
        while len(runs) <= len(SEEDS):
            async with _sandbox(row, sandboxes) as sandbox:
                runs.append(await _graded(row, sandbox, limits, gold=gold))
            _judge(row, runs, gold=gold)


def _judge(row: SweRow, runs: list[Run], *, gold: bool) -> None:
    (_judge_after if gold else _judge_before)(row, runs)


@asynccontextmanager
async def _sandbox(row: SweRow, sandboxes: SandboxProvider) -> AsyncIterator[Sandbox]:
    sandbox = await sandboxes.acquire(Task(row.instance_id, (), image=row.image))
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.close())


async def _check_commit(row: SweRow, sandbox: Sandbox) -> None:
    """The image is at the row's commit; one that the factory built has nothing else in its git."""
    try:
        head, faults = await probe(sandbox, row.workdir)
    except RuntimeError as error:
        raise Rejected(f"base_commit: {error}") from error
    if head != row.base_commit:
        raise Rejected(f"base_commit: the image has {head}")
    if faults and row.repo.startswith(ORIGIN):
        raise Rejected(f"base_commit: the image's git has {faults}")


async def _apply(row: SweRow, sandbox: Sandbox, patch: str) -> None:
    if patch:
        await sandbox.write(PATCH, whole(patch))
        done = await sandbox.exec(f"cd {shlex.quote(row.workdir)} && git apply {PATCH}", timeout_s=COMMAND_S)
        if done.exit_code != 0:
            raise Rejected(f"apply_failed: {done.output.strip()[:300]}")


async def _graded(row: SweRow, sandbox: Sandbox, limits: Limits, *, gold: bool) -> Run:
    """The judge's run, as a `Run`."""
    patch = whole(row.patch) if gold else b""
    judged = await grade(
        sandbox, row, patch, GradingLimits(timeout_s=limits.run_s, test_timeout_s=limits.test_s), allow_empty=True
    )
    if judged.outcome == "infrastructure":
        raise Rejected(f"sandbox: {judged.reason}: {judged.log_tail[-300:]}")
    if gold and judged.outcome not in ("resolved", "timeout"):
        raise Rejected(f"gold_fails: {judged.outcome}: {judged.reason} {' '.join(judged.dropped)}")
    if not gold and judged.outcome == "resolved":
        raise Rejected("survived: the judge resolves the no-op")
    outcomes = {test: outcome.lower() for test, outcome in judged.tests.items()}
    return Run(outcomes, exit_code=0 if gold else None, timed_out=judged.outcome == "timeout")


def _judge_before(row: SweRow, runs: list[Run]) -> None:
    if runs[-1].timed_out:
        raise Rejected("hangs")
    _same(row, runs)
    passed = sorted(set(row.FAIL_TO_PASS) & runs[-1].passed)
    if passed:
        raise Rejected(f"survived: {passed[0]} passes without the gold patch")
    broken = sorted(set(row.PASS_TO_PASS) - runs[-1].passed)
    if broken and row.eval_type == "pass_and_fail":
        raise Rejected(f"pass_to_pass: {broken[0]}: {runs[-1].outcomes.get(broken[0], 'absent')} before")


def _judge_after(row: SweRow, runs: list[Run]) -> None:
    if runs[-1].timed_out:
        raise Rejected("gold_fails: it takes too long")
    _same(row, runs)
    missing = sorted({*row.FAIL_TO_PASS, *row.PASS_TO_PASS} - runs[-1].passed)
    if missing and row.eval_type == "pass_and_fail":
        raise Rejected(f"gold_fails: {missing[0]}: {runs[-1].outcomes.get(missing[0], 'absent')}")
    if runs[-1].exit_code != 0:
        raise Rejected(f"gold_fails: pytest exits with {runs[-1].exit_code} {runs[-1].output[-200:]}")


def _same(row: SweRow, runs: list[Run]) -> None:
    tests = {*row.FAIL_TO_PASS, *row.PASS_TO_PASS}
    unstable = sorted(test for test in tests if len({run.outcomes.get(test) == "passed" for run in runs}) > 1)
    if unstable:
        raise Rejected(f"flaky: {len(unstable)} tests", unstable)
