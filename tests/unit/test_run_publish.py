"""How a run's weights get from its trainer to its engine, and which files stay for a replica that comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines.vllm import VllmEngine
from harness.engines.vllm_transfer import Sender
from harness.run import Run


class Trainer:
    """Writes what it publishes, or announces it."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert command == "publish"
        self.calls.append(arguments)
        if "path" not in arguments:
            return {"probe": [-1.0], "announced": {"sha256": "a", "names": []}}
        Path(arguments["path"]).write_text("")
        return {"probe": [-1.0], "sha256": f"s{arguments['version']}"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """As far as publishing goes."""
    made = object.__new__(Run)
    (tmp_path / "weights").mkdir()
    made.folder = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    made.learner = Trainer()  # type: ignore[assignment]
    made.version, made._sender = 0, None
    return made


def publish(run: Run, *versions: int) -> None:
    for version in versions:
        assert asyncio.run(run._move(version, [1, 2])) == [-1.0]
        run.version = version


def test_the_published_file_and_the_one_before_stay(run: Run, tmp_path: Path) -> None:
    """Also after a resume, when a dead process has left files of versions that are to come."""
    taken = []

    class Engine:
        async def update_weights(self, path: Path, version: int, sha256: str) -> None:
            taken.append((path.name, version, sha256, len(list(path.parent.iterdir()))))

    run.engine = Engine()  # type: ignore[assignment]
    for left in (6, 7):
        (tmp_path / "weights" / f"v{left:06d}.safetensors").write_text("of a dead process")
    publish(run, 5, 6, 7)
    assert taken == [(f"v00000{v}.safetensors", v, f"s{v}", n) for v, n in ((5, 3), (6, 2), (7, 3))]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v000006.safetensors", "v000007.safetensors"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_is_sent_needs_no_file(run: Run, tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    async def take(self: VllmEngine, weights: Any, version: int) -> None:
        taken.append((weights.version, version, weights.announced["sha256"]))

    monkeypatch.setattr(VllmEngine, "publish", take)
    run.engine, run._sender = VllmEngine([]), Sender(run.learner, backend)
    publish(run, 1, 2)
    digest = "a" if backend == "gloo" else None
    assert taken == [(1, 1, digest), (2, 2, digest)] and not list((tmp_path / "weights").iterdir())
    assert run.learner.calls == [{"probe": [1, 2], "version": v} for v in (1, 2)]  # type: ignore[attr-defined]
