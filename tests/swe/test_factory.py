"""The factory in real containers: a local project through images, mutants and release pairs, validation and the gate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from environments.swe.factory.build import BuildConfig, build, check
from environments.swe.factory.images import PYTHON
from environments.swe.factory.rebuild import rebuild
from environments.swe.factory.running import Limits
from environments.swe.factory.validate import Verdict, validate
from environments.swe.rows import SweRow
from harness.protocols import SandboxProvider
from harness.sandboxes.docker import Engine
from harness.task import Task
from tests.contracts.sandbox_support import IMAGE, needs_docker, started
from tests.e2e.support import sao
from tests.swe import tiny_project

pytestmark = needs_docker
LIMITS = Limits(test_s=10, run_s=60)


def play[T](story: Callable[[SandboxProvider], Awaitable[T]]) -> T:
    async def main() -> T:
        async with started("docker") as provider:
            return await story(provider)

    return asyncio.run(main())


async def shell(provider: SandboxProvider, image: str, command: str) -> str:
    sandbox = await provider.acquire(Task("look", (), image=image))
    try:
        result = await sandbox.exec(command, timeout_s=60)
        return result.output.strip()
    finally:
        await sandbox.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One build of everything: its folder and report."""
    folder = tmp_path_factory.mktemp("factory")
    python = play(lambda provider: shell(provider, IMAGE, f'python3 -c "{PYTHON}"'))
    recipes = tiny_project.recipes(folder / "cache", python)
    file = folder / "recipes.toml"
    projects = {name: recipe.model_dump(exclude={"name"}) for name, recipe in recipes.projects.items()}
    file.write_text(tomli_w.dumps({**recipes.model_dump(exclude={"projects"}), "projects": projects}))
    config = BuildConfig(recipes=file, base=IMAGE, cache=folder / "cache", per_project=9, tries=9)
    report = play(lambda provider: build(folder / "out", config, provider, LIMITS))
    yield folder, config, report
    engine = Engine()
    for label in ("sao.project=tiny", "sao.instance"):
        for image in engine.api.images(filters={"label": label}):
            for tag in image["RepoTags"] or []:
                if tag.startswith("sao-swe/tiny:"):
                    engine.api.remove_image(tag, force=True)
    engine.close()


def rows(folder: Path) -> dict[str, SweRow]:
    lines = (folder / "out" / "tasks.jsonl").read_text().splitlines()
    made = [SweRow.model_validate_json(line) for line in lines]
    return {row.instance_id: row for row in made}


def journal(folder: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "out" / "journal.jsonl").read_text().splitlines()]
    return {entry["id"]: entry for entry in entries}


def test_what_is_built(built: Any) -> None:
    folder, _, report = built
    made, entries = rows(folder), journal(folder)
    assert set(made) == {name for name, entry in entries.items() if not entry["reason"]}
    assert made.keys() >= {"tiny__r-1.0-1.1"} and len(made) >= 4
    reasons = {entry["reason"] for entry in entries.values()}
    assert reasons >= {"", "survived"}  # nobody tests `seen`
    assert not any(reason.startswith(("sandbox", "project")) for reason in reasons)
    assert report["valid"] == len(made) and report["tried"] == len(entries)
    assert not any(
        entry["detail"].startswith("src/tiny/__init__.py:21 ") for entry in entries.values()
    )  # `unused` is not covered
    for name in made:
        assert (folder / "out" / "dockerfiles" / name / "Dockerfile").is_file()


def test_the_release_pair(built: Any) -> None:
    row = rows(built[0])["tiny__r-1.0-1.1"]
    assert row.FAIL_TO_PASS == ["tests/test_tiny.py::test_once"] and len(row.PASS_TO_PASS) == 8
    assert "names each item once" in row.problem_statement
    assert "__version__" not in row.patch


def test_what_the_agent_sees(built: Any) -> None:
    """The bug, the commit, and nothing of the answer: no other copy, no hidden test, no younger file."""
    mutant = next(row for name, row in rows(built[0]).items() if "__m-" in name)
    hidden = {test.rpartition("::")[2].partition("[")[0] for test in mutant.FAIL_TO_PASS}

    async def look(provider: SandboxProvider) -> None:
        async def see(command: str) -> str:
            return await shell(provider, mutant.image, f"cd /testbed; {command}")

        assert await see("git rev-list --all --count; git rev-parse HEAD; git status --porcelain; git remote; git tag") == (
            f"1\n{mutant.base_commit}"
        )
        assert await see("cat .git/logs/HEAD; git fsck --unreachable; git stash list") == (
            "cat: .git/logs/HEAD: No such file or directory"
        )
        assert "notes.txt" in await see("git ls-files")
        copies = await see("find / -xdev -path /proc -prune -o -path '*tiny/__init__.py' -print 2>/dev/null; ls /root/.cache")
        assert copies.splitlines() == [
            "/testbed/src/tiny/__init__.py",
            "ls: cannot access '/root/.cache': No such file or directory",
        ]
        assert await see("cd /; python -c 'import tiny; print(tiny.__file__)'") == "/testbed/src/tiny/__init__.py"
        tests = await see("cat tests/test_tiny.py")
        assert "def test_" in tests and not any(name in tests for name in hidden)
        assert len(set((await see("find . -path ./.git -prune -o -type f -printf '%T@\\n'")).split())) == 1

    play(look)


