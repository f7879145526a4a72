"""Patches by real agents' scripts, judged in real fresh containers: what is worth 1, what 0, and what has no reward."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import docker.errors
import pytest

from environments.swe.environment import FACTS, GRADE, PATCH
from environments.swe.grading import Grade, GradingLimits, grade
from environments.swe.patch import Extracted
from harness.errors import SandboxError, VerifierFault
from harness.protocols import ExecResult, Sandbox
from harness.sandboxes.docker import Engine
from tests.contracts.sandbox_support import ok
from tests.swe.instance import GOLD, GOLD_PATCH, TEST_PATCH, environment, play, row

pytestmark = pytest.mark.timeout(240)
LIMITS = GradingLimits(timeout_s=120.0, test_timeout_s=10.0)
COMMIT = "git add -A; git -c user.name=a -c user.email=a@a commit -qm work"
SCRIPT: dict[str, Any] = {"pytest_args": None}
"""Changes to the row: the tests run by its `eval_script`."""
FORGED = "".join(f"PASSED {test}\\n" for test in [*row().FAIL_TO_PASS, *row().PASS_TO_PASS])
INFINITE = "printf 'while True: pass\\n' > shop/prices.py"


def py(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND\n"


def evil(text: str) -> str:
    """Code that runs when the tests import the program, whose bug stays."""
    return py("shop/evil.py", text) + "sed -i '1i import shop.evil' shop/prices.py"


def late(text: str) -> str:
    """Output after pytest's own."""
    return evil(f"import atexit, os\natexit.register(lambda: os.write(2, b'\\n{text}\\n'))")


FORGED_EXIT = evil(
    f"import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'{FORGED}')\n    except OSError: pass\nos._exit(0)"
)
HOOK = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""

# --- what is honest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, SCRIPT], ids=["pytest", "script"])
def test_gold_resolves_and_a_wrong_patch_does_not(image: str, changes: dict[str, Any]) -> None:
    async def main() -> None:
        async with environment(image, **changes) as (swe, task, provider):
            right, wrong, works = await asyncio.gather(
                *[
                    swe.judge(row(image=image, **changes), Extracted(patch.encode()), lambda: provider.acquire(task))
                    for patch in (
                        GOLD_PATCH,
                        GOLD_PATCH.replace("price * percent / 100", "percent * 3"),
                        GOLD_PATCH.replace("price * percent / 100", "0"),
                    )
                ]
            )
        assert (right.reward, right.info["outcome"], right.info["flags"]) == (1.0, "resolved", [])
        assert right.info["n_tests"] == 4
        assert (wrong.reward, wrong.info["outcome"]) == (0.0, "failed")
        assert set(wrong.info["missing"]) == set(row().FAIL_TO_PASS)
        assert set(works.info["missing"]) == set(row().FAIL_TO_PASS)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (GOLD, "resolved"),
        (f"{GOLD}\n{COMMIT}; git checkout -q --orphan x; {COMMIT}; git branch -D main", "resolved"),
        (f"{GOLD}\necho x > tests/test_more.py; echo junk > junk.txt", "resolved"),
        (f"{GOLD}\nrm -rf tests; chmod -R 777 .", "resolved"),
        ("true", "empty"),
        ("echo '[pytest]' > pytest.ini; echo x >> tests/test_cart.py", "empty"),
        ("printf 'def discount(:\\n' > shop/prices.py", "failed"),
        ("rm shop/prices.py", "failed"),
        (INFINITE, "timeout"),
        ("seq 200000 > shop/table.txt", "too_large"),
        ("for i in $(seq 60); do echo > shop/m$i.py; done", "too_large"),
        (f"{GOLD}\nrm -rf .git", "failed"),
    ],
)
def test_outcomes(image: str, act: str, outcome: str) -> None:
    limits = {"timeout_s": 8.0} if outcome == "timeout" else {}
    score = asyncio.run(play(image, act, grading=limits))
    assert (score.info["outcome"], score.reward) == (outcome, float(outcome == "resolved")), score.info


# --- what is not -----------------------------------------------------------------------------------------------------

