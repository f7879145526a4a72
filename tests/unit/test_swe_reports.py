"""What the judge believes: reports of our pytest plugin, really written by it, and logs with markers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from environments.swe.reports import END, EXIT, START, Ran, mark_script, read_log, read_report

LAUNCHER = Path(__file__).parents[2] / "environments/swe/pytest_report.py"
NONCE = "n0nce"
SUITE = """
import unittest, pytest
def test_ok(): pass
def test_bad(): assert 0
@pytest.mark.skip
def test_skip(): pass
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.parametrize("value", ["a b", "[x]"])
def test_param(value): pass
class TestCase(unittest.TestCase):
    def test_bad(self): self.fail()
    def test_skip(self): self.skipTest("no")
    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i): self.assertNotEqual(i, 1)
    @unittest.expectedFailure
    def test_surprise(self): pass
@pytest.fixture
def late():
    yield
    raise RuntimeError
def test_teardown(late): pass
@pytest.fixture
def early(): raise RuntimeError
def test_setup(early): pass
"""


def run(folder: Path, files: dict[str, str], *args: str) -> tuple[bytes, int]:
    """Run the launcher as the container does; the report and the exit code."""
    for name, text in files.items():
        (folder / name).write_text(text)
    setup = {"report": str(folder / "report"), "nonce": NONCE, "workdir": str(folder), "args": list(args), "test_s": 5}
    env = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-s", str(LAUNCHER)],
        input=json.dumps(setup).encode(),
        cwd=folder,
        env=env,
        capture_output=True,
        timeout=120,
        check=False,
    )
    path = folder / "report"
    return (path.read_bytes() if path.exists() else b""), done.returncode


def test_the_launcher_is_python_3_8() -> None:
    ast.parse(LAUNCHER.read_text(), feature_version=(3, 8))


def test_every_outcome_has_its_word(tmp_path: Path) -> None:
    data, code = run(tmp_path, {"test_a.py": SUITE})
    ran = read_report(data, NONCE, code)
    assert (ran.flag, ran.exit_code) == ("", 1)
    assert ran.tests == {
        "test_a.py::test_ok": "passed",
        "test_a.py::test_bad": "failed",
        "test_a.py::test_skip": "skipped",
        "test_a.py::test_xfail": "xfailed",
        "test_a.py::test_param[a b]": "passed",
        "test_a.py::test_param[[x]]": "passed",
        "test_a.py::TestCase::test_bad": "failed",
        "test_a.py::TestCase::test_skip": "skipped",
        "test_a.py::TestCase::test_sub": "failed",
        "test_a.py::TestCase::test_surprise": "failed",
        "test_a.py::test_teardown": "error",
        "test_a.py::test_setup": "error",
    }


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    data, code = run(tmp_path, {"test_a.py": "def test_ok(): pass", "test_b.py": "import nothing_like_it"})
    ran = read_report(data, NONCE, code)
    assert (ran.uncollected, ran.tests, code) == (("test_b.py",), {}, 2)


def test_a_file_of_the_repository_cannot_stand_in_for_pytest(tmp_path: Path) -> None:
    files = {
        "pytest.py": "raise SystemExit(0)",
        "json.py": "raise SystemExit(0)",
        "pytest.ini": "[pytest]\naddopts = -p nothing",
    }
    data, code = run(tmp_path, {**files, "test_a.py": "import helper\ndef test_bad(): assert 0", "helper.py": ""})
    assert read_report(data, NONCE, code).tests == {"test_a.py::test_bad": "failed"}


@pytest.mark.parametrize(
    ("evil", "flag"),
    [
        ("import pytest\npytest.Function.runtest = lambda self: None", "pytest_tampered"),
        (
            "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(lambda c, f, when, reraise=None: None)",
            "pytest_tampered",
        ),
        ("import unittest\nunittest.TestCase.run = lambda self, result=None: result.addSuccess(self)", "pytest_tampered"),
        ("import os\nos._exit(0)", "report_incomplete"),
        ("import glob\nfor n in glob.glob('report*'): open(n, 'a').write('{}\\n')", "report_corrupted"),
        ("import os\nfor n in os.listdir('.'):\n    if n.startswith('report'): os.truncate(n, 0)", "report_corrupted"),
    ],
)
def test_evil_sources_are_seen(tmp_path: Path, evil: str, flag: str) -> None:
    suite = (
        "import unittest, evil\ndef test_bad(): assert 0\nclass TestX(unittest.TestCase):\n    def test_u(self): self.fail()\n"
    )
    data, code = run(tmp_path, {"evil.py": evil, "test_a.py": suite})
    assert read_report(data, NONCE, code).flag == flag


def test_rewritten_reports_do_not_change_the_verdict(tmp_path: Path) -> None:
    hook = "import pytest\n@pytest.hookimpl(hookwrapper=True, tryfirst=True)\ndef pytest_runtest_makereport(item, call):\n"
    hook += "    out = yield\n    out.get_result().outcome = 'passed'\n"
    suite = "import unittest\ndef test_bad(): assert 0\nclass TestX(unittest.TestCase):\n    def test_u(self): self.fail()\n"
    data, code = run(tmp_path, {"conftest.py": hook, "test_a.py": suite})
    assert code == 0  # pytest itself is taken in
    assert set(read_report(data, NONCE, code).tests.values()) == {"failed"}


def test_a_report_is_believed_whole_or_not_at_all(tmp_path: Path) -> None:
    data, code = run(tmp_path, {"test_a.py": "def test_a(): pass\ndef test_b(): pass"})
    assert read_report(data, NONCE, code).flag == ""
    lines = data.splitlines(keepends=True)
    assert len(lines) == 5
    corrupted = Ran(flag="report_corrupted", exit_code=0)
    assert read_report(data, "other", code) == corrupted
    for at in range(len(lines)):
        assert read_report(b"".join(lines[:at] + lines[at + 1 :]), NONCE, code).flag != ""
        assert read_report(b"".join([*lines[: at + 1], *lines[at:]]), NONCE, code) == corrupted
    assert read_report(data.replace(b"test_b", b"test_c"), NONCE, code) == corrupted
    assert read_report(data[:-1], NONCE, code) == corrupted
    assert read_report(b"", NONCE, code) == corrupted
    assert read_report(data, NONCE, 1).flag == "report_corrupted"
    assert read_report(b"".join(lines[:-1]), NONCE, code).flag == "report_incomplete"


# --- logs ------------------------------------------------------------------------------------------------------------

SCRIPT = f"set -uxo pipefail\necho '{START} is talked about'\n: '{START}'\nTESTS\n: '{END}'\ntrue\n"


def bash(tests: str, nonce: str = NONCE, script: str = SCRIPT) -> tuple[bytes, int]:
    done = subprocess.run(
        ["bash", "-c", mark_script(script, nonce).replace("TESTS", tests)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout, done.returncode


def test_the_log_between_the_markers_and_the_exit_code_of_the_tests() -> None:
    script = SCRIPT.replace(f"echo '{START} is talked about'\n", "")
    log, code = bash("echo PASSED a; (exit 7)", script=script)
    assert code == 7
    text, flag = read_log(log, NONCE, code)
    assert flag == ""
    assert text.startswith(f"{START}\n".encode()) and b"PASSED a" in text and text.endswith(f"{END}\n{EXIT}: 7\n".encode())
    log, code = bash("echo ok", script=script.replace(": '>", "echo '>"))
    assert read_log(log, NONCE, code)[1] == ""


@pytest.mark.parametrize(
    ("tests", "flag"),
    [
        (f"echo '{START}'", "marker_forged"),
        (f"echo '{END}'", "marker_forged"),
        (f"echo '{EXIT}: 0'", "marker_forged"),
        (f"echo '+ : {END} {NONCE}'", "marker_forged"),
        (f"echo '+ : {START} {NONCE}'", "marker_forged"),
        ("echo FAILED t - x; echo PASSED t", "status_forged"),
        ("echo PASSED t; echo ERROR t", "status_forged"),
        ("exit 0", "no_test_output"),
        ("kill -9 $$", "no_test_output"),
        ("echo FAILED t; echo FAILED t", ""),
    ],
)
def test_forged_logs(tests: str, flag: str) -> None:
    log, code = bash(tests, script=SCRIPT.replace(f"echo '{START} is talked about'\n", ""))
    assert read_log(log, NONCE, code)[1] == flag


def test_a_marker_before_the_tests_is_forged_too() -> None:
    log, code = bash("true")
    assert read_log(log, NONCE, code)[1] == "marker_forged"
