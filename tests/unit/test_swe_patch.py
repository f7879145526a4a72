"""The patch grammar against real git, and what the filter lets through."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.swe.diff import DiffError, parse, unquote
from environments.swe.patch import Filtered, filter_patch
from environments.swe.rows import SweRow

HIDDEN = """\
diff --git a/shop/checks.py b/shop/checks.py
--- a/shop/checks.py
+++ b/shop/checks.py
@@ -1 +1 @@
-a
+b
"""


def row(**changes: object) -> SweRow:
    values = {
        "instance_id": "i",
        "repo": "r",
        "base_commit": "c",
        "problem_statement": "p",
        "patch": "p",
        "test_patch": HIDDEN,
        "FAIL_TO_PASS": ["a"],
        "PASS_TO_PASS": ["b"],
        "image": "i",
        "eval_script": "e",
        "log_parser": "l",
    }
    return SweRow.model_validate({**values, **changes})


def edit(path: str, added: str = "y = 1", mode: str = "") -> bytes:
    """A patch of one line in an existing file."""
    index = f"index 0000001..0000002 {mode}\n" if mode else ""
    return f"diff --git a/{path} b/{path}\n{index}--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+{added}\n".encode()


def create(path: str, text: str = "y = 1", mode: str = "100644") -> bytes:
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..0000002\n"
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{text}\n".encode()


def filtered(*files: bytes, **changes: object) -> Filtered:
    return filter_patch(b"".join(files), row(**changes))


# --- the grammar, against git ----------------------------------------------------------------------------------------


class Repo:
    """A folder under the host's git, without this user's configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "--template=")

    def git(self, *words: str, data: bytes | None = None) -> bytes:
        env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": "/nowhere"}
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run(
            ["git", *identity, *words], cwd=self.folder, env=env, input=data, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(self, files: dict[str, bytes | None]) -> None:
        for name, data in files.items():
            path = self.folder / name
            if data is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def commit(self, files: dict[str, bytes | None]) -> None:
        self.write(files)
        self.git("add", "-Af", ".")
        self.git("commit", "-qm", "x", "--allow-empty")

    def diff(self, *options: str) -> bytes:
        self.git("add", "-Af", ".")
        return self.git("diff", "--cached", "--binary", "--full-index", *options, "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    return Repo(tmp_path)


def test_every_kind_of_change_is_read_as_git_means_it(repo: Repo) -> None:
    repo.commit(
        {
            "edit.py": b"a\nb\n",
            "dos.txt": b"one\r\ntwo\r\n",
            "cut.txt": b"no newline",
            "gone.py": b"x\n",
            "empty_gone": b"",
            "moved.py": b"1\n2\n3\n4\n",
            "moved too.py": b"5\n6\n7\n8\n",
            "data.bin": bytes(range(256)),
            "mode.sh": b"run\n",
            'caf\u00e9 \t"q".txt': b"x\n",
            "dir b/x.py": b"x\n",
        }
    )
    repo.write(
        {
            "edit.py": b"a\nB\n++ c\n-- d\ndiff --git a/z b/z\n--- a/z\n+++ b/z\n",
            "dos.txt": b"one\r\nTWO\r\n",
            "cut.txt": b"still none",
            "gone.py": None,
            "empty_gone": None,
            "new.py": b"n\n\n",
            "empty new": b"",
            "only_cr.txt": b"a\rb\rc",
            "data.bin": bytes(range(255, -1, -1)),
            "new.bin": b"\0" * 5000 + bytes(range(256)) * 9,
            'caf\u00e9 \t"q".txt': b"y\n",
            "dir b/x.py": b"y\n",
        }
    )
    (repo.folder / "moved.py").rename(repo.folder / "to.py")
    (repo.folder / "moved too.py").rename(repo.folder / "to too.py")
    (repo.folder / "to.py").write_bytes(b"1\n2\n3\n5\n")
    (repo.folder / "mode.sh").chmod(0o755)
    (repo.folder / "link").symlink_to("/etc/passwd")
    for options in (("--no-renames",), ("-M", "-C", "--find-copies-harder"), ("-M", "-U0"), ("-M", "-U99", "--stat", "-p")):
        patch = repo.diff(*options)
        patch = patch[patch.index(b"diff --git ") :]  # --stat comes first
        files = parse(patch)
        assert b"".join(file.text for file in files) == patch
        listed = repo.git("diff", "--cached", "--name-only", "-z", *options[:1], "HEAD").split(b"\0")[:-1]
        if options[0] == "--no-renames":
            assert sorted(file.paths[0] for file in files) == sorted(listed)
    moved = next(file for file in parse(repo.diff("-M")) if file.new == b"to too.py")
    assert (moved.old, moved.paths) == (b"moved too.py", (b"to too.py", b"moved too.py"))
    by = {file.paths[0]: file for file in parse(repo.diff("--no-renames"))}
    assert by[b"new.py"].old is None and by[b"gone.py"].new is None and by[b"empty_gone"].new is None
    assert by[b"data.bin"].binary and by[b"new.bin"].binary and not by[b"edit.py"].binary
    assert by[b"mode.sh"].modes == {b"100644", b"100755"} and by[b"link"].modes == {b"120000"}
    assert by[b"dos.txt"].added == (b"TWO\r",)
    assert by[b"edit.py"].added == (b"B", b"++ c", b"-- d", b"diff --git a/z b/z", b"--- a/z", b"+++ b/z")


LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"- x", b"+ y", b"@@ -1 +1 @@", b"\\ No", b"\r", b"diff --git a/q b/q", b"\t"])
)


