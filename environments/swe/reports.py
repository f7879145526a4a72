"""What came out of a run of the tests, read without trust: the report of `pytest_report`, and the log of an `eval_script`.

Flows in: bytes that code under test could have written. Flows out: test -> status, or the reason why they are not believed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""swebench's markers."""


Flag = Literal[
    "",
    "report_corrupted",
    "report_incomplete",
    "report_missing",
    "pytest_tampered",
    "marker_forged",
    "status_forged",
    "no_test_output",
    "log_too_large",
]


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of the tests."""

    tests: dict[str, str] = field(default_factory=dict)
    """Test -> passed, failed, error, skipped, xfailed (report), or swebench's word (log)."""
    flag: Flag = ""
    """Why the run is not believed."""
    uncollected: tuple[str, ...] = ()
    exit_code: int | None = None


class _NotBelievedError(ValueError):
    pass


# --- our report ------------------------------------------------------------------------------------------------------


def read_report(data: bytes, nonce: str, exit_code: int) -> Ran:
    """The report of one run of `pytest_report`, whose process ended with `exit_code`."""
    try:
        records = _records(data, nonce)
        kinds = [record["kind"] for record in records]
        if kinds[:1] != ["start"] or kinds.count("start") > 1 or kinds.count("collected") > 1 or "end" in kinds[:-1]:
            raise _NotBelievedError("its records are out of order")
        known = {test for record in records if record["kind"] == "collected" for test in record["ids"]}
        tests: dict[str, str] = {}
        for record in records:
            if record["kind"] == "test":
                if record["id"] not in known or record["id"] in tests:
                    raise _NotBelievedError(f"{record['id']} was not collected, or ran twice")
                tests[record["id"]] = _status(record["phases"])
        if kinds[-1] == "end" and records[-1]["exit"] != exit_code:
            raise _NotBelievedError("the process ended with another code")
        uncollected = tuple(str(record["id"]) for record in records if record["kind"] == "uncollected")
    except (ValueError, LookupError, TypeError, AttributeError):
        return Ran(flag="report_corrupted", exit_code=exit_code)
    flag: Flag = "pytest_tampered" if "tampered" in kinds else "report_incomplete" if kinds[-1] != "end" else ""
    return Ran(tests, flag, uncollected, exit_code)


def _records(data: bytes, nonce: str) -> list[dict[str, Any]]:
    lines = data.decode().split("\n")
    if lines[-1] != "":
        raise _NotBelievedError("the last record is cut")
    digest, records = nonce, []
    for line in lines[:-1]:
        found, _, body = line.partition(" ")
        digest = hashlib.sha256((digest + body).encode()).hexdigest()
        if found != digest:
            raise _NotBelievedError("a record does not follow from those before it")
        record = json.loads(body)
        if not isinstance(record, dict):
            raise _NotBelievedError("a record is no object")
        records.append(record)
    return records


def _status(verdicts: dict[str, str]) -> str:
    """One word for the phases of a test; passed only if it was set up, called and torn down without any exception."""
    for phase, word in (("setup", "error"), ("call", "failed"), ("teardown", "error")):
        verdict = verdicts.get(phase, "absent")
        if verdict != "passed":
            return {"failed": word, "absent": "error"}.get(verdict, verdict)
    return "passed"


# --- swebench's log --------------------------------------------------------------------------------------------------

_MARKER_LINE = re.compile(rf"\s*(?::|echo)\s+['\"]?(?:{START}|{END})['\"]?\s*")
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)", re.MULTILINE)


def mark_script(script: str, nonce: str) -> str:
    """An `eval_script` whose markers carry a nonce, and which ends with the exit code of its tests."""
    lines = []
    for line in script.splitlines():
        if not _MARKER_LINE.fullmatch(line):
            lines.append(line)
        elif START in line:
            lines.append(line.replace(START, f"{START} {nonce}"))
        else:
            lines += ["SAO_TEST_EXIT_CODE=$?", line.replace(END, f"{END} {nonce}")]
    return "\n".join([*lines, 'exit "${SAO_TEST_EXIT_CODE-125}"', ""])


def read_log(log: bytes, nonce: str, exit_code: int) -> tuple[bytes, Flag]:
    """The log as swebench would have written it, of what our markers enclose; or why it is not believed.

    bash traces `: 'marker'` on a line of its own. Each marker must be there once, in order, and none without our nonce.
    """
    text = log.decode(errors="replace")
    if re.search(rf"(?:{START}|{END}|{EXIT})(?! {nonce})", text):
        return b"", "marker_forged"
    begun, ended = (_marks(text, f"{marker} {nonce}") for marker in (START, END))
    if not begun or not ended:
        return b"", "no_test_output"
    if not (_together(text, begun) and _together(text, ended) and begun[-1].end() <= ended[0].start()):
        return b"", "marker_forged"
    body = text[begun[-1].end() : ended[0].start()]
    seen: dict[str, str] = {}
    for status, test in _STATUS.findall(body):
        if seen.setdefault(test, status) != status and "PASSED" in (seen[test], status):
            return b"", "status_forged"
    return f"{START}\n{body}\n{END}\n{EXIT}: {exit_code}\n".encode(), ""


def _marks(text: str, marker: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"^.*{marker}.*\n?", text, re.MULTILINE))


def _together(text: str, marks: list[re.Match[str]]) -> bool:
    """One marker: once by `:`, or by `echo` as its trace and its output."""
    return len(marks) == 1 or (len(marks) == 2 and marks[0].end() == marks[1].start() and "echo" in marks[0][0])