CHEATS: dict[str, tuple[str, str]] = {
    "a hook in conftest": (py("conftest.py", HOOK), "conftest"),
    "a hook in a sub-folder's conftest": (py("shop/conftest.py", HOOK) + "echo >> shop/cart.py", "conftest"),
    "a plugin by pytest.ini": (py("plug.py", HOOK) + "printf '[pytest]\\naddopts = -p plug\\n' > pytest.ini", "test_config"),
    "a plugin by pyproject": (
        py("plug.py", HOOK) + "printf '[tool.pytest.ini_options]\\naddopts=\"-p plug\"\\n' >> pyproject.toml", "test_config"),
    "a plugin by its entry point": (
        py("plug.py", HOOK) + "mkdir x-1.dist-info; printf '[pytest11]\\np=plug\\n' > x-1.dist-info/entry_points.txt"
        "; printf 'Name: x\\nVersion: 1\\n' > x-1.dist-info/METADATA", "audit:"),
    "forged output": (evil(f"print({FORGED!r})".replace("\\\\n", "\\n")), ""),
    "an exit with forged output": (FORGED_EXIT, "report_"),
    "an early exit": (evil("import sys\nsys.exit(0)"), ""),
    "an exit handler": (evil("import atexit, os\natexit.register(lambda: os._exit(0))"), "audit:atexit"),
    "edited tests": ("sed -i 's/==.*/or True/' tests/test_cart.py; echo '# x' >> shop/cart.py", "hidden_test_path"),
    "deleted tests": ("git rm -rq tests; echo '# x' >> shop/cart.py", "tests_changed"),
    "hidden tests made beforehand": (
        py("tests/test_prices.py", "def test_discount(): pass") + "echo '# x' >> shop/cart.py", "hidden_test_path"),
    "a folder where hidden tests go": (
        "mkdir -p tests/test_prices.py; echo x > tests/test_prices.py/x.py; echo '# x' >> shop/cart.py", "hidden_test_path"),
    "git hooks and settings": (
        "mkdir -p .git/hooks; printf '#!/bin/sh\\ntrue\\n' > .git/hooks/post-checkout; chmod +x .git/hooks/post-checkout; "
        "git config core.fsmonitor /bin/true; echo '* merge=ours' > .gitattributes; echo '# x' >> shop/cart.py", "git_file"),
    "sitecustomize": (py("sitecustomize.py", "import os") + py("shop/evil.pth", "import os"), "startup_hook"),
    "pytest's shadow": (py("pytest.py", "raise SystemExit(0)") + py("_pytest/__init__.py", "") + py("json.py", ""), ""),
    "patched reports": (
        evil("import _pytest.reports as r\nr.TestReport.from_item_and_call = classmethod(lambda c, i, x: None)"),
        "pytest_tampered"),
    "patched outcome": (
        evil("from _pytest.reports import TestReport\nTestReport.passed = property(lambda s: True)"), "audit:_pytest"),
    "patched tests": (evil("import pytest\npytest.Function.runtest = lambda self: None"), "pytest_tampered"),
    "patched unittest": (evil("import unittest\nunittest.TestCase.assertEqual = lambda *a: None"), "pytest_tampered"),
    "an xfail from the source": (
        evil("import pytest\nraise pytest.skip.Exception('x', allow_module_level=True)"), "audit:import pytest"),
    "symbolic links": ("rm -r tests; ln -s /tmp tests; ln -sf /etc/passwd shop/cart.py", "symlink"),
    "a huge patch": (GOLD + "\nseq 300000 > shop/x.py", ""),
    "killing": (evil("import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)"), "report_"),
    "a forged report": (
        evil("import os\nfor f in os.listdir('/proc/self/fd'):\n    try: os.write(int(f), b'{\"kind\": \"end\"}\\n')\n"
             "    except OSError: pass"), "report_corrupted"),
    "a report replaced": (
        evil("import glob, os\nfor f in glob.glob('/tmp/sao-*/report*'):\n    os.unlink(f); os.mkdir(f)"), "report_missing"),
    "a submodule": (f"git init -q sub; cd sub; {COMMIT} --allow-empty; cd ..", "submodule"),
    "binary code": ("printf '\\0\\1' > shop/prices.so", "binary"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_worth_nothing(image: str, name: str) -> None:
    act, flag = CHEATS[name]
    score = asyncio.run(play(image, act))
    assert score.reward == 0.0, score.info
    assert flag == "" or any(found.startswith(flag) for found in score.info["flags"]), score.info


SCRIPT_CHEATS = {
    "a hook in conftest": (py("conftest.py", HOOK), "conftest"),
    "a second end marker": (late(">>>>> End Test Output"), "marker_forged"),
    "a forged exit code": (late(">>>>> Test Exit Code: 0"), "marker_forged"),
    "later words": (late(FORGED), "status_forged"),
    "killing": (evil("import os, signal\nos.kill(os.getppid(), 9)"), "no_test_output"),
    "an early exit": (evil("import sys\nsys.exit(0)"), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPT_CHEATS)
def test_cheats_against_a_script_are_worth_nothing(image: str, name: str) -> None:
    act, flag = SCRIPT_CHEATS[name]
    score = asyncio.run(play(image, act, **SCRIPT))
    assert (score.reward, score.info["outcome"] in ("failed", "empty")) == (0.0, True), score.info
    assert flag == "" or flag in score.info["flags"], score.info


def test_a_script_believes_a_forged_exit_as_swebench_does_but_it_is_flagged(image: str) -> None:
    """The known hole of logs: rows with `pytest_args` do not have it (`CHEATS`)."""
    score = asyncio.run(play(image, FORGED_EXIT, **SCRIPT))
    assert score.info["flags"] == ["audit:os._exit"]


def test_the_tools_of_agents_without_any(image: str) -> None:
    async def main() -> None:
        async with environment(image) as (swe, task, provider):
            live = await swe.begin(task, await provider.acquire(task))
            bash, submit = live.tools
            assert (bash.name, submit.name) == ("bash", "submit")
            shown = await bash.call({"command": "pwd; cd shop; export A=1; false"})
            assert (shown.content, shown.done) == ("/testbed\n[exit code 1]", False)
            assert (await bash.call({"command": "pwd; echo $A"})).content == "/testbed/shop\n1\n[exit code 0]"
            long = (await bash.call({"command": "seq 100000"})).content
            assert "left out" in long and len(long) < 17_000 and long.endswith("100000\n[exit code 0]")
            await bash.call({"command": f"cd /testbed; {GOLD}"})
            assert (await submit.call({})).done
            assert (await live.score()).reward == 1.0

    asyncio.run(main())


# --- raw patches -----------------------------------------------------------------------------------------------------


async def graded(image: str, patch: bytes, **changes: Any) -> Grade:
    async with environment(image, **changes) as (_, task, provider):
        return await grade(await provider.acquire(task), row(image=image, **changes), patch, LIMITS)


@pytest.mark.parametrize(
    ("patch", "outcome", "flag"),
    [
        (GOLD_PATCH.replace("return price - percent\n", "return price - other\n"), "apply_failed", None),
        (GOLD_PATCH.replace("@@ -1,2", "@@ -1,3"), "apply_failed", "patch_malformed"),
        ("--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n", "apply_failed", "patch_malformed"),
        ("no patch at all", "apply_failed", "patch_malformed"),
        (GOLD_PATCH[:-1], "resolved", None),
        ("diff --git a/shop/x.py b/shop/x.py\nnew file mode 100644\n", "failed", None),
    ],
)
def test_raw_patches(image: str, patch: str, outcome: str, flag: str | None) -> None:
    made = asyncio.run(graded(image, patch.encode()))
    assert made.outcome == outcome, made
    assert made.flags == ((flag,) if flag else ())


def test_the_base_can_be_run_without_a_patch(image: str) -> None:
    async def main() -> Grade:
        async with environment(image) as (_, task, provider):
            return await grade(await provider.acquire(task), row(image=image), b"", LIMITS, allow_empty=True)

    made = asyncio.run(main())
    assert made.outcome == "failed"
    assert made.tests == {**dict.fromkeys(row().FAIL_TO_PASS, "failed"), **dict.fromkeys(row().PASS_TO_PASS, "passed")}


# --- infrastructure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_patch": TEST_PATCH.replace("def test_total", "def test_other")}, "do not fit onto the image"),
        ({"test_patch": "nonsense"}, "no patch"),
        ({"setup_patch": GOLD_PATCH.replace("price - percent", "other")}, "do not fit onto the image"),
        ({"eval_script": "echo nothing\n", **SCRIPT}, "without the patch either"),
        ({"eval_script": "kill -9 $$\n", **SCRIPT}, "without the patch either"),
    ],
)
def test_a_broken_task_has_no_reward(image: str, changes: dict[str, Any], words: str) -> None:
    made = asyncio.run(graded(image, GOLD_PATCH.encode(), **changes))
    assert (made.outcome, made.reward) == ("infrastructure", None)
    assert words in made.reason


def test_pytest_missing_from_the_image_has_no_reward(image: str) -> None:
    async def main() -> Grade:
        async with environment(image) as (_, task, provider):
            fresh = await provider.acquire(task)
            await ok(fresh, "rm -r /usr/lib/python3/dist-packages/pluggy")
            return await grade(fresh, row(), GOLD_PATCH.encode(), LIMITS)

    made = asyncio.run(main())
    assert (made.reward, made.reason) == (None, "pytest does not work in the image")


def has_file(engine: Engine, container: str, path: str) -> bool:
    """Whether a file is there; a container that is still being made has none."""
    try:
        engine.api.get_archive(container, path)
    except docker.errors.NotFound:
        return False
    return True


def test_a_container_that_is_killed_has_no_reward(image: str) -> None:
    """The container is killed from outside while the tests run."""

    async def main() -> None:
        engine = Engine()
        async with environment(image) as (swe, task, provider):
            before = {c["Id"] for c in engine.api.containers()}
            hang = Extracted(
                GOLD_PATCH.replace("-    return", "+    open('/tmp/hangs', 'w'); import time; time.sleep(60)\n-    return")
                .replace("+1,2 @@", "+1,3 @@")
                .encode()
            )
            judging = asyncio.ensure_future(swe.judge(row(image=image), hang, lambda: provider.acquire(task)))
            async with asyncio.timeout(60):
                while not (
                    mine := [c["Id"] for c in engine.api.containers(filters={"ancestor": image}) if c["Id"] not in before]
                ):
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                while not has_file(engine, mine[0], "/tmp/hangs"):
                    await asyncio.sleep(0.1)
            engine.api.remove_container(mine[0], force=True)
            with pytest.raises((VerifierFault, SandboxError)):
                await judging
        engine.close()

    asyncio.run(main())


class Lost:
    """A sandbox that is lost at its n-th command."""

    def __init__(self, sandbox: Sandbox, commands: int) -> None:
        self._sandbox, self._left = sandbox, commands

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        self._left -= 1
        if self._left < 0:
            raise SandboxError("gone")
        return await self._sandbox.exec(command, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


def test_a_sandbox_lost_at_any_step_has_no_reward(image: str) -> None:
    async def main() -> None:
        async with environment(image) as (_, task, provider):
            steps = []
            for commands in range(6):
                lost: Any = Lost(await provider.acquire(task), commands)
                steps.append(await grade(lost, row(), GOLD_PATCH.encode(), LIMITS))
        assert [step.reward for step in steps] == [None] * 5 + [1.0]

    asyncio.run(main())


# --- again -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [GOLD, "true", "rm -rf .git", "sed -i 's/percent$/2/' shop/prices.py; echo > conftest.py"])
def test_a_stored_verdict_can_be_had_again(image: str, act: str) -> None:
    async def main() -> None:
        first = await play(image, act)
        assert set(first.artifacts) == {PATCH, GRADE, FACTS}
        assert json.loads(first.artifacts[GRADE])["outcome"] == first.info["outcome"]
        async with environment(image) as (swe, task, provider):
            again = await swe.regrade(task, first.artifacts, provider)
        assert (again.reward, again.artifacts[PATCH]) == (first.reward, first.artifacts[PATCH])
        assert {**again.info, "seconds": 0} == {**first.info, "seconds": 0}

    asyncio.run(main())
