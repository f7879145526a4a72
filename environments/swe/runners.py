"""The two ways to run hidden tests in a fresh container: our own pytest, or the row's `eval_script` judged by swebench.

Flows in: a container that no agent has touched, with patch and hidden tests in place. Flows out: a `Ran`, and the tail of the
output. No answer of the container is believed that code under test could have written without our nonce.
"""

from __future__ import annotations

import json
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.swe.reports import Ran, mark_script, read_log, read_report
from environments.swe.rows import SweRow
from harness.protocols import ExecResult, Sandbox

LAUNCHER = Path(__file__).with_name("pytest_report.py").read_bytes()
LOG_BYTES = 16 * 1024 * 1024
TAIL = 4000
_VARIABLES = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A run, or that it took too long."""

    ran: Ran
    tail: str
    timed_out: bool = False
    missing: tuple[str, ...] = ()
    """Required tests that are not there, or did not pass."""
    resolved: bool = False


def _interpreter(row: SweRow) -> str:
    """Shell words that run the container's Python with nothing of its environment but the image's PATH."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in _VARIABLES.items())
    return (
        f'cd -- {shlex.quote(row.workdir)} && /usr/bin/env -i PATH="$PATH" {settings} '
        '"$(command -v python || command -v python3)" -s'
    )


async def run_pytest(fresh: Sandbox, row: SweRow, folder: str, *, timeout_s: float, test_s: float) -> Finished:
    """Our pytest with the row's arguments; every required test must be there and pass, and pytest must end with 0."""
    result, ran = await _launch(fresh, row, folder, {"args": row.pytest_args, "test_s": test_s}, timeout_s)
    tail = result.output[-TAIL:]
    if result.timed_out:
        return Finished(ran, tail, timed_out=True)
    required = dict.fromkeys([*row.FAIL_TO_PASS, *row.PASS_TO_PASS])
    missing = tuple(test for test in required if ran.tests.get(test) != "passed")
    return Finished(ran, tail, False, missing, resolved=not ran.flag and not missing and result.exit_code == 0)


async def pytest_works(fresh: Sandbox, row: SweRow, folder: str, *, timeout_s: float) -> ExecResult | None:
    """None if our pytest runs and reports in the image, shown on a test of our own; else what it did."""
    await fresh.write(f"{folder}/probe/test_probe.py", b"def test_probe():\n    pass\n")
    setup = {"args": [f"{folder}/probe/test_probe.py"], "test_s": 0, "workdir": f"{folder}/probe"}
    result, ran = await _launch(fresh, row, folder, setup, timeout_s)
    return None if list(ran.tests.values()) == ["passed"] and not ran.flag and result.exit_code == 0 else result


async def _launch(fresh: Sandbox, row: SweRow, folder: str, setup: dict[str, Any], timeout_s: float) -> tuple[ExecResult, Ran]:
    nonce, report = secrets.token_hex(16), f"{folder}/report-{secrets.token_hex(8)}"
    words = shlex.quote(json.dumps({"workdir": row.workdir, "report": report, "nonce": nonce, **setup}))
    await fresh.write(f"{folder}/launch/run.py", LAUNCHER)
    # The nonce goes through a pipe: no file, argument or variable holds it.
    command = f"printf %s {words} | ({_interpreter(row)} {folder}/launch/run.py)"
    result = await fresh.exec(command, timeout_s=timeout_s)
    if result.timed_out:
        return result, Ran()
    data = await _read(fresh, report)
    if data is None:
        return result, Ran(flag="report_missing", exit_code=result.exit_code)
    return result, read_report(data, nonce, result.exit_code)


async def run_script(fresh: Sandbox, row: SweRow, folder: str, *, timeout_s: float) -> Finished:
    """The row's `eval_script`; its log is parsed and judged by swebench, and at least as strictly by us.

    A log can say less than a report: code under test that ends the test process early, with exit code 0 and the lines that it
    wants, is believed here as it is by swebench, and only the audit flags of the patch tell. Prefer `pytest_args`.
    """
    nonce = secrets.token_hex(16)
    await fresh.write(f"{folder}/eval.sh", mark_script(row.eval_script, nonce).encode())
    log = f"{folder}/log"
    result = await fresh.exec(f"cd -- {shlex.quote(row.workdir)}; bash {folder}/eval.sh >>{log} 2>&1", timeout_s=timeout_s)
    tail = await _tail(fresh, log)
    if result.timed_out:
        return Finished(Ran(), tail, timed_out=True)
    size = await fresh.exec(f"wc -c <{log}", timeout_s=60.0)
    if not size.output.strip().isdigit() or int(size.output) > LOG_BYTES:
        return Finished(Ran(flag="log_too_large", exit_code=result.exit_code), tail)
    return judge_log(row, await _read(fresh, log) or b"", nonce, result, tail)


def judge_log(row: SweRow, log: bytes, nonce: str, result: ExecResult, tail: str = "") -> Finished:
    """The verdict on a log with our markers."""
    from environments.swe import swebench

    text, flag = read_log(log, nonce, result.exit_code)
    if flag:
        return Finished(Ran(flag=flag, exit_code=result.exit_code), tail)
    statuses = swebench.parse_eval_log(row, text)
    ran = Ran(statuses or {}, exit_code=result.exit_code)
    report = swebench.report(row, statuses or {})
    # Parsers of `fail_only` see failures alone, so a test that is absent has passed there; but only if swebench saw a run.
    resolved = statuses is not None and (report.resolved if row.eval_type == "fail_only" else report.strict)
    missing = report.failed if row.eval_type == "fail_only" else (*report.failed, *report.lenient)
    return Finished(ran, tail, False, missing, resolved)


async def _read(fresh: Sandbox, path: str) -> bytes | None:
    try:
        return await fresh.read(path)
    except OSError:  # the code under test removed it, or put something else there
        return None


async def _tail(fresh: Sandbox, path: str) -> str:
    return (await fresh.exec(f"tail -c {TAIL} {path}", timeout_s=60.0)).output
