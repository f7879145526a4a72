"""SWE rows: what cannot be judged is refused with one clear error, and verdicts are swebench's own or stricter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from environments.swe import swebench
from environments.swe.rows import SweRow, validate, validate_all
from harness.errors import ConfigError

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data" / "swe"


@pytest.fixture
def raw() -> dict[str, Any]:
    row: dict[str, Any] = json.loads((DATA / "swebench5.jsonl").read_text())
    return row


def test_a_recorded_row_is_valid(raw: dict[str, Any]) -> None:
    row = validate(raw, "sample")
    assert row.log_parser == "parse_log_pytest_v2"
    assert len(row.FAIL_TO_PASS) == 2
    assert len(row.PASS_TO_PASS) == 3
    assert row.model_extra == {"split": "train"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("FAIL_TO_PASS", "[]"),
        ("FAIL_TO_PASS", []),
        ("FAIL_TO_PASS", [""]),
        ("PASS_TO_PASS", []),
        ("PASS_TO_PASS", "['not json']"),
        ("PASS_TO_PASS", None),
        ("image", ""),
        ("image", None),
        ("eval_script", ""),
        ("eval_script", " \n"),
        ("eval_type", "all"),
        ("problem_statement", "\n"),
        ("patch", ""),
        ("log_parser", "parse_log_pytest_v3"),
        ("log_parser", None),
    ],
)
def test_a_bad_value_names_source_instance_field_and_value(raw: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({**raw, field: value}, "rows.jsonl")
    assert caught.value.message.startswith(f"rows.jsonl: {raw['instance_id']}: `{field}` = {value!r}")
    assert caught.value.hint


@pytest.mark.parametrize("field", ["FAIL_TO_PASS", "PASS_TO_PASS", "image", "eval_script", "log_parser", "patch", "repo"])
def test_a_missing_column(raw: dict[str, Any], field: str) -> None:
    del raw[field]
    with pytest.raises(ConfigError, match=f"`{field}` is missing"):
        validate(raw, "rows.jsonl")


def test_an_unknown_parser_names_a_near_one(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({**raw, "log_parser": "parse_log_pytset"}, "s")
    assert "parse_log_pytest" in caught.value.hint


def test_duplicates_are_refused(raw: dict[str, Any]) -> None:
    assert len(validate_all([raw, {**raw, "instance_id": "other"}], "s")) == 2
    with pytest.raises(ConfigError, match="is there twice"):
        validate_all([raw, raw], "s")


def test_null_and_times_become_text(raw: dict[str, Any]) -> None:
    row = validate({**raw, "hints_text": None, "created_at": 1609298073000, "version": None}, "s")
    assert (row.hints_text, row.created_at, row.version) == ("", "1609298073000", "")


def small(raw: dict[str, Any], **changes: Any) -> SweRow:
    return validate({**raw, "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b", "t.py::c"], **changes}, "s")


@pytest.mark.parametrize(
    ("statuses", "resolved", "strict"),
    [
        ({"a": "PASSED", "b": "PASSED", "c": "PASSED"}, True, True),
        ({"a": "PASSED", "b": "PASSED", "c": "PASSED", "d": "FAILED"}, True, True),
        ({"a": "FAILED", "b": "PASSED", "c": "PASSED"}, False, False),
        ({"b": "PASSED", "c": "PASSED"}, False, False),
        ({"a": "SKIPPED", "b": "PASSED", "c": "PASSED"}, False, False),
        ({"a": "PASSED", "b": "PASSED"}, False, False),
        ({"a": "PASSED", "b": "ERROR", "c": "PASSED"}, False, False),
        ({"a": "PASSED", "b": "XFAIL", "c": "PASSED"}, True, True),
        ({"a": "XFAIL", "b": "PASSED", "c": "PASSED"}, True, False),
        ({"a": "PASSED", "b": "SKIPPED", "c": "PASSED"}, True, False),
        ({}, False, False),
    ],
)
def test_report(raw: dict[str, Any], statuses: dict[str, str], resolved: bool, strict: bool) -> None:
    """`resolved` is what swebench 5.0.2 was seen to say; `strict` lets no test pass without PASSED."""
    result = swebench.report(small(raw), {f"t.py::{name}": status for name, status in statuses.items()})
    assert (result.resolved, result.strict) == (resolved, strict)
    assert bool(result.failed) == (not resolved)


def test_fail_only_counts_absent_tests_as_passed_and_says_so(raw: dict[str, Any]) -> None:
    result = swebench.report(small(raw, eval_type="fail_only"), {"t.py::b": "PASSED"})
    assert (result.resolved, result.strict, result.lenient) == (True, False, ("t.py::a", "t.py::c"))


def test_parsers_cut_ids_differently(raw: dict[str, Any]) -> None:
    log = "PASSED t.py::a\nFAILED t.py::b[x y] - assert 1\n"
    assert swebench.parse_log("parse_log_pytest", log, small(raw))["t.py::a"] == "PASSED"
    assert "t.py::b[x y]" in swebench.parse_log("parse_log_pytest_v2", log, small(raw))
    with pytest.raises(ConfigError, match="unknown to swebench"):
        swebench.parse_log("none", log, small(raw))


def test_a_whole_log(raw: dict[str, Any]) -> None:
    row = small(raw)
    body = b"+ : '>>>>> Start Test Output'\nPASSED t.py::a\nPASSED t.py::b\nPASSED t.py::c\n\xff\n+ : '>>>>> End Test Output'\n"
    statuses = swebench.parse_eval_log(row, body)
    assert statuses is not None
    assert swebench.report(row, statuses).strict
    assert swebench.parse_eval_log(row, b"PASSED t.py::a\n") is None
    assert swebench.parse_eval_log(row, body + b">>>>> Test Exit Code: 1\n") is None


def test_nothing_heavy_comes_along() -> None:
    code = (
        "import sys\nfrom environments.swe import swebench\nassert swebench.parsers()\n"
        "print([m for m in ('modal', 'datasets', 'docker', 'pandas', 'swebench.harness') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_without_swebench_the_error_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['swebench'] = None\nfrom environments.swe import swebench\n"
        "from harness.errors import ConfigError\n"
        "try:\n    swebench.parsers()\nexcept ConfigError as error:\n    print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "make setup-swe, or: pip install swebench==5.0.2"


def test_only_one_file_imports_swebench() -> None:
    found = set()
    for path in (ROOT / "environments").rglob("*.py"):
        if re.search(r"(?m)^\s*(import|from) swebench|import_module\(f?.swebench", path.read_text()):
            found.add(path.name)
    assert found == {"swebench.py"}


def test_without_swebench_4_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need swebench 4\.1") as caught:
        swebench.legacy_columns([{"instance_id": "a"}], root=str(tmp_path))
    assert "swebench==4.1.0" in caught.value.hint
