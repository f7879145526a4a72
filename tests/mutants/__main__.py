"""`python -m tests.mutants [words of a fault's name]`: plant each fault in a copy of the sources and expect its tests to fail.

Prints one line per fault; exit code 1 if one survives, or if its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("harness", "environments", "agents", "trainer", "evals", "tests", "configs", "pyproject.toml")
TIMEOUT_S = 600
PASSED, FAILED = 0, 1
"""Exit codes of pytest; anything else means that the tests did not run."""


def main() -> int:
    """Run the chosen faults, or all."""
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        files = sorted({test for fault in chosen for test in fault.tests})
        if _pytest(copy, files) != PASSED:
            print(f"error: the tests fail without any fault: {' '.join(files)}")
            return 1
        survivors = [fault for fault in chosen if not _found(copy, fault)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted faults were found")
    return 1 if survivors or not chosen else 0


def _found(copy: Path, fault: Fault) -> bool:
    path = copy / fault.file
    right = path.read_text()
    if right.count(fault.right) != 1:
        raise SystemExit(f"error: {fault.file} has {right.count(fault.right)} of {fault.right!r}, not one")
    path.write_text(right.replace(fault.right, fault.wrong))
    code = _pytest(copy, fault.tests)
    path.write_text(right)
    verdict = {FAILED: "found", PASSED: "SURVIVED"}.get(code, f"BROKEN (pytest exit code {code})")
    print(f"{verdict:10} {fault.name}", flush=True)
    return code == FAILED


def _pytest(copy: Path, files: tuple[str, ...] | list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *files]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=TIMEOUT_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
