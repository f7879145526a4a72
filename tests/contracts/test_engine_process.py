"""The embedded engine as a process: how it starts, how it ends, and that nobody is left waiting. vLLM's: `tests/vllm`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.engines.http import HttpEngine
from harness.errors import ConfigError, EngineError
from tests.contracts.engine_support import ROOT, WAIT_S, launch, needs_proc, request, started, write_policy

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), seed=0)


def test_a_start_that_fails_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        asyncio.run(asyncio.wait_for(launch(tmp_path, tmp_path / "engine.log"), WAIT_S))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError, match="did not start") as caught:
        asyncio.run(asyncio.wait_for(launch(tmp_path, tmp_path / "engine.log"), WAIT_S))
    assert "SafetensorError" in str(caught.value) and "engine.log" in caught.value.hint


def test_the_process_ends_with_its_pipe_even_while_busy(model: Path, tmp_path: Path) -> None:
    async def story() -> int:
        engine = await launch(model, tmp_path / "engine.log")
        lost = asyncio.create_task(engine.generate(request([1], 30_000)))
        await started(engine, 1)
        assert engine._process.stdin is not None
        engine._process.stdin.close()
        with pytest.raises(EngineError):
            await lost
        code = await asyncio.wait_for(engine._process.wait(), 60.0)
        await engine.close()
        return code

    assert asyncio.run(asyncio.wait_for(story(), WAIT_S)) == 0
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


ORPHAN = """
import asyncio, os, sys
from pathlib import Path
from tests.contracts.engine_support import launch, request, started

async def main():
    engine = await launch(Path(sys.argv[1]), Path(sys.argv[2]))
    busy = asyncio.create_task(engine.generate(request([1], 30_000)))
    await started(engine, 1)
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@needs_proc
def test_the_engine_does_not_outlive_a_killed_parent(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(model), str(tmp_path / "engine.log")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "the engine lives on"


def alive(pid: int) -> bool:
    """A process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


CRASH = """
from trainer.engine import core, server

def boom(self):
    raise RuntimeError("the step broke")

core.EngineCore.step = boom
server.main()
"""


def test_a_crashed_engine_ends_and_says_why(model: Path) -> None:
    """Also while the pipe from its parent is open; requests in flight fail at once."""
    command = [sys.executable, "-c", CRASH, str(model), "--max-len", "64"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **pipes)  # type: ignore[call-overload]
    port = json.loads(process.stdout.readline())["port"]

    async def story() -> None:
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        with pytest.raises(EngineError):
            await engine.generate(request([1], 5))
        await engine.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
    try:
        assert process.wait(30) != 0
        assert "the step broke" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_killed_engine_is_an_engine_error(model: Path, tmp_path: Path) -> None:
    async def story() -> None:
        engine = await launch(model, tmp_path / "engine.log")
        lost = asyncio.create_task(engine.generate(request([1], 30_000)))
        await started(engine, 1)
        engine._process.kill()
        with pytest.raises(EngineError):
            await lost
        with pytest.raises(EngineError):
            await engine.score([1, 2])
        await engine.close()
        assert engine._process.returncode == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