@given(LINES, LINES, st.booleans(), st.booleans())
def test_what_git_writes_is_read_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, old: list[bytes], new: list[bytes], cut_old: bool, cut_new: bool
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path_factory.mktemp("repo")
    for name, lines, cut in (("old", old, cut_old), ("new", new, cut_new)):
        (folder / name).write_bytes(b"\n".join(lines) + (b"" if cut else b"\n"))
    done = subprocess.run(
        ["git", "diff", "--no-index", "--no-color", "--text", "old", "new"], cwd=folder, capture_output=True, check=False
    )
    # `--no-index` names the two files; a patch names one.
    patch = done.stdout.replace(b"b/new", b"b/old")
    files = parse(patch)
    assert b"".join(file.text for file in files) == patch
    expected = sum(line.startswith(b"+") for line in patch.split(b"\n")[4:])
    assert sum(len(file.added) for file in files) == expected
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("quoted", "name"),
    [(b"a/b c", b"a/b c"), (b'"a\\tb"', b"a\tb"), (b'"\\303\\251\\""', 'é"'.encode()), (b'"\\\\"', b"\\")],
)
def test_quoted_names(quoted: bytes, name: bytes) -> None:
    assert unquote(quoted) == name


GOOD = edit("shop/a.py")
SMUGGLED = b"--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n-x\n+y\n"


@pytest.mark.parametrize(
    "patch",
    [
        b"hello\n" + GOOD,
        GOOD + SMUGGLED,  # git apply reads a second file here
        GOOD + b"\n" + SMUGGLED,
        GOOD.replace(b"+y", b"+y\n+z"),
        GOOD.replace(b"@@ -1 +1 @@", b"@@ -1,2 +1,2 @@"),
        GOOD.replace(b"+++ b/shop/a.py", b"+++ b/conftest.py"),
        GOOD.replace(b"--- a/shop/a.py", b"--- a/conftest.py"),
        GOOD.replace(b"--- a/", b"--- "),
        GOOD.replace(b"diff --git a/shop/a.py", b"diff --git a/conftest.py"),
        GOOD.replace(b"--- a", b"rename from shop/a.py\nrename to conftest.py\n--- a"),
        GOOD.replace(b"--- a", b"rename to conftest.py\n--- a"),
        GOOD.replace(b"--- a", b"new file mode 100644\n--- a"),
        GOOD.replace(b"--- a", b"old mode 100644\nold mode 100644\n--- a"),
        GOOD.replace(b"--- a", b"index zz..00\n--- a"),
        GOOD.replace(b"--- a", b"new mode 777\n--- a"),
        create("a.py").replace(b"/dev/null", b"a/a.py"),
        b"diff --git a/x b/y\nold mode 100644\nnew mode 100755\n",
        b'diff --git "a/x b/x\nold mode 100644\nnew mode 100755\n',
        b"diff --git a/x b/x\nGIT binary patch\nliteral 3\nKcmZ\n",
        b"diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 0\nHcmV?d00001\n\n" + SMUGGLED,
        b"diff --git a/x b/x\nBinary files a/x and b/x differ\n" + SMUGGLED,
        b"From 1234\nSubject: x\n\n---\n" + GOOD,
        GOOD[:-3],
        b"\xff\xfe",
    ],
)
def test_what_git_would_not_write_is_refused(patch: bytes) -> None:
    parse(GOOD)
    with pytest.raises(DiffError):
        parse(patch)


# --- the filter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("conftest.py", "conftest"),
        ("shop/conftest.py", "conftest"),
        ("pytest.ini", "test_config"),
        (".pytest.ini", "test_config"),
        ("tox.ini", "test_config"),
        ("setup.cfg", "test_config"),
        ("pyproject.toml", "test_config"),
        ("sub/pyproject.toml", "test_config"),
        ("evil.pth", "startup_hook"),
        ("lib/x.pth", "startup_hook"),
        ("sitecustomize.py", "startup_hook"),
        ("usercustomize/__init__.py", "startup_hook"),
        ("tests/test_a.py", "tests_changed"),
        ("shop/tests/helper.py", "tests_changed"),
        ("test_top.py", "tests_changed"),
        ("shop/cart_test.py", "tests_changed"),
        ("shop/tests.py", "tests_changed"),
        ("test/x.py", "tests_changed"),
        (".gitattributes", "git_file"),
        ("sub/.gitmodules", "git_file"),
        (".git/config", "git_file"),
        (".GIT/config", "git_file"),
        (".github/workflows/x.yml", "git_file"),
        ("shop/checks.py", "hidden_test_path"),
        ("shop/checks.py/x", "hidden_test_path"),
        ("shop", "hidden_test_path"),
        ("../out.py", "unsafe_path"),
        ("shop/../../out.py", "unsafe_path"),
        ("/etc/passwd", "unsafe_path"),
        ("shop//x.py", "unsafe_path"),
        ("./x.py", "unsafe_path"),
        ("keep/this.py", "protected"),
    ],
)
def test_files_that_do_not_count(path: str, flag: str) -> None:
    found = filtered(edit("src/a.py"), edit(path), edit("src/b.py"), protected=["keep"])
    assert found.patch == edit("src/a.py") + edit("src/b.py")
    assert [line.split(":")[0] for line in found.dropped] == [path]
    assert found.flags == [flag]
    assert found.paths == [b"src/a.py", b"src/b.py"]


