"""Task folders in real containers: the tests' word counts, what an agent planted does not, and whose fault silence is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from environments.swe.folder_environment import FLAGS, LOG, FoldersConfig, SweFolders
from environments.swe.folders import REWARD_JSON, REWARD_TEXT
from harness.errors import VerifierFault
from harness.task import Score
from tests.contracts.sandbox_support import ok, started

pytestmark = pytest.mark.timeout(180)
TEST = f"""#!/bin/bash
echo "judging $MODE in $PWD"
if [ "$(cat answer.txt)" = "$(cat "$(dirname "$0")/deep/expected")" ] && [ "$MODE" = strict ] && [ "$KIND" = plain ]
then echo 1 > {REWARD_TEXT}; else echo 0 > {REWARD_TEXT}; fi
"""
SILENT = "#!/bin/bash\necho only words\n"
RIGHT = "echo 42 > answer.txt"
PLANT = f"mkdir -p $(dirname {REWARD_JSON}); echo 1 > {REWARD_JSON}; echo 1 > {REWARD_TEXT}"
TOML = """\
[environment]
docker_image = "{image}"
workdir = "/testbed"
network_mode = "no-network"
env = {{ KIND = "plain" }}
[verifier]
timeout_sec = {seconds}
env = {{ MODE = "strict" }}
"""


def make(folder: Path, image: str, test: str, seconds: float = 60.0) -> SweFolders:
    (folder / "tests" / "deep").mkdir(parents=True)
    (folder / "task.toml").write_text(TOML.format(image=image, seconds=seconds))
    (folder / "instruction.md").write_text("Write the answer into answer.txt.\n")
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "tests" / "deep" / "expected").write_text("42\n")
    return SweFolders(FoldersConfig(path=str(folder.parent), heldout=0.0))


def play(folder: Path, image: str, act: str, test: str = TEST, seconds: float = 60.0) -> Score:
    """One episode by a script; its score."""

    async def main() -> Score:
        environment = make(folder, image, test, seconds)
        (task,) = environment.tasks("train")
        async with started("docker", image=image) as provider:
            sandbox = await provider.acquire(task)
            live = await environment.begin(task, sandbox)
            await ok(sandbox, act)
            score = await live.score()
        json.dumps(score.info)
        assert score.info["flags"] == FLAGS == ("shared_container",)
        return score

    return asyncio.run(main())


CASES: dict[str, tuple[str, str, float, str]] = {
    "right": (RIGHT, TEST, 1.0, "judged"),
    "right, from another folder, by a shell that has gone mad": (
        f"{RIGHT}; export MODE=lax KIND=x PATH=/nowhere; sleep() {{ break; }}; bash() {{ echo mad; }}; cd /; set -u",
        TEST, 1.0, "judged"),
    "right, by a shell that ends": (f"{RIGHT}; sleep() {{ :; }}; trap exit DEBUG", TEST, 1.0, "judged"),
    "wrong": ("echo 41 > answer.txt", TEST, 0.0, "judged"),
    "a part": ("true", f"echo '{{\"reward\": 0.25, \"speed\": 7}}' > {REWARD_JSON}", 0.25, "judged"),
    "a planted verdict, and tests that give none": (PLANT, SILENT, 0.0, "no_reward"),
    "planted tests": (
        "mkdir -p /tests/deep; echo > /tests/deep/expected; echo 'PATH=' > /tests/setup.sh; chmod 0 /tests",
        f"ls /tests | tr '\\n' ' '; {TEST}", 0.0, "judged"),
    "a process that rewrites the verdict": (
        f"(setsid bash -c 'while :; do {PLANT}; done' >/dev/null 2>&1 &); sleep 0.2", TEST, 0.0, "judged"),
    "a process of the tests that goes on talking": (
        "true", f"(while echo noise; do sleep 0.01; done) & echo 0.5 > {REWARD_TEXT}", 0.5, "judged"),
    "a verdict that is no number": ("true", f"echo good > {REWARD_TEXT}", 0.0, "no_reward"),
    "an endless verdict": ("true", f"ln -s /dev/zero {REWARD_JSON}; yes 1 | head -c 9999999 > {REWARD_TEXT}", 0.0, "no_reward"),
    "the folder is gone": ("cd /; rm -rf /testbed", TEST, 0.0, "judged"),
    "a file where the verdict's folder goes": ("rm -rf /logs; echo file > /logs; chmod 0 /logs", TEST, 0.0, "not_placed"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(tmp_path: Path, image: str, name: str) -> None:
    act, test, reward, outcome = CASES[name]
    score = play(tmp_path / "answer", image, act, test)
    assert (score.reward, score.info["outcome"]) == (reward, outcome), (score.info, score.artifacts)
    if test == TEST and outcome == "judged":
        assert score.artifacts[LOG].startswith(b"judging strict in /testbed\n")
    if name == "planted tests":
        assert score.artifacts[LOG].startswith(b"deep test.sh ")


def test_tests_that_hang_are_worth_nothing_whatever_they_wrote(tmp_path: Path, image: str) -> None:
    score = play(tmp_path / "answer", image, RIGHT, f"{TEST}sleep 600\n", seconds=2.0)
    assert (score.reward, score.info["outcome"]) == (0.0, "timeout")
    assert score.artifacts[LOG].startswith(b"judging strict")


def test_tests_that_cannot_start_anywhere_have_no_verdict(tmp_path: Path, image: str) -> None:
    with pytest.raises(VerifierFault, match="cannot start in an untouched container either"):
        play(tmp_path / "answer", image, RIGHT, "if then\n")


def test_the_tools_know_the_variables_also_in_a_new_shell(tmp_path: Path, image: str) -> None:
    async def main() -> Any:
        environment = make(tmp_path / "answer", image, TEST)
        (task,) = environment.tasks("train")
        async with started("docker", image=image) as provider:
            live = await environment.begin(task, await provider.acquire(task))
            bash, submit = live.tools
            await bash.call({"command": "exit 3"})
            said = await bash.call({"command": "echo $KIND; pwd"})
            assert (await submit.call({})).done
            return said.content

    assert asyncio.run(main()) == "plain\n/testbed\n[exit code 0]"
