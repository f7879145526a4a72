"""The file editor keeps what an edit is not about, reaches nothing of the host, and tells the model what fails."""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.chat import Chat
from harness.errors import SandboxError
from harness.protocols import Sandbox
from harness.task import Termination
from tests.agents.editor_support import Listening, edit, in_folder
from tests.agents.support import FINISH, TASK, Stand, call, stand
from tests.contracts.sandbox_support import DOCKER, an_engine, needs_docker, ok
from tests.support import PlayedEngine

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["process", DOCKER])
def bench(chat: Chat, request: pytest.FixtureRequest) -> Iterator[Stand]:
    """One worker and one kind of sandbox for all of this module."""
    with stand(chat, request.param, Listening()) as made:
        made.kind = request.param
        yield made


# --- what the stock editor does not keep -----------------------------------------------------------------------------

KEPT = r"""
printf '#!/bin/sh\r\necho one\necho two\r\n' > script; chmod 755 script; ln -s script soft; mkdir d; ln -s d ld
seq -f 'line %g' 20000 | sed 's/$/\r/' > d/big; chmod 640 d/big
"""
STATE = "stat -c '%a %u %g %i %h' script d/big; readlink soft ld"


def give_away(sandbox: Any, path: str, mode: int) -> None:
    """Make a file of a container another user's; its content stays."""
    with an_engine() as engine:
        entry, data = tarfile.TarInfo(path.lstrip("/")), engine.read_archive(sandbox.container_id, path)
        entry.uid, entry.gid, entry.mode, entry.size = 1234, 2345, mode, len(data)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(entry, io.BytesIO(data))
        engine.api.put_archive(sandbox.container_id, "/", buffer.getvalue())


def test_an_edit_keeps_mode_owner_links_and_line_endings(bench: Stand) -> None:
    async def main() -> None:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await ok(sandbox, KEPT)
        if bench.kind == "docker":
            give_away(sandbox, f"{folder}/script", 0o757)
        await ok(sandbox, "ln script hard")
        before, script, big = (
            await ok(sandbox, STATE),
            await sandbox.read(f"{folder}/script"),
            await sandbox.read(f"{folder}/d/big"),
        )
        await ok(sandbox, "git init -q . && git -c core.autocrlf=false add -A")
        one = {"command": "str_replace", "path": f"{folder}/soft", "old_str": "one", "new_str": "1"}
        other = {"command": "str_replace", "path": f"{folder}/ld/big", "old_str": "line 777\n", "new_str": "LINE\nnew\n"}
        seen = await edit(bench, sandbox, [one, other])
        assert all("has been edited" in text for text in seen), seen
        assert await ok(sandbox, STATE) == before
        assert await sandbox.read(f"{folder}/hard") == script.replace(b"echo one\n", b"echo 1\r\n")
        assert await sandbox.read(f"{folder}/d/big") == big.replace(b"line 777\r\n", b"LINE\r\nnew\r\n")
        changed = (await ok(sandbox, "git -c core.autocrlf=false diff --numstat -- script d")).split()
        assert changed == ["2", "1", "d/big", "1", "1", "script"]
        undo = [{"command": "undo_edit", "path": call["path"]} for call in (one, other)]
        seen = await edit(bench, sandbox, [one | {"old_str": "two"}, other | {"old_str": "line 5\n"}, *undo])
        assert all("undone" in text for text in seen[2:]), seen
        assert await ok(sandbox, STATE) == before
        assert (await sandbox.read(f"{folder}/d/big")).count(b"\r\n") == 20001

    bench.run(main())


def test_undo_brings_every_byte_back(bench: Stand) -> None:
    mixed = b"a\r\nb\nc\rd\r\n\r\n\n"
    wide = b"\xfe\xff" + "hello\r\nworld\r\n".encode("utf-16-be")
    edits = [
        {"command": "str_replace", "old_str": "b\nc\n", "new_str": "B\n"},
        {"command": "insert", "insert_line": 1, "new_str": ""},
        {"command": "str_replace", "old_str": "d\n", "new_str": ""},
    ]

    async def main() -> None:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await sandbox.write(f"{folder}/f", mixed)
        path = {"path": f"{folder}/f"}
        calls = [*(one | path for one in edits), *[{"command": "undo_edit"} | path] * 4]
        seen = await edit(bench, sandbox, calls)
        assert ["undone" in text for text in seen] == [False] * 3 + [True] * 3 + [False]
        assert await sandbox.read(f"{folder}/f") == mixed
        await sandbox.write(f"{folder}/wide", wide)
        await edit(bench, sandbox, [{"command": "insert", "path": f"{folder}/wide", "insert_line": 1, "new_str": "new"}])
        assert await sandbox.read(f"{folder}/wide") == wide[:16] + "new\r\n".encode("utf-16-be") + wide[16:]

    bench.run(main())


# --- the host --------------------------------------------------------------------------------------------------------


