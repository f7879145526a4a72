"""The file editor in sandboxes says what the stock editor says on a local folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.openhands import interpreter
from harness.chat import Chat
from tests.agents.editor_support import LENGTH, Listening, edit, in_folder
from tests.agents.support import TASK, Stand, stand
from tests.contracts.sandbox_support import DOCKER, ok

pytestmark = pytest.mark.timeout(300)
PNG = "89504e470d0a1a0a0000000d49484452"


@pytest.fixture(scope="module", params=["process", DOCKER])
def bench(chat: Chat, request: pytest.FixtureRequest) -> Iterator[Stand]:
    """One worker and one kind of sandbox for all of this module."""
    with stand(chat, request.param, Listening()) as made:
        made.kind = request.param
        yield made


# --- as the stock editor ---------------------------------------------------------------------------------------------

SETUP = rf"""
printf 'one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\nten\n' > ten; cp ten also; cp ten third
printf 'no end' > noend; : > empty; printf 'a\fb\xe2\x80\xa8c\n' > separators
mkdir -p src/deep/deeper .hidden/x void 'with space' $'new\nline' 'ünïcode' '-rf' 'back\slash' '$(touch x)' '"quoted"' "it's"
mkdir '*' '?'
touch src/a.py src/.b src/deep/c.py src/deep/deeper/d .hidden/y 'with space/f g' $'new\nline/z' ünïcode/é '*/?' '[a]'
touch 'back\slash/x'
ln -s src linked; ln -s ten link; ln -s nowhere dangling; ln -s loop loop; ln -s ../src src/up
mkdir many; seq -f 'many/file-%g' 1000 7999 | xargs touch; mkdir many/dir; for i in $(seq 100); do : > many/dir/$i; done
mkdir hidden; for i in $(seq 1000 5999); do echo hidden/.a-name-to-fill-the-answer-$i; done | xargs touch; touch hidden/seen
head -c 3000 /dev/urandom > binary; truncate -s 12M big; truncate -s 12M big.png
printf '\x{PNG[:2]}PNG\r\n\x1a\n\0\0\0\rIHDR' > image.png
printf 'caf\xe9 cr\xe8me br\xfbl\xe9e\nna\xefve\n' > latin1
printf '\xff\xfeh\0i\0\n\0y\0o\0\n\0' > utf16; printf '\xef\xbb\xbfwith a mark\nx\n' > bom
printf 'a\r\nb\r\nc\r\n' > crlf; printf 'a\rb\rc\r' > cr; printf 'a\r\nb\nc\rd' > mixed
seq 5000 > long; printf '%020000d' 7 > wide
"""

VIEW = {"command": "view"}
NAMES = [
    "-rf",
    "$(touch x)",
    '"quoted"',
    "it's",
    "*",
    "[a]",
    "?",
    "a;b",
    "`id`",
    "new\nline",
    "ünïcode",
    "with space",
    "a b",
    "#",
]


def calls_of(folder: str) -> list[dict[str, Any]]:
    """The list."""

    def at(path: str, command: str, **more: Any) -> dict[str, Any]:
        return {"command": command, "path": f"{folder}/{path}", **more}

    viewed = (
        "ten noend empty separators missing missing/deep ten/below ten/ ./ten binary big big.png image.png latin1 utf16 bom"
    )
    folders = ". src linked .hidden void many hidden dangling loop src/up back\\slash src/deep/../deep src/../ten linked/../ten"
    ranges = [[1, 2], [3, -1], [9, 99], [11, 12], [0, 1], [5, 2], [1], [1, 2, 3], [-1, 2], [10, 10]]
    raw = ["ten", "src/a.py", "nothing", "", ".", "..", "~/x", " /x", "~", "/no\0thing", "/nothing\ud800", "file:///etc"]
    return [
        *(at(path, "view") for path in [*viewed.split(), *folders.split(), "crlf", "cr", "mixed", "long", "wide"]),
        *(at(name, "view") for name in NAMES),
        *(at("ten", "view", view_range=r) for r in ranges),
        at("src", "view", view_range=[1, 2]),
        at("empty", "view", view_range=[1, 1]),
        *({"command": "view", "path": path} for path in raw),
        {"command": "create", "path": "relative", "file_text": "x"},
        {"command": "create", "path": "~/x", "file_text": "x"},
        at("n" * 255, "view"),
        at("n" * 256, "view"),
        at("n/" * 3000, "view"),
        at("n" * 256, "create", file_text="x"),
        at("n" * 255, "create", file_text="x"),
        at("new", "create", file_text="fresh\n"),
        at("new", "undo_edit"),
        at("new", "undo_edit"),
        at("new", "create", file_text="again\n"),
        at("nothing/new", "create", file_text="x"),
        at("ten/new", "create", file_text="x"),
        at("src", "create", file_text="x"),
        at("new2", "create", file_text=""),
        at("new3", "create", file_text="héllo ✓ \U0001f600\r\nx"),
        at("new4", "create", file_text="bad \ud800"),
        at("new4", "view"),
        at("new5", "create"),
        at("no\0thing", "create", file_text="x"),
        *(at(f"made {name}".replace("/", "-"), "create", file_text=name) for name in NAMES),
        *(at(f"made {name}", "str_replace", old_str=name, new_str="edited") for name in NAMES),
        at("ten", "str_replace", old_str="three\n", new_str="3\n"),
        at("ten", "str_replace", old_str="four\nfive", new_str="4\n5\n5.5"),
        at("ten", "str_replace", old_str="absent", new_str="x"),
        at("ten", "str_replace", old_str="e", new_str="x"),
        at("ten", "str_replace", old_str="one", new_str="one"),
        at("ten", "str_replace", old_str="  seven  ", new_str="  7  "),
        at("ten", "str_replace", old_str="", new_str="x"),
        at("ten", "str_replace", old_str="one"),
        at("ten", "str_replace", new_str="one"),
        at("ten", "str_replace", old_str="one", new_str=""),
        at("ten", "str_replace", old_str="ten", new_str="10 \ud800"),
        at("ten", "str_replace", old_str="ten\ud800", new_str="10"),
        *[at("ten", "undo_edit")] * 6,
        at("empty", "str_replace", old_str="", new_str="x"),
        at("missing", "str_replace", old_str="a", new_str="x"),
        *(at("src", c, old_str="a", new_str="x", insert_line=0, file_text="x") for c in ("str_replace", "insert", "undo_edit")),
        *({"command": c, "path": "/", "old_str": "a", "new_str": "x"} for c in ("str_replace", "create", "undo_edit")),
        *(at("also", "insert", insert_line=n, new_str=f"line\n{n}") for n in (0, 5, 14, 16, 99)),
        at("also", "insert", insert_line=1),
        at("also", "insert", new_str="x"),
        *[at("also", "undo_edit")] * 5,
        at("noend", "insert", insert_line=1, new_str="more"),
        at("empty", "insert", insert_line=0, new_str="first"),
        at("third", "undo_edit"),
        *(at("src/../third", "str_replace", old_str=f"{x}\n", new_str="") for x in ("one", "two", "five")),
        at("src/../third", "undo_edit"),
        at("third", "undo_edit"),
        *(at(f, "insert", insert_line=1, new_str="x") for f in ("binary", "big", "big.png", "latin1", "utf16", "bom")),
        *(at(f, "str_replace", old_str="x\n", new_str="y ✓\n") for f in ("binary", "big", "latin1", "utf16", "bom")),
        *(at(f, "undo_edit") for f in ("binary", "big", "latin1", "latin1", "utf16", "bom")),
        *(at(f, "insert", insert_line=2, new_str="x\ny") for f in ("crlf", "cr", "mixed")),
        *(at(f, "str_replace", old_str="a\n", new_str="A\n\n") for f in ("crlf", "cr", "mixed")),
        *(at(f, "view") for f in ("crlf", "cr", "mixed", "ten", "also", "latin1", ".")),
        *[at(f, "undo_edit") for f in ("crlf", "cr", "mixed")] * 2,
        at("long", "str_replace", old_str="\n2500\n", new_str="\nmiddle\n"),
    ]


@pytest.fixture(scope="module")
def stock() -> list[tuple[int, str]]:
    """What the stock editor says (see `normal`)."""
    base = Path(tempfile.mkdtemp())
    folder = str(base / ("s" * (LENGTH - len(str(base)) - 1)))
    os.mkdir(folder)
    # What is no text becomes a question mark in the conversation, before any tool sees it.
    story = json.dumps({"folder": folder, "calls": [SETUP, *calls_of(folder)]}).replace("\\ud800", "?")
    script = Path(__file__).with_name("stock_editor.py")
    env = {**os.environ, "HOME": str(base), "LOG_LEVEL": "CRITICAL", "OPENHANDS_SUPPRESS_BANNER": "1"}
    done = subprocess.run(
        [interpreter(None), str(script)], input=story, capture_output=True, text=True, env=env, timeout=120, check=True
    )
    assert len(folder) == LENGTH
    return [normal(text, folder) for text in json.loads(done.stdout)]


def normal(text: str, folder: str) -> tuple[int, str]:
    """Its length, and the text with `{F}` for the folder, without random names and without a line that is cut in two."""
    cut = re.sub(r"\n[^\n]*(<response clipped>.*</NOTE>)[^\n]*\n", r"\n\1\n", text)
    return len(text), re.sub(r"\.[a-z0-9_]{8}\.tmp", ".RANDOM.tmp", cut.replace(folder, "{F}"))


def test_says_what_the_stock_editor_says(bench: Stand, stock: list[tuple[int, str]]) -> None:
    async def main() -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        sandbox = await bench.sandboxes.acquire(TASK)
        folder = await in_folder(sandbox)
        await ok(sandbox, SETUP)
        calls = calls_of(folder)
        return calls, [normal(text, folder) for text in await edit(bench, sandbox, calls)]

    calls, seen = bench.run(main())
    assert len(seen) == len(stock) > 200
    for asked, here, there in zip(calls, seen, stock, strict=True):
        if asked["path"] == "/" and bench.kind == "process":
            assert here[1].endswith("path '/' leads out of the sandbox"), "it is this machine's root"
        else:
            assert here == there, asked
