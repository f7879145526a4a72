"""Who may know whom (`docs/architecture.md`, Folders): read off the source, and proved in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("harness", "environments", "agents", "trainer", "evals")
MAY = {
    "harness": {"harness"},
    "environments": {"environments", "harness"},
    "agents": {"agents", "harness"},
    "trainer": {"trainer", "harness"},
    "evals": {"evals", "harness"},
}
HEAVY = {"torch", "transformers", "safetensors", "openhands", "vllm", "ray"}
"""Only `trainer` imports torch; what plug-ins wrap is imported inside their functions."""
WORKER = Path("agents/openhands_worker")
"""Runs in an interpreter that has OpenHands and not us: it imports nothing of ours but itself, and no more than the standard
library where both sides import it (`wire.py`)."""
PLUGIN = Path("harness/engines/vllm_plugin")
"""Runs in vLLM's interpreter: files, no package, that import nothing of ours."""
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Top-level packages that a file names in import statements anywhere, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else str(node.module).split(".")[0], node.lineno


def test_there_is_something_to_check() -> None:
    assert {path.parts[0] for path in FILES} == set(FOLDERS)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_follow_the_table(path: Path) -> None:
    folder = path.parts[0]
    tree = ast.parse((ROOT / path).read_text())
    for name, line in imports(tree, folder):
        where = f"{path}:{line} imports {name}"
        if name in FOLDERS or name in ("tests", "benchmarks"):
            assert name in MAY[folder], where
        if path.parent == PLUGIN:
            assert name not in FOLDERS, where
        elif folder == "harness":
            assert name not in HEAVY, where
    if path.parent == WORKER:
        ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agents")]
        assert all(str(node.module).startswith("agents.openhands_worker") for node in ours), path
        assert not {name for name, _ in imports(tree, folder)} & set(FOLDERS) - {"agents"}, path
    elif folder not in ("harness", "trainer"):
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, line in (pair for node in top for pair in imports(node, folder)):
            assert name not in HEAVY, f"{path}:{line} imports {name} at import time"


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "harness"], ids=str)
def test_the_harness_imports_by_name_only_in_its_registry(path: Path) -> None:
    """`importlib.import_module` and `__import__` would go round the table."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    if path not in (Path("harness/registry.py"), Path("harness/sandboxes/memory.py")):  # memory gives scripts an __import__
        assert not names & {"import_module", "__import__"}


PROBE = """
import importlib, pkgutil, sys
import harness
for module in pkgutil.walk_packages(harness.__path__, "harness."):
    importlib.import_module(module.name)
heavy = {"torch", "transformers", "safetensors", "openhands", "vllm", "ray", "environments", "agents", "trainer", "evals"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
print(sorted(name for name in sys.modules if name.startswith("harness.")))
"""


def test_importing_the_harness_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    heavy, seen = done.stdout.splitlines()
    assert heavy == "[]"
    for path in FILES:
        if path.parts[0] == "harness" and path.name != "__init__.py" and path.parent != PLUGIN:
            assert f"'{'.'.join(path.with_suffix('').parts)}'" in seen


def test_plug_ins_without_torch_stay_without_it() -> None:
    """A rollout machine plays episodes: environments and agents come without the trainer."""
    code = (
        "import sys; from harness.registry import BUILTIN, find\n"
        "[find(k, n) for k in ('environment', 'agent', 'sandbox', 'evaluation') for n in BUILTIN[k]]\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]