def state(folder: Path) -> dict[str, Any]:
    """Everything below a folder."""
    return {
        str(p): (p.lstat().st_mtime_ns, p.lstat().st_mode, p.read_bytes() if p.is_file() else b"") for p in folder.rglob("*")
    }


def test_nothing_of_the_host_is_read_or_written(bench: Stand, tmp_path: Path) -> None:
    secret = f"secret-{uuid.uuid4().hex}"
    (tmp_path / "hidden" / "deep").mkdir(parents=True)
    for name in ("key.txt", "key.png", "hidden/key.txt"):
        (tmp_path / name).write_text(f"{secret}\n")
    before = state(tmp_path)
    up = "/.." * 12

    async def main() -> list[str]:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await ok(
            sandbox,
            f"ln -s {tmp_path} out; ln -s {tmp_path}/key.txt key; ln -s / root; ln -s {tmp_path}/new dangling; ln -s / -- -L",
        )
        paths = [
            *(
                f"{start}{tmp_path}{name}"
                for name in ("/key.txt", "/key.png", "/hidden", "", "/new")
                for start in ("", up, f"{folder}{up}")
            ),
            *(
                f"{folder}/{name}"
                for name in ("out", "out/key.txt", "out/../hidden", "key", "dangling", f"root{tmp_path}/key.txt", "out/new")
            ),
            *(f"/proc/{who}/{way}{tmp_path}/key.txt" for who in ("self", os.getpid(), 1) for way in ("root", "cwd" + up)),
            f"//{tmp_path}/key.txt",
            f"~/..{up}{tmp_path}/key.txt",
            f"{os.path.relpath('/', folder)}{tmp_path}/key.txt",
            f"file://{tmp_path}/key.txt",
            f"{folder}/-L{tmp_path}/key.txt",
            f"/{up}",
        ]
        ways: list[dict[str, Any]] = [
            {"command": "view"},
            {"command": "view", "view_range": [1, 1]},
            {"command": "create", "file_text": "overwritten"},
            {"command": "str_replace", "old_str": "secret", "new_str": "overwritten"},
            {"command": "insert", "insert_line": 0, "new_str": "overwritten"},
            {"command": "undo_edit"},
        ]
        if bench.kind == "process":  # else there are folders of these names in the container by and by
            ways.reverse()
        return await edit(bench, sandbox, [way | {"path": path} for path in paths for way in ways])

    seen = bench.run(main())
    assert state(tmp_path) == before
    assert not [text for text in seen if secret in text or "hidden/" in text or "sao-worker" in text or "mirror-" in text]
    if bench.kind == "process":
        assert sum("leads out of the sandbox" in text for text in seen) > len(seen) // 3


def test_nothing_is_left_in_the_worker(bench: Stand) -> None:
    assert bench.play([call("file_editor", command="view", path="/", security_risk="LOW"), FINISH]).end is Termination.FINISHED
    (worker,) = bench.agent._crew._workers
    assert {path.name for path in worker._folder.iterdir() if not path.name.startswith(".")} <= {"log"}


# --- failures --------------------------------------------------------------------------------------------------------


class Sick:
    """A sandbox that fails in some way; else the other one."""

    def __init__(self, well: Sandbox, **ways: BaseException) -> None:
        self._well, self._ways = well, ways

    def __getattr__(self, name: str) -> Any:
        if (error := self._ways.get(name)) is None:
            return getattr(self._well, name)

        async def fail(*_: Any, **__: Any) -> Any:
            raise error

        return fail


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"read": PermissionError(13, "Permission denied")}, "Permission denied"),
        ({"read": FileNotFoundError(2, "No such file or directory")}, "No such file"),
        ({"write": OSError(28, "No space left on device")}, "No space left on device"),
        ({"write": IsADirectoryError(21, "Is a directory")}, "Is a directory"),
    ],
    ids=["denied", "vanished", "full", "folder"],
)
def test_what_the_policy_can_cause_is_told_to_it(bench: Stand, ways: dict[str, BaseException], expected: str) -> None:
    async def main() -> None:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await sandbox.write(f"{folder}/f", b"one\n")
        change = {"command": "str_replace", "path": f"{folder}/f", "old_str": "one", "new_str": "two"}
        seen = await edit(bench, Sick(sandbox, **ways), [change, {"command": "undo_edit", "path": f"{folder}/f"}])
        assert expected in seen[0]
        assert "undone" not in seen[1], "what was not written is no history"
        assert await sandbox.read(f"{folder}/f") == b"one\n"

    bench.run(main())


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_lost_sandbox_ends_the_episode(bench: Stand, what: str) -> None:
    async def main() -> Any:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await sandbox.write(f"{folder}/f", b"one\n")
        change = call("file_editor", command="insert", path=f"{folder}/f", insert_line=0, new_str="x", security_risk="LOW")
        engine = PlayedEngine(bench.chat, [change] * 9)
        return await bench.on(Sick(sandbox, **{what: SandboxError("it is gone")}), engine)

    played = bench.run(main())
    assert isinstance(played.end, SandboxError)
    assert len(played.engine.requests) <= 2


