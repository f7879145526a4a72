"""`sao engine` on servers that are none, `sao doctor --engine` on fake replicas with faults, addresses that are not private."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from harness.configfile import load_config
from harness.engines import checkup, serve
from harness.engines.vllm_launch import VllmServer
from harness.errors import ConfigError, EngineError
from tests.support import VirtualLoop
from tests.unit.test_cli import write_config
from tests.vllm.fake_replica import FakeReplica, logprob_at

# --- sao engine ------------------------------------------------------------------------------------------------------


class FakeProcess:
    """A server process: each start takes `start_s`, and what it starts lives for the next of `lives` (None: for ever)."""

    def __init__(self, port: int, lives: list[float | None | Exception], start_s: float = 60.0) -> None:
        self.url, self.lives, self.start_s = f"http://127.0.0.1:{port}", lives, start_s
        self.starts = self.closes = 0
        self.alive = False
        self.end: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return 1_000 + self.starts

    async def restart(self) -> None:
        self.starts += 1
        await asyncio.sleep(self.start_s)
        life = self.lives.pop(0)
        if isinstance(life, Exception):
            raise life
        loop = asyncio.get_running_loop()
        self.alive, self.end = True, loop.create_future()
        if life is not None:
            loop.call_later(life, self.die)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            assert self.end is not None
            self.end.set_result(-9)

    async def ended(self) -> int:
        assert self.end is not None
        return await asyncio.shield(self.end)

    async def close(self) -> None:
        self.closes += 1
        self.die()


def serving(servers: list[FakeProcess], until: float = 1e6) -> tuple[list[str], BaseException | None]:
    """Lines said, and how it ended; SIGTERM comes at `until` seconds of virtual time."""
    said: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(until, os.kill, os.getpid(), signal.SIGTERM)
        await serve.serve(servers, said.append)  # type: ignore[arg-type]

    error: BaseException | None = None
    try:
        asyncio.run(main(), loop_factory=Patient)
    except Exception as caught:  # noqa: BLE001 - the result
        error = caught
    return said, error


class Patient(VirtualLoop):
    """A virtual loop that never runs out of timers: a signal is nothing that it knows of in advance."""

    def __init__(self) -> None:
        super().__init__()
        self._tick()

    def _tick(self) -> None:
        self.call_later(50.0, self._tick)


def test_it_says_where_servers_are_and_ends_on_sigterm() -> None:
    servers = [FakeProcess(1, [None]), FakeProcess(2, [None])]
    said, error = serving(servers, until=1_000.0)
    assert error is None
    assert [json.loads(line) for line in sorted(said[:2])] == [
        {"url": "http://127.0.0.1:1", "pid": 1_001},
        {"url": "http://127.0.0.1:2", "pid": 1_001},
    ]
    assert said[2:] == ['a run uses them with: engine.id=vllm engine.url="http://127.0.0.1:1 http://127.0.0.1:2"']
    assert all(server.closes and not server.alive for server in servers)


def test_sigterm_during_the_start_ends_it_too() -> None:
    servers = [FakeProcess(1, [None])]
    assert serving(servers, until=10.0) == ([], None)
    assert servers[0].closes


def test_what_ends_is_started_again() -> None:
    servers = [FakeProcess(1, [300.0, None]), FakeProcess(2, [None])]
    said, error = serving(servers, until=5_000.0)
    assert error is None and [server.starts for server in servers] == [2, 1]
    assert json.loads(said[3]) == {"url": "http://127.0.0.1:1", "pid": 1_002} and len(said) == 4


def test_a_first_start_that_fails_is_the_error() -> None:
    servers = [FakeProcess(1, [EngineError("no memory")]), FakeProcess(2, [None])]
    said, error = serving(servers)
    assert isinstance(error, ExceptionGroup) and str(error.exceptions[0]) == "no memory"
    assert servers[0].starts == 1 and all(server.closes for server in servers)


@pytest.mark.parametrize(
    "lives",
    [[10.0] * 99, [10.0, *[EngineError("no start") for _ in range(99)]], [10.0, *[OSError("no fork") for _ in range(99)]]],
)
def test_a_server_that_fails_again_and_again_is_given_up(lives: list[Any]) -> None:
    servers = [FakeProcess(1, lives)]
    said, error = serving(servers)
    assert isinstance(error, EngineError) and "no server is left" in error.message and error.hint
    assert servers[0].starts == serve.FAILURES and servers[0].closes


def test_one_that_is_given_up_does_not_end_the_others() -> None:
    servers = [FakeProcess(1, [10.0] * 99), FakeProcess(2, [None])]
    said, error = serving(servers, until=50_000.0)
    assert error is None and [server.starts for server in servers] == [serve.FAILURES, 1]


def test_a_server_that_has_lived_long_has_not_failed_in_a_row() -> None:
    lives: list[float | None | Exception] = [10.0, 10.0, 10.0, serve.STEADY_S + 1.0] * 5 + [None]
    servers = [FakeProcess(1, lives)]
    said, error = serving(servers, until=100_000.0)
    assert error is None and servers[0].starts == 21


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_servers_have_ports_of_their_own(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("lib/libiomp5.so", "bin/python"):
        (tmp_path / name).touch()
    words = ["engine.id=vllm", "engine.vllm.replicas=5", f"engine.vllm.server.python='{tmp_path / 'bin/python'}'"]
    servers = serve.processes_of(load_config(config_file, words), lambda name: tmp_path / name)
    ports = [server._description.port for server in servers]
    assert len(set(ports)) == 5 and all(ports)
    words.append("engine.vllm.server.port=9000")
    servers = serve.processes_of(load_config(config_file, words), lambda name: tmp_path / name)
    assert [server._description.port for server in servers] == [9_000, 9_001, 9_002, 9_003, 9_004]


# --- addresses -------------------------------------------------------------------------------------------------------


def server(host: str) -> VllmServer:
    return VllmServer(python=Path("python"), model=Path("model"), host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.7", "172.16.0.1", "::1", "fd00::7"])
def test_private_addresses(host: str) -> None:
    command = server(host).command(80)
    assert command[command.index("--host") + 1] == host
    assert server(host).url(80) == (f"http://[{host}]:80" if ":" in host else f"http://{host}:80")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "2600::1", "localhost", ""])
def test_addresses_that_others_reach_are_refused(host: str) -> None:
    with pytest.raises(ValueError):
        server(host)


# --- sao doctor --engine ---------------------------------------------------------------------------------------------


class Replica(FakeReplica):
    """One that is also updated from a model folder's file, which holds the weights of its start."""

    drift = 0.0
    """What an update does to its scores."""

    async def update_weights(self, body: dict[str, Any]) -> web.Response:
        self.pending = self.first
        self.off += self.drift
        return web.json_response({})