@pytest.mark.parametrize(
    "path",
    ["src/a.py", "django/test/client.py", "numpy/testing/x.py", "latest.py", "contest.py", "src/site.py", "a b.py", "x.cfg"],
)
def test_files_that_count(path: str) -> None:
    assert filtered(edit(path)) == Filtered(edit(path), [], [], [path.encode()])


def test_kinds_that_do_not_count() -> None:
    link, module = create("shop/link", "/etc", "120000"), create("shop/sub", "Subproject commit 00", "160000")
    head = b"diff --git a/x.so b/x.so\nnew file mode 100644\nindex 00..01\n"
    binary = head + b"GIT binary patch\nliteral 1\nIcmZPo000310RR91\n\nliteral 0\nHcmV?d00001\n\n"
    retarget = edit("shop/old", "/etc", "120000")
    found = filtered(link, module, binary, retarget, GOOD)
    assert found.patch == GOOD
    assert found.flags == ["binary", "submodule", "symlink"]
    assert len(found.dropped) == 4


def test_a_new_test_is_dropped_without_a_flag_and_a_changed_one_with() -> None:
    assert filtered(create("tests/test_new.py")).flags == []
    assert filtered(create("tests/test_new.py")).dropped == ["tests/test_new.py: a test"]
    head = b"diff --git a/tests/test_a.py b/tests/test_a.py\ndeleted file mode 100644\nindex 01..00\n"
    removed = head + b"--- a/tests/test_a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert filtered(removed).flags == ["tests_changed"]


def test_a_rename_is_judged_by_both_names() -> None:
    out = b"diff --git a/tests/x.py b/src/x.py\nsimilarity index 100%\nrename from tests/x.py\nrename to src/x.py\n"
    into = b"diff --git a/src/x.py b/conftest.py\nsimilarity index 100%\nrename from src/x.py\nrename to conftest.py\n"
    fine = b"diff --git a/src/x.py b/src/z.py\nsimilarity index 100%\nrename from src/x.py\nrename to src/z.py\n"
    assert filtered(out).patch == filtered(into).patch == b""
    assert filtered(fine).patch == fine


def test_a_task_can_allow_and_protect() -> None:
    assert filtered(edit("pyproject.toml"), allowed=["pyproject.toml"]).patch == edit("pyproject.toml")
    assert filtered(edit("src/tests/x.py"), allowed=["src/tests"]).patch == edit("src/tests/x.py")
    assert filtered(edit("src/a.py"), protected=["src/*.py"]).flags == ["protected"]
    # What is allowed stays what it is: never the hidden tests, a start-up file, a link.
    for path in ("shop/checks.py", "x.pth", ".gitattributes"):
        assert filtered(edit(path), allowed=["*"]).patch == b""
    assert filtered(create("a", "b", "120000"), allowed=["*"]).patch == b""


@pytest.mark.parametrize(
    "line",
    [
        "import _pytest.reports",
        "os._exit(0)",
        "open('/proc/self/environ')",
        "sys.modules['pytest']",
        "os.environ['PYTEST_CURRENT_TEST']",
        "gc.get_objects()",
        "sys.settrace(f)",
        "import atexit",
        "from pytest import Function",
        "sys._getframe(1)",
    ],
)
def test_suspicious_lines_are_flagged_and_kept(line: str) -> None:
    found = filtered(edit("src/a.py", line))
    assert found.patch == edit("src/a.py", line)
    assert len(found.flags) == 1 and found.flags[0].startswith("audit:")
    removed = edit("src/a.py").replace(b"-x", b"-" + line.encode())
    assert filtered(removed).flags == []


def test_bytes_are_kept() -> None:
    dos = edit("a.txt", "y\r").replace(b"-x", b"-x\r")
    cut = edit("b.txt") + b"\\ No newline at end of file\n"
    latin = edit("c.txt").replace(b"+y", b"+\xe9")
    assert filtered(dos, cut, latin).patch == dos + cut + latin
    assert filtered(dos, cut[:-1]).patch == dos + cut  # the transport lost the last newline


def test_nothing_is_nothing() -> None:
    assert filtered() == Filtered(b"", [], [], [])
