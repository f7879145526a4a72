"""Release pairs, statements, diffs and commit ids: the pure half of the factory."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.swe.diff import touched
from environments.swe.factory.build import Journal
from environments.swe.factory.candidates import Candidate
from environments.swe.factory.diffs import AUTHOR, COMMIT_TIME, MESSAGE, changed_lines, commit_id, tree_diff
from environments.swe.factory.recipes import DEFAULT, Recipe, load_recipes
from environments.swe.factory.releases import Pair, keep_version, pair
from environments.swe.factory.running import Run
from environments.swe.factory.sources import Tree, under, unpack
from environments.swe.factory.statements import behaviours, bug_report, changelog_entry, release_request, section
from environments.swe.factory.tasks import ORIGIN, Change, make_row, split_tests
from environments.swe.rows import SweRow
from harness.errors import ConfigError

RECIPE = Recipe(
    name="tiny",
    licence="MIT",
    module="tiny",
    sources=["tiny"],
    tests=["tests"],
    mutate="1.0",
    releases={"1.0": "0" * 64, "1.1": "1" * 64},
)
OLD: Tree = {
    "tiny/__init__.py": b'__version__ = "1.0"\n\n\ndef f(a):\n    return a\n',
    "tests/test_f.py": b"def test_f():\n    pass\n",
    "CHANGES.md": b"# 1.0\n\n- begins\n",
}
NEW: Tree = {
    "tiny/__init__.py": b'__version__ = "1.1"\n\n\ndef f(a):\n    return a + 1\n',
    "tests/test_f.py": b"def test_f():\n    pass\n\n\ndef test_g():\n    pass\n",
    "CHANGES.md": b"# 1.1\n\n- `f` adds one\n\n# 1.0\n\n- begins\n",
    "docs/f.md": b"f\n",
}


def test_the_recipes() -> None:
    recipes = load_recipes(DEFAULT)
    assert len(recipes.projects) >= 8
    permissive = {"MIT", "BSD-3-Clause", "BSD-2-Clause", "Apache-2.0", "ISC"}
    assert {recipe.licence for recipe in recipes.projects.values()} <= permissive
    digests = [d for recipe in recipes.projects.values() for d in recipe.releases.values()] + list(recipes.wheels.values())
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert all(name == recipe.name for name, recipe in recipes.projects.items())


def test_a_recipe_without_its_wheel(tmp_path: Path) -> None:
    text = DEFAULT.read_text().replace('requirements = ["text-unidecode"]', 'requirements = ["unknown"]')
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match="unknown"):
        load_recipes(tmp_path / "r.toml")


def test_a_pair_moves_sources_and_tests_only() -> None:
    found = pair(RECIPE, OLD, NEW, ("1.0", "1.1"))
    assert isinstance(found, Pair)
    assert found.fixed == OLD | {"tiny/__init__.py": b'__version__ = "1.0"\n\n\ndef f(a):\n    return a + 1\n'}
    assert found.judged == OLD | {"tests/test_f.py": NEW["tests/test_f.py"]}
    assert found.lines == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiny/__init__.py": OLD["tiny/__init__.py"].replace(b"1.0", b"1.1")}, "version_only"),
        ({"tests/test_f.py": OLD["tests/test_f.py"]}, "no_test_change"),
        ({"tiny/long.py": b"x = 1\n" * 201}, "too_long"),
        ({"tests/data.bin": b"\0\1"}, "binary"),
    ],
)
def test_no_pair(change: Tree, reason: str) -> None:
    assert pair(RECIPE, OLD, NEW | change, ("1.0", "1.1")) == reason


def test_no_pair_where_the_layout_moved() -> None:
    assert pair(RECIPE, OLD, {"src/tiny/__init__.py": b""}, ("1.0", "1.1")) == "layout"


def test_versions_are_kept_where_nothing_else_changed() -> None:
    old, new = b'V = "1.0"\nT = (1, 0)\nx = 1\n', b'V = "1.1"\nT = (1, 1)\nx = "1.1"\n'
    assert keep_version(old, new, "1.0", "1.1") == b'V = "1.0"\nT = (1, 0)\nx = "1.1"\n'
    assert keep_version(b'V = "1.0"\n', b'V = "1.1.2"\n', "1.0", "1.1") == b'V = "1.1.2"\n'


# --- statements ------------------------------------------------------------------------------------------------------


def test_sections() -> None:
    text = "Changes\n=======\n\nv1.1 (2026-01-01)\n-----------------\n\n* f adds 2.0\n\n1.0\n---\n* begins\n"
    assert section(text, "1.1") == "* f adds 2.0"
    assert section(text, "1.0") == "* begins"
    assert section(text, "1.2") == section(text, "1") == section(text, "11") == ""
    assert changelog_entry(NEW, "1.1") == "- `f` adds one"
    assert changelog_entry({}, "1.1") == ""


def test_statements_name_no_place() -> None:
    messages = {
        "tests/test_f.py::TestF::test_addsOne[3]": "AssertionError: assert 3 == 4\n +  where 3 = f(3)",
        "tests/test_f.py::TestF::test_adds_one[4]": "AssertionError: assert 3 == 4\n +  where 3 = f(3)",
        "tests/test_g.py::test_g": "/testbed/tiny/__init__.py:17: KeyError: 'x' at line 17",
    }
    assert behaviours(messages) == ["adds one: AssertionError: assert 3 == 4 +  where 3 = f(3)", "g: KeyError: 'x' at"]
    report = bug_report("tiny", messages)
    assert "assert 3 == 4" in report and "17" not in report and "__init__" not in report and "test_" not in report
    assert "adds one" in release_request("tiny", "1.1", "- adds one", {}) and "KeyError" in release_request(
        "tiny", "1.1", "", messages
    )


def test_long_words_cost_nothing() -> None:
    """A pattern that backtracks would not come back from this."""
    assert len(behaviours({"t.py::test_a": "AssertionError: " + "a" * 5000 + "." + "b/" * 5000})) == 1


# --- diffs -----------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a.py", "a/b.py", "a.b/c", "a-b", "ab/c d.txt"])
TEXTS = st.text(st.sampled_from("ab\n\r\f\u2028é"), max_size=12).map(str.encode)


def git(folder: Path, *words: str, data: bytes = b"") -> str:
    command = ["git", "-c", "core.autocrlf=false", "-C", str(folder), *words]
    author, _, email = AUTHOR.partition(" <")
    who = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", author), ("EMAIL", email[:-1]))
    }
    when = {f"GIT_{role}_DATE": f"{COMMIT_TIME} +0000" for role in ("AUTHOR", "COMMITTER")}
    environment = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null", **who, **when}
    return subprocess.run(command, env=environment, input=data, capture_output=True, check=True).stdout.decode().strip()


def write(folder: Path, tree: Tree) -> None:
    for path, data in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(NAMES, TEXTS, min_size=1), st.dictionaries(NAMES, TEXTS))
def test_git_agrees(tmp_path_factory: pytest.TempPathFactory, old: Tree, new: Tree) -> None:
    """The commit's id is git's, and git applies the patch to the byte."""
    folder = tmp_path_factory.mktemp("tree")
    write(folder, old)
    git(folder, "init", "-q")
    git(folder, "add", "-Af", ".")
    git(folder, "commit", "-qm", MESSAGE)
    assert git(folder, "rev-parse", "HEAD") == commit_id(old)
    if patch := tree_diff(old, new):
        git(folder, "apply", "-", data=patch.encode())
    left = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts}
    assert left == new


def test_changed_lines() -> None:
    assert changed_lines(tree_diff({"a": b"1\n2\n"}, {"a": b"1\n3\n4\n"})) == 3
    assert changed_lines(tree_diff({"a": b"-- x\n"}, {"a": b""})) == 1
    with pytest.raises(ValueError, match="binary"):
        tree_diff({"a": b"\0"}, {})


# --- rows ------------------------------------------------------------------------------------------------------------


def run(exit_code: int | None = 0, **outcomes: str) -> Run:
    return Run(outcomes, exit_code=exit_code)


def test_split() -> None:
    after = run(a="passed", b="passed", c="passed", d="skipped")
    assert split_tests(run(1, a="failed", b="passed", c="passed"), after) == (["a"], ["b", "c"], "")
    assert split_tests(run(a="passed", b="passed", c="passed"), after)[2] == "survived"
    assert split_tests(run(1, a="failed", b="failed", c="passed"), after)[2] == "too_broad"
    assert split_tests(run(2), after)[2] == "collection"
    assert split_tests(Run(timed_out=True), after)[2] == "hangs"


def test_row() -> None:
    found = pair(RECIPE, OLD, NEW, ("1.0", "1.1"))
    assert isinstance(found, Pair)
    change = Change(found.base, found.fixed, found.judged, ["tests/test_f.py::test_g"], ["tests/test_f.py::test_f"], "Do it.")
    row = make_row(RECIPE, "1.0", "tiny__r-1.0-1.1", "sao-swe/tiny:x", change, ["tests"])
    assert row.base_commit == commit_id(OLD)
    assert "test_g" in row.test_patch and "test_g" not in row.patch and "1.1" not in row.patch
    assert row.eval_script.index(f"git checkout {row.base_commit} -- tests/test_f.py") < row.eval_script.index("git apply")
    assert row.test_patch in row.eval_script and "rm -rf" not in row.eval_script


# --- sources ---------------------------------------------------------------------------------------------------------


def sdist(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    return buffer.getvalue()


def test_unpack() -> None:
    names = ("t-1/a.py", "t-1/PKG-INFO", "t-1/src/t.egg-info/SOURCES.txt", "t-1/tests/__pycache__/a.pyc", "t-1/src/b.py")
    assert unpack(sdist(*names)) == {"a.py": b"x", "src/b.py": b"x"}
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack(sdist("t-1/../../a.py"))


# --- the journal -----------------------------------------------------------------------------------------------------


def test_what_is_tried_again(tmp_path: Path) -> None:
    """A second start skips verdicts on tasks; not what the machine caused, nor what a crash has cut."""
    found = pair(RECIPE, OLD, NEW, ("1.0", "1.1"))
    assert isinstance(found, Pair)
    change = Change(found.base, found.fixed, found.judged, ["tests/test_f.py::test_g"], ["tests/test_f.py::test_f"], "Do it.")
    first = Journal(tmp_path)
    for name, reason in (("good", ""), ("bad", "survived"), ("lost", "sandbox: gone"), ("cut", "")):
        row = None if reason else make_row(RECIPE, "1.0", name, "sao-swe/tiny:x", change, ["tests"])
        first.add(Candidate(name, "tiny", "mutant", ""), reason, 1.0, row)
    assert first.report() == {
        "tried": 4,
        "valid": 2,
        "worker_minutes": 0.1,
        "projects": {"tiny mutant": {"tried": 4, "valid": 2, "survived": 1, "sandbox": 1}},
    }
    rows = tmp_path / "tasks.jsonl"
    rows.write_bytes(rows.read_bytes()[:-9])
    second = Journal(tmp_path)
    assert second.entries.keys() == {"good", "bad"}
    assert second.valid("tiny", "mutant") == 1
    second.add(Candidate("cut", "tiny", "mutant", ""), "", 1.0, make_row(RECIPE, "1.0", "cut", "x", change, ["tests"]))
    assert Journal(tmp_path).entries.keys() == {"good", "bad", "cut"}
    assert [SweRow.model_validate_json(line).instance_id for line in rows.read_text().splitlines()] == ["good", "cut"]


def test_the_sample() -> None:
    """Rows that the factory built: sources in the gold patch, tests in the other, no answer in what is asked."""
    lines = (Path(__file__).parent / "data" / "swe" / "factory_sample.jsonl").read_text().splitlines()
    rows = [SweRow.model_validate_json(line) for line in lines]
    recipes = load_recipes().projects
    assert len({row.repo for row in rows}) >= 3
    for row in rows:
        recipe = recipes[row.repo.removeprefix(ORIGIN)]
        for patch, tests in ((row.patch, False), (row.test_patch, True)):
            old, new = touched(patch.encode())
            assert old + new and all(under(path, recipe.tests) == tests for path in old + new)
        assert not any(test.rpartition("::")[2] in row.problem_statement for test in row.FAIL_TO_PASS)
        assert all(line[1:].strip() not in row.problem_statement for line in row.patch.splitlines() if line[:2] == "+ ")
