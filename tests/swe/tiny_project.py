"""A project of two releases for the factory, wheels and all, made without any network.

Wheels are this environment's own pure distributions, packed again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import tarfile
import zipfile
from pathlib import Path

from environments.swe.factory.recipes import Recipes
from environments.swe.factory.sources import Tree, cached_sdist, wheel_folder

TOOLS = ["pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments"]
BUILD_TOOLS = ["setuptools"]
SOURCE = '''\
"""Prices."""

__version__ = "1.0"


seen = []


def total(prices, shipping=5):
    seen.append(prices)
    if sum(prices) > 100:
        shipping -= 5
    return sum(prices) + shipping


def names(items):
    return sorted(items)


def unused(a):
    return a + 1
'''
TESTS = """\
import pytest

from tiny import names, total


@pytest.mark.parametrize(("prices", "expected"), [([1, 2], 8), ([200], 200), ([100], 105)])
def test_total(prices, expected):
    assert total(prices) == expected


class TestNames:
    def test_sorted(self):
        assert names(["b", "a"]) == ["a", "b"]

    def test_empty(self):
        assert names([]) == []


def test_three():
    assert names("cab") == ["a", "b", "c"]


def test_four():
    assert names("dcba") == ["a", "b", "c", "d"]


def test_five():
    assert names("a") == ["a"]
"""
FIRST: Tree = {
    "pyproject.toml": b'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    b'[project]\nname = "tiny"\nversion = "1.0"\n[tool.setuptools]\npackages = ["tiny"]\npackage-dir = {tiny = "src/tiny"}\n',
    "src/tiny/__init__.py": SOURCE.encode(),
    "tests/__init__.py": b"",
    "tests/test_tiny.py": TESTS.encode(),
    ".gitignore": b"*.txt\n",
    "notes.txt": b"kept although ignored\n",
}
SECOND: Tree = {
    **FIRST,
    "src/tiny/__init__.py": SOURCE.replace("1.0", "1.1").replace("sorted(items)", "sorted(set(items))").encode(),
    "tests/test_tiny.py": TESTS.encode() + b'\n\ndef test_once():\n    assert names("aab") == ["a", "b"]\n',
    "CHANGES.md": b"# 1.1\n\n- `names` names each item once\n\n# 1.0\n\n- first\n",
}


def recipes(cache: Path, python: str) -> Recipes:
    """The recipe of both releases; everything that it pins is put into `cache`."""
    wheels = {name: _wheel(name) for name in [*TOOLS, *BUILD_TOOLS]}
    pins = {f"{name}=={importlib.metadata.version(name)}": hashlib.sha256(wheels[name][1]).hexdigest() for name in wheels}
    releases = {version: _sdist(version, tree) for version, tree in (("1.0", FIRST), ("1.1", SECOND))}
    made = Recipes.model_validate(
        {
            "tools": TOOLS,
            "build_tools": BUILD_TOOLS,
            "wheels": pins,
            "projects": {
                "tiny": {
                    "licence": "MIT",
                    "module": "tiny",
                    "sources": ["src/tiny"],
                    "tests": ["tests"],
                    "mutate": "1.0",
                    "releases": {version: hashlib.sha256(data).hexdigest() for version, data in releases.items()},
                }
            },
        }
    )
    for version, data in releases.items():
        path = cached_sdist("tiny", version, hashlib.sha256(data).hexdigest(), cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for names in (TOOLS, BUILD_TOOLS):
        folder = wheel_folder(made.pins(names), python, cache)
        folder.mkdir(parents=True)
        for name in names:
            (folder / wheels[name][0]).write_bytes(wheels[name][1])
    return made


def _wheel(name: str) -> tuple[str, bytes]:
    """File name and bytes of a wheel with what is installed here."""
    distribution = importlib.metadata.distribution(name)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in distribution.files or []:
            if ".." not in path.parts and path.suffix != ".pyc" and path.name not in ("INSTALLER", "REQUESTED"):
                archive.writestr(zipfile.ZipInfo(str(path)), Path(str(distribution.locate_file(path))).read_bytes())
    return f"{name.replace('-', '_')}-{distribution.version}-py3-none-any.whl", buffer.getvalue()


def _sdist(version: str, tree: Tree) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, data in tree.items():
            entry = tarfile.TarInfo(f"tiny-{version}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
