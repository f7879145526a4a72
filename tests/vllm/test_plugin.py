"""The plug-in's parts and the launcher without a server: order of an update, the guard, versions, failed starts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from harness.engines.vllm_launch import VllmServer, launch
from harness.errors import ConfigError, EngineError
from tests.contracts.engine_support import write_policy
from tests.vllm.support import PLUGIN, PYTHON

LIMIT_S = 120.0


def load_routes() -> ModuleType:
    """`sao_routes` as vLLM's API server loads it: a top-level module."""
    spec = importlib.util.spec_from_file_location("sao_routes", PLUGIN / "sao_routes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeServer:
    """vLLM's app behind the middleware; `error` is what the next request raises, `status` what it answers."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.status = 200
        self.bodies: list[bytes] = []
        self.order = load_routes().UpdateOrder(self.app)

    async def app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.error is not None:
            raise self.error
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def post(self, route: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of a request; the body comes in two pieces."""
        return self.through(self.order, route, body)

    def through(self, middleware: Any, route: str, body: bytes = b"", **scope: Any) -> tuple[int, bytes]:
        """The same through one of the middlewares."""
        pieces = [
            {"type": "http.request", "body": body[:3], "more_body": True},
            {"type": "http.request", "body": body[3:], "more_body": False},
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return pieces.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(middleware({"type": "http", "method": "POST", "path": route, **scope}, receive, send))
        return sent[0]["status"], sent[1]["body"]


FINISH = json.dumps({"weight_version": "7"}).encode()


@pytest.fixture
def fake() -> FakeServer:
    """One that its starter has labelled."""
    fake = FakeServer()
    assert steps(fake, "/update_weight_version") == [200]
    return fake


def steps(fake: FakeServer, *routes: str) -> list[int]:
    return [fake.post(route, FINISH)[0] for route in routes]


WHOLE = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")


def test_a_whole_update_passes_twice(fake: FakeServer) -> None:
    assert steps(fake, *WHOLE, *WHOLE) == [200] * 10


def test_nothing_is_updated_while_it_runs(fake: FakeServer) -> None:
    assert steps(fake, "/start_weight_update", "/update_weights", "/finish_weight_update") == [409] * 3
    assert steps(fake, *WHOLE, "/start_weight_update") == [200] * 5 + [409]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_a_failed_step_only_a_whole_update_resumes(fake: FakeServer, failing: int) -> None:
    assert steps(fake, *WHOLE[:failing]) == [200] * failing
    fake.status = 500
    assert steps(fake, WHOLE[failing]) == [500]
    fake.status = 200
    assert steps(fake, "/resume") == [409]
    assert steps(fake, "/pause", "/resume", *WHOLE) == [200, 409, *[200] * 5]


def test_nothing_is_updated_before_its_starter_is_done() -> None:
    fake = FakeServer()
    assert steps(fake, *WHOLE) == [409, 409, 409, 409, 200]
    assert steps(fake, "/update_weight_version", *WHOLE) == [200] * 6


def test_a_key_guards_every_route_but_health(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(route: str, *headers: tuple[bytes, bytes]) -> int:
        return fake.through(secret, route, headers=list(headers))[0]

    key = (b"authorization", b"Bearer of bad news")
    secret = load_routes().Secret(fake.app)
    assert [post("/pause"), post("/pause", key)] == [200, 200]
    monkeypatch.setenv("VLLM_API_KEY", "of bad news")
    secret = load_routes().Secret(fake.app)
    for route in ("/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/completions", "/metrics"):
        assert [post(route), post(route, (b"authorization", b"Bearer of bad new")), post(route, key)] == [401, 401, 200]
    assert post("/health") == 200


def test_a_failed_pause_is_none(fake: FakeServer) -> None:
    fake.status = 500
    assert steps(fake, "/pause") == [500]
    fake.status = 200
    assert steps(fake, "/start_weight_update") == [409]


NO_VERSION = (b"", b"{}", b"[]", b"nonsense", b'{"weight_version": null}', b'{"weight_version": 7}', b'{"weight_version": "x"}')


@pytest.mark.parametrize("body", NO_VERSION)
def test_finish_names_a_version(fake: FakeServer, body: bytes) -> None:
    assert steps(fake, *WHOLE[:3]) == [200] * 3
    assert fake.post("/finish_weight_update", body)[0] == 400
    assert steps(fake, "/resume", *WHOLE[3:]) == [409, 200, 200]
    assert fake.bodies[-2] == FINISH, "vLLM must see the body that was read before it"


def test_a_worker_error_is_answered_in_its_own_words(fake: FakeServer) -> None:
    steps(fake, *WHOLE[:2])
    fake.error = Exception("Call to x failed: Worker failed with error 'it's `a`\nand b', please check the stack trace above")
    status, body = fake.post("/update_weights")
    assert (status, json.loads(body)["error"]["message"]) == (500, "it's `a`\nand b")


def test_other_requests_and_their_errors_pass(fake: FakeServer) -> None:
    assert fake.post("/inference/v1/generate", b'{"a": 1}')[0] == 200
    fake.error = RuntimeError("theirs")
    for route in ("/inference/v1/generate", "/pause"):
        with pytest.raises(RuntimeError, match="theirs"):
            fake.post(route)


# --- guard -----------------------------------------------------------------------------------------------------------

TREE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
{then}
"""


def guarded(then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A command with a child of its own under the guard; the pids of both."""
    command = [sys.executable, "-I", str(PLUGIN / "guard.py"), sys.executable, "-c", TREE.format(then=then)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def ended(process: subprocess.Popen[str]) -> None:
    """Wait until nobody of the group holds its standard output any more."""
    out, _ = process.communicate(timeout=LIMIT_S)
    assert out == ""


def test_closing_the_pipe_ends_the_whole_group() -> None:
    process, pids = guarded("import signal; signal.pause()")
    assert pids[0] == process.pid, "the guard becomes the command"
    ended(process)  # closes standard input
    assert process.returncode == -signal.SIGTERM


def test_what_a_command_leaves_behind_is_ended_and_its_status_kept() -> None:
    process, _ = guarded("os._exit(7)")
    assert process.stdout is not None
    assert process.stdout.read() == ""  # all have ended, though standard input is still open
    assert process.wait(LIMIT_S) == 7
    process.communicate()


def test_the_command_reads_nothing_of_the_pipe() -> None:
    process, _ = guarded("assert sys.stdin.read() == ''; os._exit(5)")
    assert process.wait(LIMIT_S) == 5
    process.communicate()


SHARED = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_killed_command_leaves_no_shared_memory() -> None:
    process, _ = guarded(SHARED)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert process.stdout.read() == ""  # all have ended
    assert name and not Path("/dev/shm", name).exists()
    process.communicate()


def test_a_killed_starter_leaves_nothing_behind() -> None:
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-I', {str(PLUGIN / 'guard.py')!r}, sys.executable, '-c', sys.argv[1]],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "p.wait()"
    )
    then = "import signal; signal.pause()"
    starter = subprocess.Popen([sys.executable, "-c", code, TREE.format(then=then)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert len(starter.stdout.readline().split()) == 2
    starter.kill()
    ended(starter)


# --- launcher --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), 1)


def fake_python(root: Path, code: str) -> Path:
    """An "interpreter" that runs `code` whatever it is asked."""
    path = root / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return path


def test_a_server_that_ends_is_reported_at_once_with_the_end_of_its_log(tmp_path: Path, folder: Path) -> None:
    python = fake_python(tmp_path, "import sys; sys.exit('no memory for this model')")
    with pytest.raises(EngineError, match="(?s)ended.*no memory for this model"):
        asyncio.run(launch(VllmServer(python=python, model=folder, platform="cuda"), tmp_path / "log"))


def test_a_server_that_never_answers_is_ended(tmp_path: Path, folder: Path) -> None:
    python = fake_python(tmp_path, "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()")
    description = VllmServer(python=python, model=folder, platform="cuda", start_s=3.0)
    with pytest.raises(EngineError, match="not healthy after 3 s"):
        asyncio.run(launch(description, tmp_path / "log"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text().split()[1]), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": Path("/nowhere/python")}, "does not exist"),
        ({"model": Path("/nowhere")}, "no model folder"),
        ({"platform": "cpu"}, "libiomp5"),
    ],
)
def test_what_cannot_start_is_said_before_it_does(tmp_path: Path, folder: Path, change: dict[str, Any], message: str) -> None:
    fields = {"python": fake_python(tmp_path, ""), "model": folder, "platform": "cuda"} | change
    with pytest.raises(ConfigError, match=message):
        asyncio.run(launch(VllmServer(**fields), tmp_path / "log"))
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"dtyp": "float32"},
        {"port": 70_000},
        {"kv_gib": 0},
        {"dtype": "int8"},
        {"tensor_parallel": 0},
        {"weight_transfer": "nccl"},
    ],
)
def test_bad_descriptions_are_refused(folder: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VllmServer(python=PYTHON, model=folder, **change)


def test_one_description_serves_both_builds(folder: Path) -> None:
    cpu = VllmServer(python=PYTHON, model=folder, kv_gib=2, environment={"PYTHONPATH": "mine"})
    cuda = cpu.model_copy(update={"platform": "cuda", "tensor_parallel": 2})
    on_cpu, on_cuda = " ".join(cpu.command(81)), " ".join(cuda.command(81))
    for line in (on_cpu, on_cuda):
        for part in ("--host 127.0.0.1", "--port 81", "--enable-scale-out", "--generation-config vllm", "processed_logprobs"):
            assert part in line
    assert "--enforce-eager" in on_cpu and "--gpu-memory-utilization" not in on_cpu
    assert "--enforce-eager" not in on_cuda and "--tensor-parallel-size 2" in on_cuda
    assert cpu.variables() | {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": f"{PLUGIN}:mine"} == cpu.variables()
    assert "LD_PRELOAD" not in cuda.variables()


UNPROVEN = """
import os, sys, vllm
sys.path.insert(0, sys.argv[1])
vllm.__version__ = "9.9.9+cpu"
try:
    import sao_vllm
except RuntimeError as error:
    print(error)
os.environ["SAO_VLLM_UNPROVEN"] = "1"
import sao_vllm
print("loaded")
"""


@pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make setup-vllm")
def test_a_version_that_is_not_proven_is_refused_unless_overridden() -> None:
    done = subprocess.run([PYTHON, "-c", UNPROVEN, PLUGIN], capture_output=True, text=True, timeout=500, check=True)
    refusal, loaded = done.stdout.splitlines()[-2:]
    assert "9.9.9" in refusal and "SAO_VLLM_UNPROVEN=1" in refusal and "0.32.0" in refusal
    assert loaded == "loaded"
