"""The one place that imports swebench: parser names, log parsing, the official verdict, and the bridge from 4.x rows.

Flows in: rows and test logs. Flows out: test statuses and reports. `swebench.harness` would import modal, datasets and docker
into this process (seconds, 165 MB); the modules needed here are loaded past its `__init__`. swebench 4.1, whose
`make_test_spec` knows images and scripts of old rows, cannot share a process with 5: a worker reads it from its own folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError

if TYPE_CHECKING:
    from environments.swe.rows import SweRow

MODULES = ("harness.constants", "types", "harness.log_parsers", "harness.grading")
INSTALL = "make setup-swe, or: pip install swebench==5.0.2"
LEGACY_INSTALL = "pip install --no-deps --target \"$(python -c 'import sys; print(sys.prefix)')/swebench4\" swebench==4.1.0"
LEGACY_ROOT = "SAO_SWEBENCH4"
"""Environment variable: another folder that holds swebench 4.1."""
WORKER_S = 600.0


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on a status map."""

    resolved: bool
    """swebench's verdict: every F2P and P2P test passed."""
    strict: bool
    """`resolved`, every required test is there and says PASSED, and no F2P test passes by being marked as expected to fail."""
    failed: tuple[str, ...]
    """Required tests that failed or are absent, as swebench sees it."""
    lenient: tuple[str, ...]
    """Required tests that swebench lets pass without PASSED: F2P XFAIL, P2P SKIPPED, absent under `fail_only`."""


@functools.cache
def _modules() -> types.SimpleNamespace:
    """swebench 5's grading modules, without `swebench.harness.__init__`."""
    try:
        package = importlib.import_module("swebench")
        root = Path(str(package.__file__)).parent
        stub = "swebench.harness" not in sys.modules
        if stub:
            sys.modules["swebench.harness"] = module = types.ModuleType("swebench.harness")
            module.__path__ = [str(root / "harness")]
        try:
            found = {name.rpartition(".")[2]: importlib.import_module(f"swebench.{name}") for name in MODULES}
        finally:
            if stub:
                del sys.modules["swebench.harness"]
        found["log_parsers"].PARSER_REGISTRY  # noqa: B018  # absent before 5.0
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"swebench 5 is needed to judge SWE tasks, and cannot be loaded: {error}", hint=INSTALL) from error
    return types.SimpleNamespace(**found)


def parsers() -> frozenset[str]:
    """Names in swebench's parser registry."""
    return frozenset(_modules().log_parsers.PARSER_REGISTRY)


def _spec(row: SweRow) -> Any:
    return _modules().types.TestSpec(
        instance_id=row.instance_id,
        image=row.image,
        eval_script_list=row.eval_script.splitlines(),
        repo=row.repo,
        version=row.version,
        FAIL_TO_PASS=row.FAIL_TO_PASS,
        PASS_TO_PASS=row.PASS_TO_PASS,
        log_parser=row.log_parser,
        eval_type=row.eval_type,
    )


def parse_log(parser_name: str, log: str, row: SweRow) -> dict[str, str]:
    """Test -> status by one of swebench's parsers. A log that makes the parser raise holds no result."""
    parser = _modules().log_parsers.PARSER_REGISTRY.get(parser_name)
    if parser is None:
        raise ConfigError(f"{row.instance_id}: `log_parser` = {parser_name!r} is unknown to swebench", hint="correct the row")
    try:
        return dict(parser(log, _spec(row)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def parse_eval_log(row: SweRow, log: bytes) -> dict[str, str] | None:
    """Test -> status of a whole `eval_script` log, between its markers; None if it says that no valid run took place.

    The code under test writes this log and can forge it: a reward must not rest on it alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log.decode(errors="replace"))
        try:
            status_map, found = _modules().grading.get_logs_eval(_spec(row), str(path))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return dict(status_map) if found else None


def report(row: SweRow, status_map: Mapping[str, str]) -> Report:
    """swebench's verdict on the statuses, and ours, which is at least as strict."""
    grading, constants = _modules().grading, _modules().constants
    gold = {"instance_id": row.instance_id, "FAIL_TO_PASS": row.FAIL_TO_PASS, "PASS_TO_PASS": row.PASS_TO_PASS}
    result = grading.get_eval_tests_report(dict(status_map), gold, eval_type=constants.EvalType(row.eval_type))
    required = (*row.FAIL_TO_PASS, *row.PASS_TO_PASS)
    passed = {*result["FAIL_TO_PASS"]["success"], *result["PASS_TO_PASS"]["success"]}
    failed = tuple(test for test in required if test not in passed)
    resolved = not failed and grading.get_resolution_status(result) == constants.ResolvedStatus.FULL.value

    def status(test: str) -> str | None:
        key = grading._resolve_case(test, dict(status_map))
        return status_map[key] if key is not None else None

    lenient = tuple(
        test
        for test in required
        if test in passed and status(test) not in ({"PASSED"} if test in row.FAIL_TO_PASS else {"PASSED", "XFAIL"})
    )
    return Report(resolved, resolved and not lenient, failed, lenient)


LEGACY_WORKER = """
import json, sys, types, os
root = sys.argv[1]
def package(name, *parts):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [os.path.join(root, "swebench", *parts)]
    return module
package("swebench")                      # past both __init__ files, which import datasets, modal and docker
package("swebench.harness", "harness")
for name, attributes in {"datasets": ("Dataset", "load_dataset", "load_from_disk"), "dotenv": ("load_dotenv",)}.items():
    sys.modules[name] = module = types.ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, lambda *a, **k: None)
sys.path.insert(0, root)
from swebench.harness.test_spec import test_spec
from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
from swebench.harness.constants import FAIL_ONLY_REPOS
nothing = lambda *a, **k: []             # only building an image needs these; some fetch files from the network
test_spec.make_env_script_list = test_spec.make_repo_script_list = nothing
answers = []
for row in json.load(sys.stdin):
    try:
        spec = test_spec.make_test_spec(row, namespace="swebench")
        kind = "fail_only" if row["repo"] in FAIL_ONLY_REPOS else "pass_and_fail"
        answers.append({"image": spec.instance_image_key, "eval_script": spec.eval_script,
                        "log_parser": MAP_REPO_TO_PARSER[row["repo"]].__name__, "eval_type": kind})
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
json.dump(answers, sys.stdout)
"""


def legacy_columns(rows: Sequence[Mapping[str, Any]], root: str | None = None) -> list[dict[str, str]]:
    """The 5.x columns of 4.x rows by swebench 4.1's own `make_test_spec`, or {"error": ...} per row. No network is used.

    `root` is the folder that holds swebench 4.1: by default SAO_SWEBENCH4, else `swebench4` in this Python's prefix.
    """
    folder = Path(root or os.environ.get(LEGACY_ROOT) or Path(sys.prefix) / "swebench4")
    if not (folder / "swebench" / "harness" / "test_spec").is_dir():
        raise ConfigError(
            f"rows without `image` need swebench 4.1's make_test_spec, and {folder} does not hold it",
            hint=f"use the dataset's 5.x version, or: {LEGACY_INSTALL}",
        )
    needed = ("instance_id", "repo", "version", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
    question = json.dumps([{key: row[key] for key in needed if key in row} for row in rows])
    command = [sys.executable, "-c", LEGACY_WORKER, str(folder)]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=WORKER_S, check=False)
        answers: list[dict[str, str]] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        raise ConfigError(f"swebench 4.1 in {folder} cannot be used: {' '.join(last)}", hint=INSTALL) from error
    return answers
