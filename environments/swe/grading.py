"""The judge: a patch, a container that no agent has touched, hidden tests; one of seven outcomes.

Flows in: the bytes of a patch as the agent left it. Flows out: a `Grade`. The steps, in a container of its own:

    ready     the task's own patch, the hidden tests and the interpreter work without the agent's patch   else infrastructure
    apply     the filtered patch, by exact `git apply`, touches just the files that the filter saw        else apply_failed
    overlay   test files as they were before the patch, then the hidden tests over them                   else failed
    run       our pytest, or the row's script                                                             else timeout, failed

Infrastructure has no reward, never 0. It is: the sandbox was lost in any step; or `ready` failed, which runs before anything
of the agent is in the container; or a script printed no test output, and prints none in another container without the patch
either. Whatever goes wrong after `ready` and does not go wrong without the patch is the patch's doing.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from environments.swe.diff import DiffError, touched, unquote
from environments.swe.patch import Filtered, PatchLimits, filter_patch, show
from environments.swe.prepare import isolated, whole
from environments.swe.rows import SweRow
from environments.swe.runners import Finished, pytest_works, run_pytest, run_script
from harness.errors import SandboxError
from harness.protocols import ExecResult, Sandbox

Outcome = Literal["resolved", "failed", "apply_failed", "empty", "timeout", "too_large", "infrastructure"]
MISSING_SHOWN = 50


class GradingLimits(PatchLimits):
    """What one grading may use."""

    timeout_s: float = Field(1800.0, gt=0)
    """Seconds of the whole run of the tests."""
    test_timeout_s: float = Field(60.0, ge=0)
    """Seconds of one test, where pytest runs under us and the image has pytest-timeout; 0 is without."""
    concurrency: int = Field(8, ge=1)
    """Gradings at a time in one process."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on a patch and everything that led to it."""

    outcome: Outcome
    tests: dict[str, str] = field(default_factory=dict)
    """Status of every test that was reported."""
    missing: tuple[str, ...] = ()
    """Required tests that were absent or did not pass."""
    flags: tuple[str, ...] = ()
    """What an auditor may want to look at."""
    dropped: tuple[str, ...] = ()
    """Files of the patch that did not count, and why."""
    seconds: float = 0.0
    log_tail: str = ""
    reason: str = ""
    """One line for people."""

    @property
    def reward(self) -> float | None:
        """1 or 0; None if the verdict is unknown."""
        return None if self.outcome == "infrastructure" else float(self.outcome == "resolved")

    def summary(self) -> dict[str, Any]:
        """Facts for an episode's record: no statuses of single tests, no log."""
        facts = asdict(self)
        facts.update(missing=list(self.missing[:MISSING_SHOWN]), flags=list(self.flags), dropped=list(self.dropped))
        return {name: value for name, value in facts.items() if name not in ("tests", "log_tail")} | {
            "n_tests": len(self.tests)
        }


class _Stop(Exception):  # noqa: N818 - it ends a grading, with a verdict
    def __init__(self, outcome: Outcome, reason: str, tail: str = "", *flags: str) -> None:
        super().__init__(reason)
        self.grade = Grade(outcome, reason=reason, log_tail=tail[-4000:], flags=flags)


def screen(patch: bytes, row: SweRow, limits: PatchLimits) -> Filtered | Grade:
    """What of a patch counts, or the verdict that needs no container: empty, too large, no patch at all."""
    if len(patch) > limits.patch_bytes:
        return Grade("too_large", reason=f"{len(patch)} bytes")
    try:
        touched(whole(row.test_patch))
    except (DiffError, UnicodeDecodeError) as error:
        return Grade("infrastructure", reason=f"the row's test_patch is no patch: {error}")
    try:
        filtered = filter_patch(patch, row)
    except DiffError as error:
        return Grade("apply_failed", flags=("patch_malformed",), reason=str(error))
    facts = Grade("empty", flags=tuple(filtered.flags), dropped=tuple(filtered.dropped))
    count = len(filtered.paths) + len(filtered.dropped)
    if count > limits.patch_files:
        return replace(facts, outcome="too_large", reason=f"{count} files")
    if not filtered.paths:
        return replace(facts, reason="nothing of it counts" if filtered.dropped else "no change")
    return filtered


async def grade(fresh: Sandbox, row: SweRow, patch: bytes, limits: GradingLimits, *, allow_empty: bool = False) -> Grade:
    """Judge a raw patch in a fresh sandbox, which the caller closes. `allow_empty` runs the tests without any patch, too."""
    start = time.monotonic()
    screened = screen(patch, row, limits)
    if isinstance(screened, Grade):
        if not (allow_empty and screened.outcome == "empty"):
            return screened
        screened = Filtered(b"", list(screened.dropped), list(screened.flags), [])
    try:
        made = await _grade(fresh, row, screened, limits)
    except _Stop as stop:
        made = stop.grade
    except SandboxError as error:
        made = Grade("infrastructure", reason=f"{type(error).__name__}: {error}")
    flags = tuple(sorted({*made.flags, *screened.flags}))
    return replace(made, flags=flags, dropped=tuple(screened.dropped), seconds=round(time.monotonic() - start, 3))


