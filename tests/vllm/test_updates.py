"""Live weight updates of a real vLLM: exact against the trainer's log-probs, or refused with the old weights untouched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import EngineError
from tests.vllm.support import TOLERANCE, Server, flipped, needs_fix, there_and_back
from trainer.weights import sha256

pytestmark = pytest.mark.timeout(1_500)  # the first test starts the server


def test_there_and_back_is_exact(server: Server) -> None:
    there_and_back(server)


@pytest.mark.parametrize("fix", ["tied", "moe"])
def test_each_fix_is_needed_on_the_cpu(server: Server, fix: str) -> None:
    needs_fix(server, fix)


def truncated(good: Path, bad: Path) -> str:
    bad.write_bytes(good.read_bytes()[:-64])
    return sha256(bad)


def absent(good: Path, bad: Path) -> str:
    return sha256(good)


def unchecked(good: Path, bad: Path) -> None:
    shutil.copy(good, bad)


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, Path], str]:
    def write(good: Path, bad: Path) -> str:
        tensors = load_file(str(good))
        change(tensors)
        save_file(tensors, str(bad))
        return sha256(bad)

    return write


NORM = "model.norm.weight"
BAD = {
    "truncated": (truncated, "not a complete safetensors file"),
    "flipped": (flipped, "sha256"),
    "absent": (absent, "cannot be read"),
    "unchecked": (unchecked, "both strings"),
    "missing": (changed(lambda t: t.pop("model.layers.1.self_attn.q_proj.weight")), "lacks 1 of"),
    "unknown": (changed(lambda t: t.update(more=torch.ones(3))), "`more`"),
    "shape": (changed(lambda t: t.update({NORM: torch.ones(3)})), "has shape"),
    "integers": (changed(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)})), "I64"),
}


async def refused(server: Server, reason: str, work: Any) -> None:
    """The update fails for this reason, and the engine stays paused, whatever is asked of it."""
    with pytest.raises(EngineError, match=reason):
        await work
    for route, body in (("/resume", {}), ("/finish_weight_update", {"weight_version": "99"})):
        with pytest.raises(EngineError):
            await server.post(route, **body)
    assert await server.engine._call("GET", "/is_paused") == {"is_paused": True}
    assert await server.engine._call("GET", "/weight_info") == {"weight_version": str(server.version)}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused_and_a_whole_one_recovers(server: Server, fault: str, tmp_path: Path) -> None:
    write, reason = BAD[fault]
    bad = tmp_path / "bad.safetensors"
    digest = write(server.file(1)[0], bad)

    async def work() -> float:
        await refused(server, reason, server.engine.update_weights(bad, 99, digest))
        await server.update(0)
        return await server.distance(0)

    assert server.run(work()) < TOLERANCE


@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_a_load_that_breaks_off_is_recovered(server: Server, after: int) -> None:
    async def work() -> float:
        await server.update(0)
        await server.plant("break_next_load", after)
        path, digest = server.file(1)
        await refused(server, "planted", server.engine.update_weights(path, 99, digest))
        await server.update(1)
        return await server.distance(1)

    assert server.run(work()) < TOLERANCE


def test_an_update_that_its_trainer_left_open_is_started_anew(server: Server) -> None:
    async def work() -> float:
        await server.post("/pause?mode=keep&clear_cache=false")
        await server.post("/start_weight_update")
        with pytest.raises(EngineError, match="no weights have come"):
            await server.post("/finish_weight_update", weight_version="99")
        path, digest = server.file(1)
        await server.post("/start_weight_update")
        await server.post("/update_weights", update_info={"path": str(path), "sha256": digest})
        with pytest.raises(EngineError, match="409"):
            await server.post("/resume")
        with pytest.raises(EngineError, match="between two versions"):
            await server.plant("run_model")
        with pytest.raises(EngineError, match="already"):
            await server.post("/update_weights", update_info={"path": str(path), "sha256": digest})
        await server.update(0)
        with pytest.raises(EngineError, match="positional argument"):
            await server.plant("run_model")
        return await server.distance(0)

    assert server.run(work()) < TOLERANCE
