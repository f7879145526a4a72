"""Writing over a file keeps what the file is: mode, owner, links, identity. Real processes and real containers."""

from __future__ import annotations

import io
import os
import sys
import tarfile

import pytest

from harness.protocols import Sandbox
from harness.sandboxes import docker_monitor
from tests.contracts.sandbox_support import COMMAND_S, an_engine, needs_docker, ok, play, real

pytestmark = pytest.mark.timeout(180)

SIZES = pytest.mark.parametrize("size", [10, 200_000])
FACTS = "stat -c '%i %a %u %h'" if sys.platform == "linux" else "stat -f '%i %Lp %u %l'"


def some(size: int) -> bytes:
    return (b"line\r\n\0\xff" * size)[:size]


@real
@SIZES
def test_the_file_stays_the_same_file(kind: str, size: int) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "mkdir real; ln -s real folder; echo '#!/bin/sh' > real/script; chmod 755 real/script")
        await ok(sandbox, "ln real/script other; ln -s real/script link; ln -s real/made dangling; umask 077")
        before = await ok(sandbox, f"{FACTS} real/script")
        for path in ("real/script", "link", "folder/script"):
            await sandbox.write(path, b"x" * 300_000)
            await sandbox.write(path, some(size))
            assert await sandbox.read("other") == some(size)
        assert await ok(sandbox, f"{FACTS} real/script; readlink link folder") == f"{before}real/script\nreal\n"
        await sandbox.write("dangling", some(size))
        assert await sandbox.read("real/made") == some(size)
        await sandbox.write("new/folder/file", some(size))
        assert (await ok(sandbox, f"{FACTS} new/folder/file")).split()[1] == "644"
        assert await ok(sandbox, "ls -A /tmp | grep -F .sao- || echo none") == "none\n"

    play(kind, story)


@real
@SIZES
@pytest.mark.skipif(os.geteuid() != 0, reason="the process sandbox has its owner's rights")
def test_a_file_that_may_not_be_written(kind: str, size: int) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "echo old > file; chmod 444 file; ln -s file link")
        await sandbox.write("link", some(size))
        assert (await ok(sandbox, f"{FACTS} file")).split()[1:3] == ["444", "0"]
        assert await sandbox.read("file") == some(size)
        assert await ok(sandbox, "readlink link") == "file\n"

    play(kind, story)


@needs_docker
@SIZES
def test_a_file_of_another_user(size: int) -> None:
    async def story(sandbox: Sandbox) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            entry = tarfile.TarInfo("file")
            entry.uid, entry.gid, entry.mode, entry.size = 1234, 4321, 0o640, 3
            archive.addfile(entry, io.BytesIO(b"old"))
        await ok(sandbox, "ln -s file link")
        with an_engine() as engine:
            engine.api.put_archive(sandbox.container_id, "/sandbox", buffer.getvalue())
        await sandbox.write("link", some(size))
        assert (await ok(sandbox, f"{FACTS} file; readlink link")).split()[1:] == ["640", "1234", "1", "file"]
        assert await sandbox.read("file") == some(size)

    play("docker", story)


@needs_docker
def test_a_file_of_a_container_that_is_over_its_disk_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.2)

    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "echo old > script; chmod 750 script; ln -s script link")
        assert (await sandbox.exec("head -c 30000000 /dev/zero > big; sleep 68.5", timeout_s=COMMAND_S)).killed_by == "disk"
        await sandbox.write("link", b"new")
        await sandbox.write("a/new/file", b"new")
        facts = f"rm -f big; {FACTS} script; readlink link; cat script a/new/file"
        assert (await ok(sandbox, facts)).split()[1:] == ["750", "0", "1", "script", "newnew"]

    play("docker", story, disk_mb=8)
