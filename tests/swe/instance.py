"""A tiny instance: an image with a repository, its history and its future, and the row that poses it.

The image is made from the tests' base image and this Python's own pytest, without any network.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from environments.swe.environment import Swe, SweConfig
from environments.swe.rows import SweRow
from harness.protocols import Sandbox
from harness.sandboxes.docker_engine import Engine
from tests.contracts.sandbox_support import IMAGE, started

PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py", "pytest_timeout.py")

BASE = {
    "shop/__init__.py": "",
    "shop/prices.py": "def discount(price, percent):\n    return price - percent\n",
    "shop/cart.py": (
        "from shop.prices import discount\n\n\ndef total(prices, percent=0):\n    return discount(sum(prices), percent)\n"
    ),
    "tests/test_cart.py": "from shop.cart import total\n\n\ndef test_total():\n    assert total([1, 2, 3]) == 6\n",
    "tests/data.txt": "1 2 3\n",
    "pyproject.toml": '[project]\nname = "shop"\nversion = "1"\n',
    ".gitignore": "*.log\n",
    "dos.txt": "one\r\ntwo\r\n",
    "cut.txt": "no newline",
    "moved.txt": "a\nb\nc\n",
    "gone.txt": "bye\n",
    "with space é.txt": "x\n",
}
FIXED = "def discount(price, percent):\n    return price - price * percent / 100\n"
GOLD = f"cat > shop/prices.py <<'X'\n{FIXED}X"
TEST_PATCH = """\
diff --git a/tests/test_cart.py b/tests/test_cart.py
--- a/tests/test_cart.py
+++ b/tests/test_cart.py
@@ -3,3 +3,7 @@ from shop.cart import total
 
 def test_total():
     assert total([1, 2, 3]) == 6
+
+
+def test_total_with_discount():
+    assert total([50, 150], 10) == 180
diff --git a/tests/test_prices.py b/tests/test_prices.py
new file mode 100644
--- /dev/null
+++ b/tests/test_prices.py
@@ -0,0 +1,10 @@
+import unittest
+
+from shop.prices import discount
+
+
+class TestPrices(unittest.TestCase):
+    def test_discount(self):
+        self.assertEqual(discount(200, 25), 150)
+    def test_no_discount(self):
+        self.assertEqual(discount(5, 0), 5)
"""
GOLD_PATCH = """\
diff --git a/shop/prices.py b/shop/prices.py
--- a/shop/prices.py
+++ b/shop/prices.py
@@ -1,2 +1,2 @@
 def discount(price, percent):
-    return price - percent
+    return price - price * percent / 100
"""
EVAL = f"""\
#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout HEAD -- tests/test_cart.py
rm -f tests/test_prices.py
git apply --verbose - <<'EOF_x'
{TEST_PATCH}EOF_x
: '>>>>> Start Test Output'
python3 -m pytest -rA --tb=short -p no:cacheprovider --color=no tests
: '>>>>> End Test Output'
git checkout HEAD -- tests/test_cart.py
"""
# A future that holds the solution, by every road that git knows.
HISTORY = """
set -e
export GIT_AUTHOR_DATE=2021-01-01T00:00:00Z GIT_COMMITTER_DATE=2021-01-01T00:00:00Z
git config --global user.name a; git config --global user.email a@a
git init -q -b main
git commit -q --allow-empty -m root
git add -A; git commit -q -m base
cat > shop/prices.py <<'X'
FIXEDX
git stash -q; git stash apply -q; git commit -q -am SOLUTION; git tag v2; git branch future
git reset -q --hard HEAD~1
git commit -q --allow-empty -m dangling; git reset -q --hard HEAD~1
git remote add origin https://localhost/shop.git
git update-ref refs/remotes/origin/main future
printf '#!/bin/sh\\n' > .git/hooks/post-checkout
git repack -q -a -d
rm -rf ~/.gitconfig
""".replace("FIXED", FIXED)


def row(**changes: Any) -> SweRow:
    """The row; by default our own pytest runs the tests."""
    values: dict[str, Any] = {
        "instance_id": "tiny__shop-1",
        "repo": "tiny/shop",
        "base_commit": "HEAD",
        "problem_statement": "A discount is a percentage, but is taken off as an amount.",
        "patch": GOLD_PATCH,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["tests/test_prices.py::TestPrices::test_discount", "tests/test_cart.py::test_total_with_discount"],
        "PASS_TO_PASS": ["tests/test_cart.py::test_total", "tests/test_prices.py::TestPrices::test_no_discount"],
        "image": "sao-test:swe",
        "eval_script": EVAL,
        "log_parser": "parse_log_pytest",
        "pytest_args": ["tests"],
    }
    return SweRow.model_validate({**values, **changes})


def context() -> dict[str, bytes]:
    """The build context: Dockerfile, pytest, repository. The same bytes every time."""
    site = Path(sysconfig.get_path("purelib"))
    files = {
        "Dockerfile": (
            f"FROM {IMAGE}\nCOPY site/ /usr/lib/python3/dist-packages/\nCOPY repo/ /testbed/\nCOPY history.sh /tmp/\n"
            "WORKDIR /testbed\nRUN bash /tmp/history.sh && rm /tmp/history.sh\n"
        ).encode(),
        "history.sh": HISTORY.encode(),
        **{f"repo/{name}": text.encode() for name, text in BASE.items()},
        "repo/data.bin": bytes(range(256)),
    }
    for name in PYTEST:
        for path in sorted((site / name).rglob("*.py")) or [site / name]:
            files[f"site/{path.relative_to(site)}"] = path.read_bytes()
    for path in [*site.glob("pluggy-*.dist-info/METADATA"), *site.glob("pytest-*.dist-info/METADATA")]:
        files[f"site/{path.relative_to(site)}"] = path.read_bytes()
    return files


def build(files: dict[str, bytes] | None = None) -> str:
    """Make the image of a build context (None: of this instance) without any network; its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted((context() if files is None else files).items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    data = buffer.getvalue()
    name = f"sao-test:swe-{hashlib.sha256(data).hexdigest()[:12]}-{os.getpid()}"
    engine = Engine()
    try:
        steps = engine.api.build(
            fileobj=io.BytesIO(data), custom_context=True, tag=name, rm=True, forcerm=True, decode=True, network_mode="none"
        )
        errors = [step["error"] for step in steps if "error" in step]
        assert not errors, errors
    finally:
        engine.close()
    return name


@asynccontextmanager
async def environment(image: str, **changes: Any) -> Any:
    """(environment, task, provider): the instance, ready to begin."""
    limits = {"timeout_s": 120.0, "test_timeout_s": 10.0, **changes.pop("grading", {})}
    swe = Swe(SweConfig.model_validate({"dataset": "none", "grading": limits}))
    task = swe.task(row(image=image, **changes))
    async with started("docker", image=image) as provider:
        yield swe, task, provider


async def play(image: str, act: Callable[[Sandbox], Awaitable[None]] | str, **changes: Any) -> Any:
    """One episode by a script or a function; its score."""
    async with environment(image, **changes) as (swe, task, provider):
        sandbox = await provider.acquire(task)
        live = await swe.begin(task, sandbox)
        if isinstance(act, str):
            done = await sandbox.exec(act, timeout_s=60)
            assert not done.timed_out, done
        else:
            await act(sandbox)
        return await live.score()
