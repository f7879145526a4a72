"""One run of a project's suite in a sandbox.

Flows in: a sandbox, pytest's arguments, a hash seed, limits. Flows out: a `Run`: outcome, message and place of every test.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from harness.protocols import Sandbox

PROBE = Path(__file__).with_name("probe.py").read_bytes()
HOME = "/tmp/sao-factory"
KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    test_s: float = 15.0
    """One test; pytest-timeout fails it."""
    run_s: float = 120.0
    """The whole suite: a state that hangs outside a test."""


@dataclass(slots=True)
class Run:
    """What one run did."""

    outcomes: dict[str, str] = field(default_factory=dict)
    """Test id -> passed, failed, skipped, xfail or missing."""
    messages: dict[str, str] = field(default_factory=dict)
    """Test id -> crash message of the failed ones."""
    defined: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Test id -> file (in the repository) and first line of the test function."""
    lines: dict[str, set[int]] = field(default_factory=dict)
    """Executed lines by file, if asked for."""
    uncollected: list[str] = field(default_factory=list)
    exit_code: int | None = None
    """None: pytest did not come to its end."""
    timed_out: bool = False
    output: str = ""
    """The tail, for people."""

    @property
    def passed(self) -> set[str]:
        """Tests that ran and passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


async def run_tests(
    sandbox: Sandbox,
    arguments: list[str],
    *,
    seed: int,
    limits: Limits,
    workdir: str = "/testbed",
    cover: list[str] | None = None,
) -> Run:
    """Run pytest with nothing of the caller's environment and none of the project's pytest configuration."""
    await sandbox.write(f"{HOME}/sao_probe.py", PROBE)
    roots = ":".join(posixpath.join(workdir, root) for root in cover or [])
    environment = {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": str(seed),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": HOME,
        "SAO_PROBE": f"{HOME}/report",
        "SAO_COVER": roots,
    }
    words = ["-c", "/dev/null", "--rootdir", workdir, "-p", "no:cacheprovider", "-p", "sao_probe", "-q", *arguments]
    if "pytest_timeout" in arguments:
        words.append(f"--timeout={limits.test_s:g}")
    command = (
        f"cd {shlex.quote(workdir)} && rm -f {HOME}/report && timeout -k 2 {limits.run_s:g} "
        f'env -i PATH="$PATH" {" ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())} '
        f"python -m pytest {shlex.join(words)} >{HOME}/output 2>&1 </dev/null"
    )
    result = await sandbox.exec(command, timeout_s=limits.run_s + KILL_S)
    run = Run(timed_out=result.timed_out or result.exit_code in (124, 137))
    with contextlib.suppress(FileNotFoundError):  # pytest did not even start
        _read(run, (await sandbox.read(f"{HOME}/report")).decode(), workdir)
    if run.exit_code is None:
        tail = await sandbox.exec(f"tail -c 2000 {HOME}/output", timeout_s=KILL_S)
        run.output = tail.output
    elif run.exit_code != result.exit_code:
        run.output = f"pytest ended with {run.exit_code}, its process with {result.exit_code}"
        run.exit_code = None
    return run


def _read(run: Run, text: str, workdir: str) -> None:
    def inside(path: str) -> str:
        return posixpath.relpath(path, workdir)

    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut off by a kill
            continue
        if "test" in record:
            run.outcomes[record["test"]] = record["outcome"]
            if record["message"]:
                run.messages[record["test"]] = record["message"]
        elif "defined" in record:
            run.defined[record["defined"]] = (inside(record["path"]), record["line"])
        elif "uncollected" in record:
            run.uncollected.append(record["uncollected"])
        else:
            run.exit_code = record["end"]
            run.lines = {inside(path): set(lines) for path, lines in record["lines"].items()}
