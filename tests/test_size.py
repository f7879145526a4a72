"""Small rooms: no Python file over 500 lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 500


def test_no_file_is_long() -> None:
    """Also files that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "harness/trajectory.py" in listed
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in listed if (ROOT / name).is_file()}
    assert {name: n for name, n in lengths.items() if n > LIMIT} == {}
