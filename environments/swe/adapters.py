"""From the columns of other datasets to the swebench 5.x schema: one pure function per source, dict -> dict.

- swebench: 5.x rows as they are; 4.x rows with what swebench 4.1's `make_test_spec` says of them.
- swegym: no image, script or parser is given; made are the published image's name and pytest on the files that its tests name.
- swesmith: the patch breaks the image; gold is that patch turned round. Python only. The tests stay visible to the agent, as
  part of the repository; patches may not touch them.
- r2egym: two logs are given instead of F2P and P2P, which follow from them; gold follows from the file texts. The tests lie in
  the image and are `hidden`. Rows whose logs contradict `expected_output_json` are refused.
- rebench: image, test command and parser's name are given. Refused are parsers that swebench does not have (many of V2's).

What a function cannot give is a `ConfigError`; `datasets.load` names the row, and skips or stops. Rows without a problem
statement are refused by `rows.validate`. Scripts install nothing: sandboxes have no network.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from environments.swe import patches
from environments.swe.diff import DiffError, touched
from environments.swe.prepare import whole
from harness.errors import ConfigError

Row = Mapping[str, Any]
END = "EOF_HIDDEN_TESTS"
CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
PYTEST = "python -m pytest -rA --color=no --tb=no --disable-warnings -p no:cacheprovider"


def eval_script(test: str, workdir: str, *, before: Sequence[str] = (), base: str = "HEAD", test_patch: str = "") -> str:
    """A script as swebench writes them: the hidden tests are put in place, then run between swebench's markers."""
    modified, added = _touched(test_patch)
    lines = ["#!/bin/bash", "set -uxo pipefail", *before, f"cd {shlex.quote(workdir)}"]
    lines += [f"git checkout {base} -- {shlex.join(modified)}"] if modified else []
    lines += [f"rm -rf -- {shlex.join(added)}"] if added else []
    lines += [f"git apply -v - <<'{END}'", test_patch.rstrip("\n"), END] if modified or added else []
    return "\n".join([*lines, ": '>>>>> Start Test Output'", test, ": '>>>>> End Test Output'", ""])


