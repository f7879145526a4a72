"""One recorded sample per dataset goes through its adapter and comes out as a valid row, or is refused for a named reason."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.swe import adapters, patches, swebench
from environments.swe.diff import touched
from environments.swe.rows import SweRow, validate
from harness.errors import ConfigError

DATA = Path(__file__).parent / "data" / "swe"


def sample(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def run(name: str, n: int = 0) -> SweRow:
    return validate(adapters.ADAPTERS[name](sample(name)[n]), name)


def check_shell(row: SweRow) -> None:
    """The script is a script, and its markers are swebench's."""
    assert subprocess.run(["bash", "-n"], input=row.eval_script, text=True, capture_output=True, check=False).returncode == 0
    assert row.eval_script.index(": '>>>>> Start Test Output'") < row.eval_script.index(": '>>>>> End Test Output'")


def test_samples_are_small() -> None:
    whole_tasks = DATA / "factory_sample.jsonl"
    assert whole_tasks.stat().st_size <= 120_000
    assert sum(path.stat().st_size for path in DATA.iterdir() if path != whole_tasks) <= 30_000


def test_swegym() -> None:
    row = run("swegym")
    check_shell(row)
    assert row.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest"
    script = row.eval_script
    assert f"git checkout {row.base_commit} -- tests/test_dynamodb/test_dynamodb_update_expressions.py\n" in script
    assert "rm -rf -- tests/test_dynamodb/test_new.py\n" in script
    assert script.count("tests/test_dynamodb/test_dynamodb_update_expressions.py\n: '>>>>> End") == 1
    assert row.log_parser == "parse_log_pytest"


def test_swesmith() -> None:
    raw, row = sample("swesmith")[0], run("swesmith")
    check_shell(row)
    assert row.setup_patch == raw["patch"]
    assert "+    utf8_params = encode_params_utf8(params)\n" in row.patch
    assert row.PASS_TO_PASS == ["tests/test_common.py::GeneratorTest::test_generate_token"]
    assert row.protected == ["tests/test_common.py"]
    assert row.image == raw["image_name"]
    old = adapters.swesmith({**raw, "image_name": "swesmith.x86_64.oauthlib__oauthlib.1fd52536"})
    assert old["image"] == raw["image_name"]


def test_swesmith_refuses_other_languages_and_empty_statements() -> None:
    with pytest.raises(ConfigError, match="'TestCreateEngine' is no pytest id"):
        run("swesmith", 1)
    with pytest.raises(ConfigError, match="`problem_statement` = ''"):
        validate(adapters.swesmith({**sample("swesmith")[0], "problem_statement": ""}), "s")
    with pytest.raises(ConfigError, match="cannot be turned round"):
        adapters.swesmith({**sample("swesmith")[0], "patch": "GIT binary patch"})


def test_r2egym() -> None:
    row = run("r2egym")
    check_shell(row)
    assert row.instance_id == "aiohttp__f0d74880deec8fcd982bce639c93c5e130d41198"
    assert row.FAIL_TO_PASS == ["r2e_tests/test_1.py::TestApp::test_stop"]
    assert row.PASS_TO_PASS == ["r2e_tests/test_1.py::TestApp::test_start"]
    assert row.problem_statement.startswith("**`stop` is called twice**")
    assert "tests/test_web.py" not in row.patch
    assert "+X = 1\n\\ No newline at end of file\n" in row.patch
    assert "/r2e_tests" in row.hidden
    log = json.loads(sample("r2egym")[0]["execution_result_content"])["new_commit_res_stdout"]
    assert swebench.report(row, swebench.parse_log(row.log_parser, log, row)).strict


def test_r2egym_refuses_contradictions_and_rows_without_a_problem() -> None:
    with pytest.raises(ConfigError, match="contradicts the log"):
        run("r2egym", 1)
    with pytest.raises(ConfigError, match="`problem_statement` = ''"):
        run("r2egym", 2)


def test_rebench_1() -> None:
    row = run("rebench")
    check_shell(row)
    assert row.image == "swerebench/sweb.eval.x86_64.dask_1776_dask-10042"
    assert "-W ignore::DeprecationWarning dask/tests/test_base.py\n" in row.eval_script
    assert row.workdir == "/testbed"


def test_rebench_2() -> None:
    row = run("rebench", 1)
    check_shell(row)
    assert (row.image, row.workdir) == ("swerebenchv2/unidata-netcdf-c:1925-ad6bff3", "/netcdf-c")
    assert "cd /netcdf-c\n" in row.eval_script
    assert "\nmake check\n" in row.eval_script
    assert row.log_parser == "parse_log_jq"
    with pytest.raises(ConfigError, match="`log_parser` = 'parse_log_cargo_nobody_has'"):
        run("rebench", 2)


def test_swebench_5_is_left_alone() -> None:
    assert adapters.swebench(sample("swebench5")[0]) == sample("swebench5")[0]


