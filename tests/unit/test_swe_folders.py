"""Harbor's task folders: a whole one is read, a broken or unsupported one is one clear error, a reward is one finite number."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.swe.folders import FolderTask, load, read, reward
from harness.errors import ConfigError, VerifierFault

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 120.0
env = { MODE = "strict" }
[agent]
timeout_sec = 300
[environment]
build_timeout_sec = 60.0
cpus = 2
memory = "2G"
storage_mb = 10240
allow_internet = false
env = { LANG = "C.UTF-8" }
"""


def make(folder: Path, toml: str = TOML) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests" / "deep").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Make it work.\n")
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_bytes(b"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (folder / "tests" / "deep" / "data.bin").write_bytes(b"\xff\x00")
    return folder


def test_a_whole_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "hello-world")
    assert read(folder) == FolderTask(
        id="hello-world",
        folder=folder,
        instruction="Make it work.\n",
        image=None,
        dockerfile=folder / "environment" / "Dockerfile",
        tests={"test.sh": b"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n", "deep/data.bin": b"\xff\x00"},
        agent_s=300.0,
        verifier_s=120.0,
        build_s=60.0,
        cpus=2.0,
        memory_mb=2048,
        storage_mb=10240,
        network=False,
        workdir=None,
        env={"LANG": "C.UTF-8"},
        verifier_env={"MODE": "strict"},
        metadata={"difficulty": "easy"},
    )
    assert read(folder).script.startswith(b"#!/bin/bash\n")


def test_defaults_and_a_ready_image(tmp_path: Path) -> None:
    folder = make(tmp_path / "t", '[environment]\ndocker_image = "img:1"\nworkdir = "/app"\nnetwork_mode = "no-network"\n')
    task = read(folder)
    assert (task.image, task.dockerfile, task.workdir, task.network) == ("img:1", None, "/app", False)
    assert (task.agent_s, task.verifier_s, task.build_s, task.memory_mb) == (None, 600.0, 600.0, None)
    assert read(make(tmp_path / "u", "")).network


def test_many_folders_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make(tmp_path / name)
    (tmp_path / "no-task").mkdir()
    assert [task.id for task in load(tmp_path)] == ["a", "b"]
    assert [task.id for task in load(str(tmp_path / "b"))] == ["b"]
    with pytest.raises(ConfigError, match="neither it nor a folder in it"):
        load(tmp_path / "no-task")
    with pytest.raises(ConfigError, match="no such folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[", "task.toml is no TOML"),
        ("environment = 3", "`environment` = 3 is no table"),
        ("[[steps]]\nname = 'a'", "`steps`: a task of several steps"),
        ("[environment]\nos = 'Windows'", "`environment.os` = 'windows'"),
        ("[environment]\ngpus = 1", "a GPU"),
        ("[[environment.mcp_servers]]\nname = 'x'", "mcp_servers"),
        ("[environment]\nmemory = 'much'", "`environment.memory` = 'much' is no size"),
        ("[environment]\nmemory_mb = -1", "`environment.memory_mb` = -1 is no positive number"),
        ("[environment]\ncpus = true", "`environment.cpus` = True"),
        ("[environment]\nnetwork_mode = 'allowlist'", "`environment.network_mode` = 'allowlist'"),
        ("[environment]\nenv = { K = '${HOME}' }", "`environment.env.K`"),
        ("[verifier]\nenv = { K = '${API_KEY:-none}' }", "`verifier.env.K`"),
        ("[verifier]\ntimeout_sec = 'soon'", "`verifier.timeout_sec` = 'soon'"),
        ("[verifier.environment]\ndocker_image = 'x'", "an image of its own"),
    ],
)
def test_a_bad_task_toml(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(make(tmp_path / "task-1", toml))
    assert caught.value.message.startswith("task-1: ")
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("task.toml", None, "task.toml cannot be read"),
        ("instruction.md", None, "instruction.md cannot be read"),
        ("instruction.md", b"\xff", "instruction.md cannot be read"),
        ("instruction.md", b" \n", "instruction.md is empty"),
        ("environment/Dockerfile", None, "neither `environment.docker_image` nor environment/Dockerfile"),
        ("environment/docker-compose.yaml", b"x", "several containers"),
        ("tests/test.sh", None, "tests/test.sh is missing or empty"),
        ("tests/test.sh", b"", "tests/test.sh is missing or empty"),
    ],
)
def test_a_missing_or_bad_file(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    folder = make(tmp_path / "t")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(folder)


def test_a_link_in_tests_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "t")
    (folder / "tests" / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="tests/link is a link"):
        read(folder)


@pytest.mark.parametrize(
    ("text", "json_text", "expected"),
    [
        (b"1\n", None, 1.0),
        (b"0.25", b'{"reward": 0.5, "speed": 2}', 0.5),
        (None, b"0", 0.0),
        (None, b'{"score": 1}', 1.0),
    ],
)
def test_reward(text: bytes | None, json_text: bytes | None, expected: float) -> None:
    assert reward(text, json_text) == expected


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        (None, None),
        (b"", None),
        (b"nan", None),
        (b"yes", None),
        (b"\xff", None),
        (b"1", b""),
        (None, b"true"),
        (None, b"Infinity"),
    ]
    + [(None, b'{"a": 1, "b": 2}'), (None, b'{"reward": "1x"}'), (None, b"[1]"), (None, b'{"reward": null}'), (None, b"{}")],
)
def test_no_reward_is_a_fault_of_the_verifier(text: bytes | None, json_text: bytes | None) -> None:
    with pytest.raises(VerifierFault):
        reward(text, json_text)