def legacy(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """A swebench 4.x row with what `swebench.legacy_columns` says of it."""
    if "error" in columns:
        raise ConfigError(
            f"swebench 4.1's make_test_spec refuses it: {columns['error']}", hint="use a dataset with 5.x columns"
        )
    return {**row, **columns}


def swebench(row: Row) -> dict[str, Any]:
    """A 5.x row as it is. `datasets.load` passes 4.x rows through `legacy` first."""
    return dict(row)


def swegym(row: Row) -> dict[str, Any]:
    """SWE-Gym/SWE-Gym: SWE-bench's columns without an environment; the images are published under the instance's name."""
    tests = [*_tests(row, "FAIL_TO_PASS"), *_tests(row, "PASS_TO_PASS")]
    name = str(_get(row, "instance_id")).lower().replace("__", "_s_")
    script = eval_script(
        f"{PYTEST} {shlex.join(_files(tests))}",
        "/testbed",
        before=CONDA,
        base=str(_get(row, "base_commit")),
        test_patch=str(_get(row, "test_patch")),
    )
    return {
        **row,
        "image": f"xingyaoww/sweb.eval.x86_64.{name}:latest",
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }


def swesmith(row: Row) -> dict[str, Any]:
    """SWE-bench/SWE-smith: `patch` breaks the healthy image, so it is the set-up and, turned round, the gold patch.

    As in SWE-smith's own grader, only the files of F2P run, and P2P is what is in them.
    """
    f2p = _tests(row, "FAIL_TO_PASS")
    files = _files(f2p)
    p2p = [test for test in _tests(row, "PASS_TO_PASS") if test.split("::")[0] in files]
    image = str(_get(row, "image_name"))
    bug = str(_get(row, "patch"))
    try:
        gold = patches.reverse(bug)
    except ValueError as error:
        raise ConfigError(f"`patch` cannot be turned round: {error}", hint="drop the row") from error
    repo = str(_get(row, "repo"))
    return {
        **row,
        "repo": repo,
        "base_commit": row.get("base_commit") or "HEAD",
        "patch": gold,
        "setup_patch": bug,
        "test_patch": "",
        "FAIL_TO_PASS": f2p,
        "PASS_TO_PASS": p2p,
        "image": image if "/" in image else f"jyangballin/{image.replace('__', '_1776_')}".lower(),
        "eval_script": eval_script(f"{PYTEST} {shlex.join(files)}", "/testbed", before=CONDA),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "protected": files,
    }


def r2egym(row: Row) -> dict[str, Any]:
    """R2E-Gym/R2E-Gym-Subset (also -V1, -Lite): tests lie in the image at /r2e_tests, outside the repository.

    F2P and P2P are not in the data; they follow from its logs of the tests before and after the commit.
    """
    image, name = str(_get(row, "docker_image")), str(_get(row, "repo_name"))
    commit, runs = _object(row, "parsed_commit_content"), _object(row, "execution_result_content")
    before, after = _summary(runs.get("old_commit_res_stdout")), _summary(runs.get("new_commit_res_stdout"))
    passed = [test for test, status in after.items() if status == "PASSED"]
    expected = {key.split(" ")[0] for key, status in _object(row, "expected_output_json").items() if status == "PASSED"}
    if {".".join(test.split("::")[1:]) for test in passed} != expected:
        raise ConfigError("`expected_output_json` contradicts the log in `execution_result_content`", hint="drop the row")
    issue = str(row.get("problem_statement") or "")
    found = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", issue, re.DOTALL)
    return {
        "instance_id": f"{name}__{image.rpartition(':')[2]}",
        "repo": name,
        "base_commit": commit.get("old_commit_hash") or "HEAD",
        "problem_statement": found[1].strip() if found else issue,
        "patch": "".join(_file_patch(diff) for diff in commit.get("file_diffs") or [] if not _is_test(_path(diff))),
        "test_patch": "",
        "FAIL_TO_PASS": [test for test in passed if before.get(test) != "PASSED"],
        "PASS_TO_PASS": [test for test in passed if before.get(test) == "PASSED"],
        "image": image,
        "eval_script": eval_script(
            ".venv/bin/python -W ignore -m pytest -rA --color=no r2e_tests",
            "/testbed",
            before=("rm -rf /testbed/r2e_tests", "ln -s /r2e_tests /testbed/r2e_tests"),
        ),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "hidden": ["/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh"],
        "protected": ["r2e_tests", "r2e_tests/*", "run_tests.sh"],
    }


def rebench(row: Row) -> dict[str, Any]:
    """nebius/SWE-rebench (Python, conda, tests named after the command) and -V2 (many languages, whole commands)."""
    config = _object(row, "install_config")
    command, second = config.get("test_cmd"), "image_name" in row and not row.get("docker_image")
    commands = [command] if isinstance(command, str) else [str(c) for c in command or [] if str(c).strip()]
    if not commands:
        raise ConfigError("`install_config.test_cmd` is empty", hint="drop the row")
    test_patch, base = str(_get(row, "test_patch")), str(_get(row, "base_commit"))
    if second:
        workdir = "/" + str(_get(row, "repo")).rpartition("/")[2]
        path = "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/cargo/bin:/usr/local/go/bin"
        before: list[str] = [f'export PATH="{path}:$PATH"']
    else:
        workdir, before = "/testbed", list(CONDA)
        directives = [path for paths in _touched(test_patch) for path in paths if path.endswith(".py")]
        commands[-1] = f"{commands[-1]} {shlex.join(directives)}"
    variables = config.get("env_vars") or {}
    before += [f"export {key}={shlex.quote(str(value))}" for key, value in variables.items() if value is not None]
    return {
        **row,
        "image": row.get("docker_image") or row.get("image_name"),
        "eval_script": eval_script("\n".join(commands), workdir, before=before, base=base, test_patch=test_patch),
        "log_parser": config.get("log_parser") or "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "workdir": workdir,
    }


ADAPTERS: dict[str, Callable[[Row], dict[str, Any]]] = {
    "swebench": swebench,
    "swegym": swegym,
    "swesmith": swesmith,
    "r2egym": r2egym,
    "rebench": rebench,
}
PREFIXES = {"swe-gym/": "swegym", "swe-bench/swe-smith": "swesmith", "r2e-gym/": "r2egym", "nebius/swe-rebench": "rebench"}
"""Adapter by the beginning of a hub name, lower case; else `swebench`."""


def adapter_of(source: str) -> str:
    """The adapter's name for a hub name."""
    return next((name for prefix, name in PREFIXES.items() if source.lower().startswith(prefix)), "swebench")


def _get(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise ConfigError(f"`{name}` is missing", hint="is this the dataset that the adapter is for?")
    return row[name]


def _object(row: Row, name: str) -> dict[str, Any]:
    """A column that holds an object, as such or as JSON text."""
    value = _get(row, name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"`{name}` is no JSON: {error}", hint="drop the row") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"`{name}` is no object", hint="drop the row")
    return dict(value)


def _tests(row: Row, name: str) -> list[str]:
    value = _get(row, name)
    try:
        return [str(test) for test in (json.loads(value) if isinstance(value, str) else value)]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"`{name}` is no list of tests: {error}", hint="drop the row") from error


def _files(tests: Sequence[str]) -> list[str]:
    """The files that pytest ids name."""
    for test in tests:
        if "::" not in test or test.split("::")[0].startswith("-"):
            raise ConfigError(f"{test!r} is no pytest id", hint="this adapter runs pytest only; drop the row")
    return sorted({test.split("::")[0] for test in tests})


def _summary(log: Any) -> dict[str, str]:
    """pytest's -rA summary as ids and statuses; ids end at the first space, as swebench's parser cuts them."""
    text = re.sub(r"\x1b\[[0-9;]*m|\r", "", str(log or ""))
    _, _, summary = text.partition("short test summary info")
    return {m[2]: m[1] for m in re.finditer(r"(?m)^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::\S+)", summary)}


def _touched(test_patch: str) -> tuple[list[str], list[str]]:
    try:
        return touched(whole(test_patch))
    except DiffError as error:
        raise ConfigError(f"`test_patch` is no patch: {error}", hint="drop the row") from error


def _path(diff: Row) -> str:
    return str(((diff.get("header") or {}).get("file") or {}).get("path") or "")


def _is_test(path: str) -> bool:
    parts = path.lower().split("/")
    return parts[-1].startswith("test_") or parts[-1].endswith("_test.py") or bool({"test", "tests"} & set(parts[:-1]))


def _file_patch(diff: Row) -> str:
    sides = {name: ((diff.get(f"{name}_file") or {}).get("path")) for name in ("minus", "plus")}
    old = None if sides["minus"] == "/dev/null" else str(diff.get("old_file_content") or "").encode()
    new = None if sides["plus"] == "/dev/null" else str(diff.get("new_file_content") or "").encode()
    return patches.write(_path(diff), old, new)
