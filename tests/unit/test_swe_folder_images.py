"""Names of task folders' images, and what the environment says before any container runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from environments.swe.folder_environment import FoldersConfig, SweFolders
from environments.swe.folder_images import build_command, image_name
from environments.swe.folders import read
from harness.errors import ConfigError
from harness.registry import find
from tests.contracts.sandbox_support import started
from tests.unit.test_swe_folders import make


def test_the_name_follows_the_build_context_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "a" / "hello-world")
    name = image_name(read(folder))
    assert name.startswith("localhost/sao-task/hello-world:") and name == image_name(read(make(tmp_path / "b" / "hello-world")))
    (folder / "instruction.md").write_text("Other words.\n")
    assert image_name(read(folder)) == name
    names = {name}
    (folder / "environment" / "a").write_text("bc")
    names.add(image_name(read(folder)))
    (folder / "environment" / "a").rename(folder / "environment" / "ab")
    (folder / "environment" / "ab").write_text("c")
    names.add(image_name(read(folder)))
    (folder / "environment" / "ab").chmod(0o755)
    names.add(image_name(read(folder)))
    (folder / "environment" / "link").symlink_to("ab")
    names.add(image_name(read(folder)))
    assert len(names) == 5


@pytest.mark.parametrize(
    ("folder", "name"), [("a__b-1.2", "a__b-1.2"), ("Hello World", "hello-world"), ("a___b-", "a-b"), ("é", "task")]
)
def test_any_folder_has_a_name_that_an_image_may_have(tmp_path: Path, folder: str, name: str) -> None:
    assert image_name(read(make(tmp_path / folder))).rpartition(":")[0] == f"localhost/sao-task/{name}"


def test_what_is_to_be_built_is_told_with_its_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ready = make(tmp_path / "all" / "ready", '[environment]\ndocker_image = "img:1"\n')
    built = make(tmp_path / "all" / "to build")
    assert (image_name(read(ready)), build_command(read(ready))) == ("img:1", None)
    assert build_command(read(built)) == f"docker build --tag {image_name(read(built))} '{built}/environment'"
    with caplog.at_level(logging.INFO, "sao"):
        environment = SweFolders(FoldersConfig(path=str(tmp_path / "all"), heldout=0.0))
        assert [task.image for task in environment.tasks("train")] == ["img:1", image_name(read(built))]
    assert str(build_command(read(built))) in caplog.text
    assert "1 tasks may expect a network" in caplog.text and "such as ready" in caplog.text


def test_the_splits_share_no_task_and_the_message_is_the_instruction(tmp_path: Path) -> None:
    for number in range(20):
        make(tmp_path / f"t{number}")
    environment = find("environment", "task_folders")(FoldersConfig(path=str(tmp_path), heldout=0.5))
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    assert len(train) + len(heldout) == len({task.id for task in (*train, *heldout)}) == 20 and train and heldout
    assert train[0].messages == ({"role": "user", "content": "Make it work.\n"},)


def test_sandboxes_that_are_no_containers_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        environment = SweFolders(FoldersConfig(path=str(make(tmp_path / "t")), heldout=0.0))
        (task,) = environment.tasks("train")
        async with started("memory") as provider:
            await environment.begin(task, await provider.acquire(task))

    with pytest.raises(ConfigError, match="needs a container") as caught:
        asyncio.run(main())
    assert "docker" in caught.value.hint
