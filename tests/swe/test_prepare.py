"""One commit is all that git knows when the agent begins."""

from __future__ import annotations

import asyncio

import pytest

from environments.swe.prepare import prepare, probe
from harness.protocols import Sandbox
from harness.task import Task
from tests.contracts.sandbox_support import ok, started
from tests.swe.instance import row

pytestmark = pytest.mark.timeout(180)

ALL_OBJECTS = "git cat-file --batch-all-objects --batch-check"
SETUP = """\
diff --git a/shop/cart.py b/shop/cart.py
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -2,4 +2,4 @@ from shop.prices import discount
 
 
 def total(prices, percent=0):
-    return discount(sum(prices), percent)
+    return discount(max(prices), percent)"""


def test_nothing_of_the_future_is_left(image: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        future = (await ok(sandbox, "git rev-parse future")).strip()
        tree = await ok(sandbox, "git rev-parse HEAD^{tree}")
        files = await ok(sandbox, "find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum")
        _, faults = await probe(sandbox, "/testbed")
        assert {"commits", "unreachable", "refs", "remotes", "reflog"} <= faults.keys()
        base = await prepare(sandbox, row())
        assert await ok(sandbox, "git rev-list --all --count") == "1\n"
        assert await ok(sandbox, "git rev-parse HEAD") == f"{base}\n"
        assert await ok(sandbox, "git rev-parse HEAD^{tree}") == tree
        assert files == await ok(sandbox, "find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum")
        for command in (
            "git tag",
            "git remote",
            "git stash list",
            "git reflog --all",
            "git status --porcelain",
            "git branch -r",
        ):
            assert await ok(sandbox, command) == "", command
        assert (await sandbox.exec(f"git cat-file -e {future}", timeout_s=30)).exit_code != 0
        assert await ok(sandbox, "grep -rl SOLUTION .git | cat") == ""
        assert await ok(sandbox, f"{ALL_OBJECTS} | grep -c commit") == "1\n"
        assert "percent / 100" not in await ok(sandbox, f"{ALL_OBJECTS} | cut -d' ' -f1 | git cat-file --batch | cat -v")
        assert (await sandbox.exec("git fsck --full --strict", timeout_s=30)).exit_code == 0
        assert await ok(sandbox, "find .git -name '*.idx' | wc -l; find .git/hooks -type f 2>/dev/null | wc -l") == "1\n0\n"
        # It is reproducible, and a second time nothing is done.
        again = await prepare(sandbox, row())
        assert again == base
        await ok(
            sandbox, "echo x >> shop/cart.py && git -c user.name=a -c user.email=a@a commit -qam work && git log --oneline"
        )

    asyncio.run(in_fresh(image, story))


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("git tag v1", "refs"),
        ("git remote add o /x", "remotes"),
        ("echo unheard of | git hash-object -w --stdin", "unreachable"),
        ("echo x >> shop/cart.py", "changes"),
        ("echo x > new.py", "changes"),
        ("git init -q sub/dir && touch sub/x.log", "nested"),
        ("mkdir .git/hooks; echo x > .git/hooks/post-checkout", "hooks"),
        ("mkdir -p .git/modules", "leftovers"),
        ("git -c user.name=a -c user.email=a@a commit -q --allow-empty -m x", "commits"),
        ("mkdir .git/logs; echo '0 1111111111111111111111111111111111111111 x' > .git/logs/HEAD", "reflog"),
    ],
)
def test_each_leftover_is_found_and_removed(image: str, command: str, fault: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await prepare(sandbox, row())
        assert (await probe(sandbox, "/testbed"))[1] == {}
        await ok(sandbox, command)
        assert fault in (await probe(sandbox, "/testbed"))[1]
        await prepare(sandbox, row())
        assert (await probe(sandbox, "/testbed"))[1] == {}

    asyncio.run(in_fresh(image, story))


def test_the_task_is_made_out_of_the_image(image: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        await ok(sandbox, "mkdir /secret && touch /secret/test_x.py")
        await prepare(sandbox, row(setup_patch=SETUP, hidden=["/secret", "/testbed/tests/data.txt"]))
        assert await ok(sandbox, "ls -d /secret* 2>/dev/null | cat; ls tests; git status --porcelain") == "test_cart.py\n"
        assert await ok(sandbox, f"{ALL_OBJECTS} | cut -d' ' -f1 | git cat-file --batch | grep -a 'sum(prices)' | cat") == ""

    async def main(sandbox: Sandbox) -> None:
        with pytest.raises(AssertionError):  # grep -c counts 0 with status 1: `ok` tells
            await ok(sandbox, "echo a | grep -c b")
        await sandbox.exec('grep() { command grep "$@" || true; }', timeout_s=30)
        await story(sandbox)

    asyncio.run(in_fresh(image, main))


def test_an_image_that_cannot_be_prepared_is_an_error(image: str) -> None:
    async def story(sandbox: Sandbox) -> None:
        with pytest.raises(RuntimeError, match="setup_patch"):
            await prepare(sandbox, row(setup_patch=SETUP.replace("sum(", "mul(")))
        await ok(sandbox, "rm -rf .git")
        with pytest.raises(RuntimeError, match="no git repository"):
            await prepare(sandbox, row())

    asyncio.run(in_fresh(image, story))


async def in_fresh(image: str, story) -> None:  # type: ignore[no-untyped-def]
    async with started("docker", image=image) as provider:
        await story(await provider.acquire(Task(id="prepare", messages=(), image=image)))
