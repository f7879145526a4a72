"""What the agent did comes out exactly, whatever it did to git, and goes into a fresh container exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from environments.swe.diff import parse
from environments.swe.patch import Extracted, PatchLimits, extract
from environments.swe.prepare import prepare
from harness.protocols import Sandbox
from harness.task import Task
from tests.contracts.sandbox_support import ok, started
from tests.swe.instance import row

pytestmark = pytest.mark.timeout(180)
LISTING = (
    "find . -path ./.git -prune -o -type l -printf '%p -> %l\\n' -o -type f -printf '%p %m ' -exec sha256sum {} \\; | sort"
)
EVERYTHING = r"""
printf 'one\r\nTWO\r\nthree\r\n' > dos.txt
printf 'still no newline' > cut.txt
printf 'x\ny\n' > cut2.txt
rm gone.txt
mv moved.txt 'to a "new" é.txt'
mkdir -p deep/er; printf 'def f():\n\treturn 1\n' > deep/er/new.py
: > empty.py
chmod 755 shop/cart.py
printf '\377\376\000x' > data.bin
head -c 3000 /dev/urandom > new.bin
printf 'latin \351\n' > latin.txt
printf 'a\rb\r' > old_mac.txt
ln -s shop link
echo y > 'with space é.txt'
"""


def run(image: str, story: Callable[[Sandbox, str], Awaitable[None]]) -> None:
    """A story with a prepared sandbox and its base."""

    async def main() -> None:
        async with started("docker", image=image) as provider:
            sandbox = await provider.acquire(Task(id="extract", messages=(), image=image))
            base = await prepare(sandbox, row())
            await story(sandbox, base)

    asyncio.run(main())


async def taken(sandbox: Sandbox, base: str, **limits: float) -> Extracted:
    return await extract(sandbox, base, "/testbed", PatchLimits(**limits))  # type: ignore[arg-type]


def test_every_kind_of_change_round_trips(image: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await ok(sandbox, EVERYTHING)
        wanted = await ok(sandbox, LISTING)
        got = await taken(sandbox, base)
        assert (got.reason, got.incomplete, got.size) == ("", False, len(got.patch))
        assert got.files == len(parse(got.patch)) == 15
        fresh = await sandbox.fresh()
        assert await ok(fresh, LISTING) != wanted
        await fresh.write("/tmp/p", got.patch)
        await ok(fresh, "git apply --whitespace=nowarn /tmp/p")
        assert await ok(fresh, LISTING) == wanted

    run(image, story)


WORK = "printf 'z = 1\\n' > shop/new.py; echo '# more' >> shop/cart.py"
COMMIT = "git -c user.name=a -c user.email=a@a commit -qam work"


TRICKS = {
    "nothing": "true",
    "commit": f"git add -A; {COMMIT}",
    "other history": f"git add -A; {COMMIT}; git checkout -q --orphan new; {COMMIT}; git branch -D main; git gc -q",
    "programs": "for key in core.hooksPath diff.external core.fsmonitor core.pager; do git config $key /bin/false; done",
    "settings": "git config core.autocrlf true; git config core.worktree /; git config core.excludesFile /etc/passwd",
    "attributes": "git config filter.f.clean 'cat /etc/passwd'; echo '*.py filter=f -diff' > .git/info/attributes",
    "hooks": "mkdir .git/hooks; printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
    "index": "rm .git/index; touch .git/index.lock .git/HEAD.lock; chmod 000 .git/config",
    "index flags": "git add -A; git update-index --assume-unchanged shop/cart.py; git update-index --skip-worktree shop/new.py",
    "replaced base": "git replace HEAD $(git commit-tree -m x $(git mktree </dev/null))",
    "functions": "git() { :; }; cd() { :; }; builtin() { :; }; command() { :; }; function /usr/bin/env { :; }; exec >/dev/null",
    "aliases": "shopt -s expand_aliases; alias git=false; set -e; export PATH=/no GIT_DIR=/no; trap 'exit 1' DEBUG",
    "a process": "(sleep 0.2; while true; do echo x > shop/new.py; done) >/dev/null 2>&1 & kill -STOP $!",
    "global": "echo bad > ~/.gitconfig; mkdir -p ~/.config/git; echo '*.py' > ~/.config/git/ignore",
    "another tree": "git worktree add -q /tmp/tree; git bundle create -q /tmp/b --all",
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_nothing_that_is_done_to_git_or_the_shell_changes_the_patch(image: str, trick: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await ok(sandbox, WORK)
        await sandbox.exec(trick, timeout_s=8)  # some leave a shell that never answers again
        got = await taken(sandbox, base)
        assert (got.reason, [file.new for file in parse(got.patch)]) == ("", [b"shop/cart.py", b"shop/new.py"])
        assert [file.added for file in parse(got.patch)] == [(b"# more",), (b"z = 1",)]

    run(image, story)


def test_what_git_ignores_is_told_and_caches_are_not_files(image: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await ok(
            sandbox, "echo x > debug.log; mkdir -p shop/__pycache__ .pytest_cache; touch shop/__pycache__/b.pyc .pytest_cache/c"
        )
        await ok(sandbox, "echo secret.py >> .git/info/exclude; echo x > secret.py")
        got = await taken(sandbox, base)
        assert (got.patch, got.files) == (b"", 0)
        assert set(got.ignored) == {"debug.log", "secret.py"}

    run(image, story)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("rm -rf .git", "repository_lost"),
        ("rm -rf .git; git init -q; git add -A; git -c user.name=a -c user.email=a@a commit -qm x", "repository_lost"),
        ("rm -rf .git/objects; mkdir .git/objects", "repository_lost"),
        ("seq 200000 > big.txt", "too_large"),
        ("for i in $(seq 60); do echo $i > f$i.txt; done", "too_large"),
        ("rm /usr/bin/git", "unreadable"),
        ("rm /usr/bin/env", "unreadable"),
        ("printf '#!/bin/sh\\nsleep 100\\n' > /usr/local/bin/git; chmod +x /usr/local/bin/git", "timeout"),
    ],
)
def test_reasons_for_no_patch(image: str, act: str, reason: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await sandbox.exec(act, timeout_s=30)
        got = await taken(sandbox, base, step_s=5.0 if reason == "timeout" else 60.0)
        assert (got.reason, got.patch) == (reason, b"")
        assert (got.size > 1_000_000 or got.files > 50) == (reason == "too_large")

    run(image, story)


def test_a_repository_in_the_repository_is_told(image: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await ok(sandbox, WORK + "; git init -q inner; echo x > inner/y.py")
        got = await taken(sandbox, base)
        assert got.incomplete
        assert [file.new for file in parse(got.patch)] == [b"shop/cart.py", b"shop/new.py"]

    run(image, story)


ENDINGS = {"a function": "sleep() { :; }", "the shell ends": "trap 'case $BASH_COMMAND in *sleep*) exit 3;; esac' DEBUG"}


@pytest.mark.parametrize("act", ENDINGS.values(), ids=ENDINGS)
def test_a_shell_that_ends_commands_early_still_gives_its_patch(image: str, act: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await sandbox.exec(f"{WORK}; {act}", timeout_s=8)
        assert [file.new for file in parse((await taken(sandbox, base)).patch)] == [b"shop/cart.py", b"shop/new.py"]

    run(image, story)


def test_a_patch_that_cannot_be_had_is_the_agents_doing(image: str) -> None:
    async def story(sandbox: Sandbox, base: str) -> None:
        await sandbox.exec("(trap '' TERM; while :; do kill -15 -1; done) & while :; do :; done", timeout_s=5)
        assert (await taken(sandbox, base, step_s=20.0)).reason in ("unreadable", "timeout")

    run(image, story)