class FakeLearner:
    """The trainer of the policy that the fake replica samples from; `off` is added to its log-probs."""

    def __init__(self, off: float) -> None:
        self.off, self.closed = off, False

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        texts = arguments.get("texts", [])
        return {"logprobs": [[logprob_at(token, 0) + self.off for token in text[1:]] for text in texts]}

    async def close(self) -> None:
        self.closed = True


Rows = list[tuple[str, bool, str]]


def check(config_file: Path, monkeypatch: pytest.MonkeyPatch, off: float = 0.0, **faults: Any) -> Rows:
    """The doctor's rows on a fake replica with faults, reached by its URL."""
    rows: Rows = []
    learner = FakeLearner(off)

    async def launch(*args: Any, **options: Any) -> FakeLearner:
        return learner

    monkeypatch.setattr(checkup.Learner, "launch", launch)

    async def work() -> None:
        replica = Replica()
        replica.hold_at = 60  # of a long generation, so that it is seen running
        for name, value in faults.items():
            setattr(replica, name, value)
        await replica.start()
        try:
            words = ["engine.id=vllm", f"engine.url={replica.url}", "limits.max_context=256", "trainer.dtype=float32"]
            config = load_config(config_file, words)
            await checkup.checkup(config, lambda name: Path(name), lambda *row: rows.append(row))
        finally:
            await replica.kill()

    asyncio.run(asyncio.wait_for(work(), 120.0))
    assert learner.closed == any(name == "sampling" for name, _, _ in rows)
    return rows