def test_swebench_4_by_its_own_make_test_spec() -> None:
    rows = sample("swebench4")
    try:
        columns = swebench.legacy_columns([*rows, {**rows[0], "repo": "no/body"}])
    except ConfigError as error:
        pytest.skip(f"swebench 4.1 is not installed: {error.message}")
    first, second = (validate(adapters.legacy(r, c), "old") for r, c in zip(rows, columns, strict=False))
    check_shell(first)
    assert first.image == "swebench/sweb.eval.x86_64.sympy_1776_sympy-20590:latest"
    assert (first.log_parser, second.log_parser) == ("parse_log_sympy", "parse_log_django")
    assert "./tests/runtests.py" in second.eval_script
    with pytest.raises(ConfigError, match="no/body"):
        adapters.legacy(rows[0], columns[2])


@pytest.mark.parametrize("name", ["swegym", "swesmith", "r2egym", "rebench"])
def test_a_row_of_another_dataset_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`\w+` is missing"):
        adapters.ADAPTERS[name]({"instance_id": "a"})


@pytest.mark.parametrize("name", ["swegym", "swesmith", "r2egym", "rebench"])
def test_adapters_are_pure(name: str) -> None:
    raw = sample(name)[0]
    before = json.dumps(raw)
    assert adapters.ADAPTERS[name](raw) == adapters.ADAPTERS[name](raw)
    assert json.dumps(raw) == before


def test_adapter_by_hub_name() -> None:
    names = [
        "SWE-Gym/SWE-Gym",
        "SWE-bench/SWE-smith",
        "R2E-Gym/R2E-Gym-Subset",
        "nebius/SWE-rebench-V2",
        "SWE-bench/SWE-bench_Lite",
    ]
    assert [adapters.adapter_of(name) for name in names] == ["swegym", "swesmith", "r2egym", "rebench", "swebench"]


def test_touched() -> None:
    renamed = "diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n"
    removed = "diff --git a/z b/z\ndeleted file mode 100644\n--- a/z\n+++ /dev/null\n@@ -1 +0,0 @@\n---- a/not\n"
    new = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n++++ b/not\n"
    assert touched((renamed + removed + new).encode()) == (["x", "z"], ["y", "n"])


def git(folder: Path, *command: str, text: str = "") -> str:
    done = subprocess.run(["git", *command], cwd=folder, input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_reverse_in_git(tmp_path: Path) -> None:
    """Forth and back again, with a new, a removed, a renamed and a changed file, and without newlines at the end."""
    git(tmp_path, "init", "-q")
    (tmp_path / "changed").write_text("".join(f"{n}\n" for n in range(40)) + "end")
    (tmp_path / "removed").write_text("-- a\n++ b\n")
    (tmp_path / "old").write_text("".join(f"line {n}\n" for n in range(20)))
    git(tmp_path, "add", "-A")
    before = git(tmp_path, "write-tree")
    (tmp_path / "changed").write_text("".join(f"{n}\n" for n in range(40) if n not in (3, 4)).replace("30\n", "a\nb\n"))
    (tmp_path / "removed").unlink()
    (tmp_path / "new").write_text("x")
    shutil.move(tmp_path / "old", tmp_path / "moved")
    (tmp_path / "moved").write_text((tmp_path / "moved").read_text().replace("line 7", "row 7"))
    git(tmp_path, "add", "-A")
    patch = git(tmp_path, "diff", "--cached", "-M", before.strip())
    assert "rename from old" in patch
    git(tmp_path, "apply", "--index", text=patches.reverse(patch))
    assert git(tmp_path, "write-tree") == before
    git(tmp_path, "apply", "--index", text=patches.reverse(patches.reverse(patch)))
    git(tmp_path, "apply", "--index", "-R", text=patch)
    assert git(tmp_path, "write-tree") == before


@given(st.lists(st.sampled_from("abc-+ \\"), max_size=6), st.lists(st.sampled_from("abc-+ \\"), max_size=6), st.booleans())
def test_write_and_reverse_agree(old: list[str], new: list[str], newline: bool) -> None:
    """The patch from old to new, turned round, says the same as the patch from new to old."""
    a, b = "\n".join(old) + "\n" * newline, "\n".join(new) + "\n" * newline
    there = patches.write("f", a.encode(), b.encode())
    assert patches.reverse(patches.reverse(there)) == there
    signs = [line[0] for line in there.split("\n")[4:] if line]
    back = [line[0] for line in patches.reverse(there).split("\n")[4:] if line]
    assert (signs.count("+"), signs.count("-")) == (back.count("-"), back.count("+"))


@pytest.mark.parametrize("patch", ["--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n", "GIT binary patch\n"])
def test_a_broken_patch_is_refused(patch: str) -> None:
    with pytest.raises(ValueError):
        patches.reverse(patch)
