"""A pytest plugin that runs INSIDE the containers (any Python from 3.9): what every test did, as JSON lines.

Records: where each test function is defined, each outcome with the crash message, the executed lines (if asked), the end.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from types import FrameType
from typing import Any

import pytest

_report = open(os.environ["SAO_PROBE"], "a", encoding="utf-8")  # noqa: SIM115
_roots = tuple(filter(None, os.environ.get("SAO_COVER", "").split(":")))
_lines: dict[str, set[int]] = {}
_worst: dict[str, str] = {}
_messages: dict[str, str] = {}


def _write(record: dict[str, Any]) -> None:
    _report.write(json.dumps(record) + "\n")
    _report.flush()


def _trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        _lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    return _trace_lines


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    return _trace_lines if frame.f_code.co_filename.startswith(_roots) else None


if _roots:
    threading.settrace(_trace)
    sys.settrace(_trace)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function: Any = inspect.unwrap(getattr(item, "obj", None) or (lambda: None))
        code = getattr(function, "__code__", None)
        if code is not None:
            _write({"defined": item.nodeid, "path": code.co_filename, "line": code.co_firstlineno})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if hasattr(report, "wasxfail"):
        outcome = "xfail"
    elif report.when != "call" and report.passed:
        outcome = "" if report.when == "setup" or report.nodeid in _worst else "missing"
    else:
        outcome = report.outcome
    if outcome and _worst.get(report.nodeid, "passed") == "passed":
        _worst[report.nodeid] = outcome
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _messages.setdefault(report.nodeid, str(crash.message if crash else report.longrepr)[:2000])
    if report.when == "teardown":
        _write({"test": report.nodeid, "outcome": _worst[report.nodeid], "message": _messages.get(report.nodeid, "")})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"uncollected": report.nodeid})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    sys.settrace(None)
    threading.settrace(None)
    _write({"lines": {path: sorted(lines) for path, lines in _lines.items()}, "end": int(exitstatus)})
