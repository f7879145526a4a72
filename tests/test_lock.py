"""The lock: names, versions and hashes only, and nothing in it may install a package under one of our names."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"harness", "environments", "agents", "trainer", "evals"}
LOCK = (ROOT / "requirements.lock").read_text()
ENTRY = re.compile(r"^([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.!+]+)( ; .*?)? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
NAMES = [m[1] for line in LOCK.splitlines() if (m := ENTRY.match(line))]


def test_only_names_versions_and_hashes() -> None:
    other = [line for line in LOCK.splitlines() if not (ENTRY.match(line) or HASH.match(line) or re.match(r"^\s*#|^$", line))]
    assert other == []
    assert len(NAMES) > 10


def test_no_address_of_any_kind_also_not_in_comments() -> None:
    assert not re.search(
        r"://|@ |--index|--find-links|--extra|\.(com|org|net|io)\b|file:|git\+|localhost|\d+\.\d+\.\d+\.\d+/", LOCK
    )


def test_every_entry_has_a_hash() -> None:
    blocks = re.split(r"(?m)^(?=[a-z0-9])", LOCK)
    for block in blocks:
        if ENTRY.match(block.split("\n", 1)[0]):
            assert "--hash=sha256:" in block, block.split("\n", 1)[0]


def test_what_we_need_is_locked() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.split(r"[<>=!~\[; ]", r)[0].lower().replace("_", "-") for r in wanted}
    assert names <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_locked_distribution_installs_one_of_our_packages(name: str) -> None:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        pytest.skip("not installed here (another platform or an extra)")
    top = {f.parts[0].removesuffix(".py") for f in files if len(f.parts) > 1 or f.suffix == ".py"}
    assert not top & FOLDERS


def test_our_names_belong_to_us_alone_here() -> None:
    owners = packages_distributions()
    for name in FOLDERS:
        assert {d for d in owners.get(name, [])} <= {"sao-harness"}