MESS = """
set -ux; set -f; GLOBIGNORE='*'; shopt -s failglob nocaseglob; LC_ALL=POSIX
cd() { echo no; }; printf() { echo no; }; wc() { echo no; }; command() { echo no; }
"""


def test_what_commands_have_set_does_not_matter(bench: Stand) -> None:
    async def main() -> None:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await ok(sandbox, "mkdir -p d/e; touch d/f d/e/g d/.h; printf 'one\\n' > f")
        await sandbox.exec(MESS, timeout_s=30)
        create = {"command": "create", "path": f"{folder}/new", "file_text": "new"}
        seen = await edit(bench, sandbox, [*({"command": "view", "path": f"{folder}/{name}"} for name in "df"), create])
        assert seen[0].split(":\n")[1].startswith("".join(f"{folder}/d/{x}\n" for x in ("", "e/", "e/g", "f")) + "\n1 hidden")
        assert seen[1].endswith("     1\tone\n")
        assert "created" in seen[2]
        assert await sandbox.read(f"{folder}/new") == b"new"
        await sandbox.exec("set +ux; (while builtin echo noise; do builtin command -p sleep 0.001; done) &", timeout_s=30)
        create["path"] += "er"
        noisy = await edit(
            bench, sandbox, [*({"command": "view", "path": f"{folder}/{name}"} for name in ("d", "none")), create]
        )
        assert noisy[0] == seen[0]
        assert "does not exist" in noisy[1]
        assert "created" in noisy[2]

    bench.run(main())


@needs_docker
def test_rights_are_those_of_the_policy(chat: Chat) -> None:
    with stand(chat, "docker", Listening()) as made:

        async def main() -> None:
            sandbox = await made.sandboxes.acquire(TASK)
            folder = await in_folder(sandbox)
            await ok(sandbox, "printf 'one\\n' > readable; cp readable closed; mkdir shut; touch shut/f; chmod 0 shut")
            give_away(sandbox, f"{folder}/readable", 0o644)
            give_away(sandbox, f"{folder}/closed", 0o600)
            change = {"command": "str_replace", "old_str": "one", "new_str": "two"}
            paths = [{"path": f"{folder}/{name}"} for name in ("readable", "closed", "shut", "shut/f", "shut/new")]
            calls = [{"command": "view"} | path for path in paths]
            calls += [change | paths[0], {"command": "undo_edit"} | paths[0], change | paths[1]]
            calls += [
                {"command": "create", "file_text": "x"} | paths[4],
                {"command": "create", "file_text": "x", "path": "/etc/x"},
            ]
            seen = await edit(made, sandbox, calls)
            assert "one" in seen[0]
            assert "No edit history" in seen[6]
            assert all("[Errno 13] Permission denied" in text for i, text in enumerate(seen) if i not in (0, 6, 9)), seen
            assert await ok(sandbox, "cat readable; stat -c %u readable closed") == "one\n1234\n1234\n"

        made.run(main())


def test_a_shell_that_cannot_answer_is_told(bench: Stand) -> None:
    async def main() -> list[str]:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await ok(sandbox, "mkfifo pipe; printf x > f")
        seen = await edit(bench, sandbox, [{"command": "view", "path": f"{folder}/pipe"}])
        await ok(sandbox, "readonly at=nothing")
        return seen + await edit(bench, sandbox, [{"command": c, "path": f"{folder}/f"} for c in ("view", "undo_edit")])

    pipe, *seen = bench.run(main())
    assert "pipe is neither a file nor a folder" in pipe
    assert all("does not answer" in text for text in seen), seen


# --- several at once -------------------------------------------------------------------------------------------------


def test_conversations_in_one_worker_do_not_mix(bench: Stand) -> None:
    async def one(i: int) -> None:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        path = {"path": f"{folder}/same"}
        calls = [
            {"command": "create", "file_text": f"mine-{i}\n"} | path,
            *({"command": "insert", "insert_line": 1, "new_str": f"line-{i}-{n}"} | path for n in range(5)),
            *[{"command": "undo_edit"} | path] * 2,
            {"command": "view"} | path,
        ]
        seen = await edit(bench, sandbox, calls, f"same-{i}")
        left = f"mine-{i}\n" + "".join(f"line-{i}-{n}\n" for n in (2, 1, 0))
        assert (await sandbox.read(f"{folder}/same")).decode() == left
        assert re.findall(r"\t(.*)\n", seen[-1]) == left.split()
        assert not [text for text in seen for j in range(4) if j != i and (f"mine-{j}" in text or f"line-{j}-" in text)]

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(4)))

    bench.run(main())
    assert len(bench.agent._crew._workers) == 1