def test_a_second_start_does_nothing(built: Any) -> None:
    folder, config, report = built
    before = (folder / "out" / "journal.jsonl").read_text()
    assert play(lambda provider: build(folder / "out", config, provider, LIMITS)) == report
    assert (folder / "out" / "journal.jsonl").read_text() == before


def test_the_same_images_elsewhere(built: Any) -> None:
    """An engine that lacks an instance gets it back, with the same commit."""
    folder, config, _ = built
    row = rows(folder)["tiny__r-1.0-1.1"]
    assert rebuild(folder / "out", config) == []
    engine = Engine()
    engine.api.remove_image(row.image, force=True)
    engine.close()
    assert rebuild(folder / "out", config) == [row.image]
    assert judge(row).valid


def add_test(row: SweRow, code: str) -> SweRow:
    """The row with another hidden test file."""
    lines = code.splitlines()
    patch = (
        "diff --git a/tests/test_more.py b/tests/test_more.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/test_more.py\n"
        f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    )
    more = [*row.PASS_TO_PASS, "tests/test_more.py::test_more"]
    return row.model_copy(update={"test_patch": row.test_patch + patch, "PASS_TO_PASS": more})


def judge(row: SweRow, limits: Limits = LIMITS) -> Verdict:
    async def story(provider: SandboxProvider) -> Verdict:
        return await validate(row, provider, limits)

    return play(story)


def test_flaky(built: Any) -> None:
    row = add_test(
        rows(built[0])["tiny__r-1.0-1.1"], "import os\n\n\ndef test_more():\n    assert os.environ['PYTHONHASHSEED'] != '4242'"
    )
    verdict = judge(row)
    assert not verdict.valid and verdict.reason.startswith("flaky")
    assert verdict.unstable == ["tests/test_more.py::test_more"]


def test_a_before_state_that_hangs(built: Any) -> None:
    """Outside of any test, where no timeout of a test helps."""
    row = add_test(
        rows(built[0])["tiny__r-1.0-1.1"],
        "import tiny\n\nwhile len(tiny.names('aa')) > 1:\n    pass\n\n\ndef test_more():\n    pass",
    )
    verdict = judge(row, Limits(test_s=5, run_s=8))
    assert (verdict.valid, verdict.reason) == (False, "hangs")


def test_the_gate(built: Any, tmp_path: Path) -> None:
    good = rows(built[0])["tiny__r-1.0-1.1"]
    survived = good.model_copy(
        update={"instance_id": "survived", "FAIL_TO_PASS": good.PASS_TO_PASS[:1], "PASS_TO_PASS": good.PASS_TO_PASS[1:]}
    )
    unsolved = good.model_copy(update={"instance_id": "unsolved", "patch": good.patch.replace("set(items)", "list(items)")})
    script = good.model_copy(update={"instance_id": "script", "pytest_args": None})
    moved = good.model_copy(update={"instance_id": "moved", "base_commit": "0" * 40})
    lines = [row.model_dump_json() for row in (good, script, survived, unsolved, moved, good)]
    empty = json.dumps({**good.model_dump(), "instance_id": "empty", "FAIL_TO_PASS": []})
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join([*lines, empty, "{"]) + "\n")

    async def story(provider: SandboxProvider) -> list[Verdict]:
        return await check(file, provider, LIMITS)

    verdicts = play(story)
    assert [verdict.reason.partition(":")[0] for verdict in verdicts] == [
        "", "", "survived", "gold_fails", "base_commit", "row", "row", "row",
    ]  # fmt: skip
    assert [verdict.valid for verdict in verdicts] == 2 * [True] + 6 * [False]


def test_the_commands(built: Any) -> None:
    """`sao tasks`: a complete build goes on with nothing, images that are there stay, the gate lets rows through."""
    folder, config, report = built
    words = [f"recipes={config.recipes}", f"base={IMAGE}", f"cache={config.cache}", "per_project=9", "tries=9"]
    again = sao("tasks", "build", str(folder / "out"), *words)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == report
    there = sao("tasks", "rebuild", str(folder / "out"), *words)
    assert (there.returncode, there.stdout.strip()) == (0, ""), there.stderr
    rows = (folder / "out" / "tasks.jsonl").read_text().splitlines()
    few = folder / "few.jsonl"
    few.write_text(rows[0] + "\n" + rows[0] + "\n")
    gate = sao("tasks", "check", str(few))
    assert gate.returncode == 1 and "1 of 2 tasks are valid" in gate.stdout and "a second one" in gate.stdout, gate.stderr
    assert sao("tasks", "check", str(few), "workers=2").returncode == 2
