"""What is installed is what is here: the wheel holds every Python and TOML file of the five folders, and no other code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("harness", "environments", "agents", "trainer", "evals")


def test_wheel_contents(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in (*FOLDERS, "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    expected = {str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    tables = {str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.toml")}
    assert {name for name in names if name.endswith(".toml")} == tables
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(FOLDERS)
    assert "harness/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert "sao = harness.cli:main" in points
