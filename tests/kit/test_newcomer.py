"""The path of a newcomer, as real commands: init, edit two functions, check, train the tiny model on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.kit.init import init_environment
from tests.e2e.support import ROOT, command, summary

MAKE_TASK = '''
def make_task(split: Split, index: int, rng: random.Random) -> tuple[str, str]:
    """(question, right answer) of task number `index`."""
    word = "".join(rng.choices("abcdefg", k=6)) + ("x" if split == "heldout" else "y")
    return f"Spell {word} backwards.", word[::-1]
'''
JUDGE = '''
def judge(answer: str, right: str) -> float:
    """The reward."""
    return sum(one == other for one, other in zip(answer, right)) / len(right) if len(answer) == len(right) else 0.0
'''
Say = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def say(tmp_path: Path) -> Say:
    """`sao` in a folder of a user's, with nothing of theirs installed."""

    def run(*words: str, folder: str = ".", timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command(*words), cwd=tmp_path / folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


def edit(file: Path, function: str, text: str) -> None:
    """Replace a top-level function."""
    source = file.read_text()
    found = re.search(rf"^def {function}\(.*?(?=^# EDIT|^class |^def (?!{function}\())", source, re.MULTILINE | re.DOTALL)
    assert found, function
    file.write_text(source.replace(found[0], text.lstrip() + "\n\n"))


def test_the_newcomer_s_path(say: Say, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    start = time.monotonic()
    made = say("init", "env", "mirror")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(tmp_path / "mirror")
    file = tmp_path / "mirror" / "mirror" / "environment.py"
    edit(file, "make_task", MAKE_TASK)
    edit(file, "judge", JUDGE)
    checked = say("check", "mirror.environment:Mirror", "seed=3", folder="mirror")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = say("train", "config.toml", "steps=2", "eval.tasks=8", folder="mirror")
    assert trained.returncode == 0, trained.stderr
    (run,) = (tmp_path / "mirror" / "runs").iterdir()
    assert summary(run)["policy_version"] == 2
    record_property("seconds", time.monotonic() - start)


def test_the_package_can_be_moved(say: Say, tmp_path: Path) -> None:
    assert say("init", "env", "mirror").returncode == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mirror").rename(tmp_path / "elsewhere" / "renamed")
    folder = tmp_path / "elsewhere" / "renamed"
    written = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tiny-policy"]
    assert not [path for path in written if str(ROOT) in path.read_text() or str(tmp_path) in path.read_text()]
    dry = say("train", "--dry-run", "config.toml", folder="elsewhere/renamed")
    assert dry.returncode == 0, dry.stderr
    assert str(folder / "tiny-policy") in dry.stdout


def test_a_bad_edit_is_named(say: Say, tmp_path: Path) -> None:
    say("init", "env", "mirror")
    edit(tmp_path / "mirror" / "mirror" / "environment.py", "judge", JUDGE.replace("else 0.0", "else 0.5"))
    checked = say("check", "mirror.environment:Mirror", "--json", folder="mirror")
    assert checked.returncode == 0, "silence is never judged: nobody answered"
    edit(tmp_path / "mirror" / "mirror" / "environment.py", "judge", JUDGE.replace("sum(", "0.5 * sum("))
    checked = say("check", "mirror.environment:Mirror", "--json", folder="mirror")
    answer = json.loads(checked.stdout)
    assert checked.returncode == 1 and answer["ok"] is False
    assert [each["name"] for each in answer["checks"] if each["outcome"] == "failed"] == ["solver"]


def test_its_own_test_passes_and_its_name_is_an_entry_point(say: Say, tmp_path: Path) -> None:
    say("init", "env", "my_first_env")
    folder = tmp_path / "my_first_env"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(tests, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    target = tmp_path / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(folder),
    ]
    subprocess.run(pip, capture_output=True, timeout=300, check=True)
    config = ["environment.id=my_first_env", "model.path=" + str(ROOT / "configs/quickstart-warm"), "limits.max_context=512"]
    for path, code in ((str(ROOT), 2), (f"{ROOT}{os.pathsep}{target}", 0)):
        env = os.environ | {"PYTHONPATH": path}
        dry = subprocess.run(
            command("train", "--dry-run", *config),
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert dry.returncode == code, dry.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("My-Env", "cannot name"), ("2nd", "cannot name"), ("class", "cannot name"), ("sums", "already"), ("json", "already")],
)
def test_bad_names_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        init_environment(name, tmp_path)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = init_environment("mirror", tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        init_environment("mirror", tmp_path)
    assert (folder / "README.md").read_text() == "mine"