async def _grade(fresh: Sandbox, row: SweRow, filtered: Filtered, limits: GradingLimits) -> Grade:
    folder = f"/tmp/sao-{secrets.token_hex(8)}"
    await _ready(fresh, row, folder, limits)
    if filtered.patch:
        await _apply(fresh, row, folder, filtered, limits)
        overlaid = await _step(fresh, _overlay(row, folder), limits)
        if overlaid.exit_code != 0:
            raise _Stop("failed", "the hidden tests do not fit over the patch", overlaid.output, "overlay_conflict")
    done = await _run(fresh, row, folder, limits)
    if done.timed_out:
        return Grade("timeout", log_tail=done.tail, reason=f"the tests took more than {limits.timeout_s:g} s")
    if done.ran.flag == "no_test_output" and filtered.patch and not await _control(fresh, row, limits):
        raise _Stop("infrastructure", "the script prints no test output without the patch either", done.tail)
    flags = (done.ran.flag,) if done.ran.flag else ()
    outcome: Outcome = "resolved" if done.resolved else "failed"
    reason = done.ran.flag or (f"{len(done.missing)} required tests did not pass" if done.missing else "")
    if outcome == "failed" and not reason:
        reason = f"the tests ended with exit code {done.ran.exit_code}"
    return Grade(outcome, done.ran.tests, done.missing, flags, log_tail=done.tail, reason=reason)


async def _run(fresh: Sandbox, row: SweRow, folder: str, limits: GradingLimits) -> Finished:
    if row.pytest_args is None:
        return await run_script(fresh, row, folder, timeout_s=limits.timeout_s)
    return await run_pytest(fresh, row, folder, timeout_s=limits.timeout_s, test_s=limits.test_timeout_s)


async def _control(fresh: Sandbox, row: SweRow, limits: GradingLimits) -> bool:
    """Whether the tests run at all without the patch, in yet another container."""
    other = await fresh.fresh()
    try:
        folder = f"/tmp/sao-{secrets.token_hex(8)}"
        await _ready(other, row, folder, limits)
        done = await _run(other, row, folder, limits)
        return done.timed_out or done.ran.flag != "no_test_output"
    finally:
        with contextlib.suppress(SandboxError):
            await other.close()


# --- the steps before the tests --------------------------------------------------------------------------------------


async def _step(fresh: Sandbox, script: str, limits: GradingLimits) -> ExecResult:
    return await fresh.exec(isolated(f"set -euo pipefail\n{script}"), timeout_s=limits.step_s)


def _git(row: SweRow) -> str:
    folder = shlex.quote(row.workdir)
    return f"git --git-dir={folder}/.git --work-tree={folder} -c core.hooksPath=/dev/null -c core.autocrlf=false"


async def _ready(fresh: Sandbox, row: SweRow, folder: str, limits: GradingLimits) -> None:
    """All that does not depend on the agent's patch; the container is then as it is graded with an empty patch."""
    await fresh.write(f"{folder}/setup.diff", whole(row.setup_patch))
    await fresh.write(f"{folder}/tests.diff", whole(row.test_patch))
    script = f"cd -- {shlex.quote(row.workdir)}\n"
    if row.setup_patch.strip():
        script += f"{_git(row)} apply --whitespace=nowarn {folder}/setup.diff\n"
    kept, _ = touched(whole(row.test_patch))
    script += f"mkdir -p {folder}/kept\n"
    if kept:
        script += f"cp -a --parents -t {folder}/kept -- {shlex.join(kept)}\n"
    result = await _step(fresh, script + _overlay(row, folder), limits)
    if result.exit_code != 0:
        raise _Stop("infrastructure", "the hidden tests do not fit onto the image", result.output)
    if row.pytest_args is not None:
        broken = await pytest_works(fresh, row, folder, timeout_s=limits.step_s)
        if broken is not None:
            raise _Stop("infrastructure", "pytest does not work in the image", broken.output)


async def _apply(fresh: Sandbox, row: SweRow, folder: str, filtered: Filtered, limits: GradingLimits) -> None:
    """Exact `git apply`: no fuzz, no rejects, no three-way merge. git must see just the files that the filter saw."""
    await fresh.write(f"{folder}/model.diff", filtered.patch)
    script = f"cd -- {shlex.quote(row.workdir)}\n"
    script += f"{_git(row)} apply --numstat {folder}/model.diff\n"
    script += (
        f"{_git(row)} apply --whitespace=nowarn {folder}/model.diff >{folder}/apply 2>&1 || {{ cat {folder}/apply; exit 9; }}"
    )
    result = await _step(fresh, script, limits)
    if result.exit_code != 0:
        raise _Stop("apply_failed", "git apply refuses the patch", result.output)
    seen = {line.split("\t", 2)[2] for line in result.output.splitlines() if line.count("\t") >= 2}
    if {show(unquote(name.encode())) for name in seen} != {show(path) for path in filtered.paths}:
        raise _Stop("failed", "git sees other files in the patch than the filter", result.output, "patch_mismatch")


def _overlay(row: SweRow, folder: str) -> str:
    """Test files as they were, without those that the hidden tests add; then the hidden tests (a script brings its own)."""
    kept, added = touched(whole(row.test_patch))
    script = f"cd -- {shlex.quote(row.workdir)}\n"
    if added or kept:
        script += f"rm -rf -- {shlex.join([*added, *kept])}\n"
    if kept:
        script += f"cp -a -T {folder}/kept .\n"
    if row.test_patch.strip():
        check = "" if row.pytest_args is not None else "--check "
        script += f"{_git(row)} apply {check}--whitespace=nowarn {folder}/tests.diff\n"
    return script