def failed(rows: Rows) -> dict[str, str]:
    return {name: text for name, good, text in rows if not good}


ALL = ["start", "routes", "canary", "sampling", "abort", "update"]


def test_a_sound_engine(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = check(config_file, monkeypatch)
    assert failed(rows) == {} and [name for name, _, _ in rows] == ALL
    assert "vLLM 0.32.0 (proven)" in rows[1][2]


@pytest.mark.parametrize(
    ("faults", "row", "words"),
    [
        ({"off": 0.1}, "sampling", ["disagree", "weights are other"]),
        ({"load": {"num_requests_running": 1.0}}, "abort", ["goes on after its client has gone", "log"]),
        ({"drift": 0.1}, "update", ["same weights", "1.00e-01", "not exact"]),
        ({"failing": Counter({"/update_weights": 9})}, "update", ["no replica has taken version 0", "log"]),
    ],
    ids=str,
)
def test_each_fault_is_one_row(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any], row: str, words: list[str]
) -> None:
    monkeypatch.setattr(checkup, "ABORT_S", 2.0)
    rows = check(config_file, monkeypatch, **faults)
    assert [name for name, _, _ in rows] == ALL
    found = failed(rows)
    assert list(found) == [row] and all(word in found[row] for word in words), found


@pytest.mark.parametrize(
    ("faults", "row", "words"),
    [
        ({"refuse": (403, "not enabled")}, "routes", ["403", "--enable-scale-out"]),
        ({"lying_label": "5"}, "canary", ["versions [(5, 4)]"]),
        ({"lying_label": "default"}, "canary", ["label"]),
    ],
    ids=str,
)
def test_without_a_canary_nothing_more_is_asked(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any], row: str, words: list[str]
) -> None:
    rows = check(config_file, monkeypatch, **faults)
    found = failed(rows)
    assert [name for name, _, _ in rows] == ALL[:3] and "canary" in found
    assert all(word in found[row] for word in words), found


def test_a_server_without_control_routes(config_file: Path) -> None:
    """vLLM without VLLM_SERVER_DEV_MODE."""
    rows: Rows = []

    async def work() -> None:
        async def health(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.router.add_get("/health", health)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        config = load_config(config_file, ["engine.id=vllm", f"engine.url=http://127.0.0.1:{port}"])
        try:
            await checkup.checkup(config, lambda name: Path(name), lambda *row: rows.append(row))
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(work(), 120.0))
    found = failed(rows)
    assert list(found) == ["routes", "canary"] and "/pause, /start_weight_update" in found["routes"]
    assert "VLLM_SERVER_DEV_MODE" in found["routes"] and "`sao engine`" in found["routes"]


@pytest.mark.parametrize(
    ("words", "row", "says"),
    [
        (["engine.url=http://127.0.0.1:9"], "start", "`sao engine`"),
        (["engine.vllm.server.python=gone"], "vllm", "make setup-vllm"),
        ([f"engine.vllm.server.python='{sys.executable}'", "engine.vllm.server.platform=cuda"], "vllm", "make setup-vllm"),
    ],
)
def test_what_cannot_be_started_or_reached(config_file: Path, words: list[str], row: str, says: str) -> None:
    rows: Rows = []
    config = load_config(config_file, ["engine.id=vllm", *words])
    asyncio.run(checkup.checkup(config, lambda name: Path(name), lambda *found: rows.append(found)))
    assert list(failed(rows)) == [row] and says in failed(rows)[row]


def test_an_unproven_vllm_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup._judged("0.32.0+cpu") == "vLLM 0.32.0+cpu (proven)"
    with pytest.raises(ConfigError, match="not proven") as caught:
        checkup._judged("0.33.0")
    assert "0.32.0" in caught.value.hint and "SAO_VLLM_UNPROVEN" in caught.value.hint
    monkeypatch.setenv("SAO_VLLM_UNPROVEN", "1")
    assert "not proven" in checkup._judged("0.33.0")
