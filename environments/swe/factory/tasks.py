"""From a validated change to a row that our grader and the official one both run.

Flows in: trees before and after, test lists. Flows out: `SweRow`s.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass

from environments.swe.factory.diffs import commit_id, tree_diff
from environments.swe.factory.recipes import Recipe
from environments.swe.factory.running import Run
from environments.swe.factory.sources import Tree
from environments.swe.rows import SweRow

ORIGIN = "release/"
"""How `repo` begins in rows of the factory."""
LOG_PARSER = "parse_log_pytest_v2"
MAX_SHARE = 0.5
"""Of the suite that one task may break: more is an import error, not a bug."""


@dataclass(frozen=True, slots=True)
class Change:
    """The four states of a task: what the agent gets, what solves it, what judges it, and the test lists."""

    base: Tree
    """The commit."""
    fixed: Tree
    """`base` with the gold patch."""
    judged: Tree
    """`base` with the hidden tests."""
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    statement: str


def pytest_args(recipe: Recipe, failing: list[str], test_s: float) -> list[str]:
    """What pytest gets for this project: the suite without what fails anyway."""
    deselect = [f"--deselect={test}" for test in [*recipe.deselect, *failing]]
    return ["-p", "pytest_timeout", f"--timeout={test_s:g}", *recipe.pytest_args, *deselect, *recipe.tests]


def split_tests(before: Run, after: Run) -> tuple[list[str], list[str], str]:
    """FAIL_TO_PASS, PASS_TO_PASS and why the pair of runs makes no task (or nothing)."""
    good = {test for test in after.passed if " - " not in test and "\n" not in test}  # the official log parser cuts there
    fails = sorted(test for test in good if before.outcomes.get(test) != "passed")
    passes = sorted(good - set(fails))
    if before.timed_out:
        return fails, passes, "hangs"
    if not fails:
        return fails, passes, "survived"
    if not passes or before.exit_code not in (0, 1):
        return fails, passes, "collection"
    if len(fails) > MAX_SHARE * len(good):
        return fails, passes, "too_broad"
    return fails, passes, ""


def make_row(recipe: Recipe, version: str, instance_id: str, image: str, change: Change, arguments: list[str]) -> SweRow:
    """The row; the base commit's id is computed, and validation compares it with the image's."""
    base = commit_id(change.base)
    test_patch = tree_diff(change.base, change.judged)
    return SweRow(
        instance_id=instance_id,
        repo=f"{ORIGIN}{recipe.name}",
        base_commit=base,
        problem_statement=change.statement,
        patch=tree_diff(change.base, change.fixed),
        test_patch=test_patch,
        FAIL_TO_PASS=change.fail_to_pass,
        PASS_TO_PASS=change.pass_to_pass,
        image=image,
        eval_script=eval_script(base, change, test_patch, arguments),
        log_parser=LOG_PARSER,
        version=version,
        created_at="2020-01-01T00:00:00Z",
        environment_setup_commit=base,
        pytest_args=arguments,
    )


def eval_script(base: str, change: Change, test_patch: str, arguments: list[str]) -> str:
    """For the official harness: hidden tests over whatever the agent left, the suite between the markers, then back."""
    touched = sorted(path for path in change.base.keys() | change.judged.keys() if _differs(path, change))
    old = [path for path in touched if path in change.base]
    new = [path for path in touched if path not in change.base]
    marker = f"EOF_{hashlib.sha256(test_patch.encode()).hexdigest()[:12]}"
    restore = [f"git checkout {base} -- {shlex.join(old)}"] if old else []
    clear = [f"rm -rf -- {shlex.join(new)}"] if new else []
    apply = [f"git apply --verbose - <<'{marker}'", test_patch.rstrip("\n"), marker] if test_patch else []
    words = ["-c", "/dev/null", "--rootdir=/testbed", "-rA", "--tb=short", "-p", "no:cacheprovider", "--color=no", *arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            "git config --global --add safe.directory /testbed",
            *restore,
            *clear,
            *apply,
            ": '>>>>> Start Test Output'",
            f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest {shlex.join(words)}",
            ": '>>>>> End Test Output'",
            *restore,
            *clear,
            "",
        ]
    )


def _differs(path: str, change: Change) -> bool:
    return change.base.get(path) != change.judged.get(path)
