"""What the vLLM suites share: servers with a raw client, a fleet of two behind our client, requests that stream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engines.http import HttpEngine
from harness.engines.routing import session_of
from harness.engines.stream import Stream
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_launch import VllmProcess, VllmServer, launch
from harness.engines.vllm_replica import Deadlines, KvMode
from harness.errors import EngineError
from harness.protocols import GenerateRequest, Generation
from tests.contracts.engine_support import DENSE, FAR, MAX_LEN, ROOT, TOLERANCE, apart, logprobs, request
from trainer.model import Policy
from trainer.weights import sha256

PYTHON = ROOT / ".venv" / "vllm" / "bin" / "python"
PLUGIN = ROOT / "harness" / "engines" / "vllm_plugin"
WAIT_S = 1_200.0
"""Of one test; the longest start a server again."""
PROMPT = list(range(5, 45))

MOE: dict[str, Any] = DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


async def until(condition: Callable[[], Any], limit_s: float = WAIT_S) -> None:
    """Give the others turns until something is so."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


class Server:
    """A vLLM server that was started with the first of some policies, a raw client, and the loop in which they live."""

    def __init__(self, runner: asyncio.Runner, process: VllmProcess, folders: list[Path], policies: list[Policy]) -> None:
        self.runner, self.process, self.folders, self.policies = runner, process, folders, policies
        self._client = HttpEngine(process.url, request_s=WAIT_S)
        self.version = 0
        self.serves = 0
        """Which of the policies is in force, and its label, as long as all updates are made by `update`."""

    @property
    def engine(self) -> HttpEngine:
        """The raw client; a restart may have moved the server."""
        self._client.url = self.process.url
        return self._client

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for it, but not for ever."""
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    def file(self, policy: int) -> tuple[Path, str]:
        """A policy's weights and their sha256."""
        path = self.folders[policy] / "model.safetensors"
        return path, sha256(path)

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Raw access to a route."""
        return await self.engine._call("POST", route, body)

    async def plant(self, method: str, *args: Any) -> None:
        """Call a method of `planted.Planted` in the worker."""
        await self.post("/collective_rpc", method=method, args=list(args))

    async def update(self, policy: int) -> None:
        """Publish one of the policies under the next version."""
        path, digest = self.file(policy)
        self.version += 1
        await self.engine.update_weights(path, self.version, digest)
        self.serves = policy

    async def distance(self, policy: int) -> float:
        """Largest difference in nats between 48 sampled tokens' log-probs and a policy's."""
        got = await self.engine.generate(request(PROMPT, 48))
        assert set(got.versions) == {self.version}
        return float(apart(self.policies[policy], PROMPT, got.token_ids, got.logprobs).max())

    def signal(self, number: signal.Signals, *, worker: bool = False) -> None:
        """Send a signal to the whole server, or only to the process that holds the model."""
        assert self.process.pid is not None
        if worker:
            os.kill(self._worker(), number)
        else:
            os.killpg(self.process.pid, number)

    def _worker(self) -> int:
        found = []
        for title in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if os.getpgid(int(title.parent.name)) == self.process.pid and b"VLLM::Worker" in title.read_bytes():
                    found.append(int(title.parent.name))
            except (ProcessLookupError, FileNotFoundError):
                continue
        (pid,) = found
        return pid


def description(model: Path, port: int = 0) -> VllmServer:
    """A server with the plug-in and the faults that tests plant in it."""
    return VllmServer(
        python=PYTHON,
        model=model,
        max_model_len=MAX_LEN,
        port=port,
        extra=("--worker-extension-cls", "planted.Planted"),
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )


@contextmanager
def serving(folders: list[Path], policies: list[Policy], logs: Path, ports: Sequence[int]) -> Iterator[list[Server]]:
    """Servers of the first folder, started side by side, one per port (0: any)."""
    if not PYTHON.is_file():
        pytest.skip("vLLM is not installed: make setup-vllm")

    async def start() -> list[VllmProcess]:
        starts = (launch(description(folders[0], port), logs / f"vllm-{i}.log") for i, port in enumerate(ports))
        return await asyncio.gather(*starts)

    with asyncio.Runner() as runner:
        servers = [Server(runner, process, folders, policies) for process in runner.run(start())]
        try:
            yield servers
        finally:
            for server in servers:
                runner.run(server.engine.close())
                runner.run(server.process.close())


class Fleet:
    """Two servers of one shape, and which policy each published version is."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers
        self.runner, self.policies = servers[0].runner, servers[0].policies
        self.version = 0
        self.published = {0: 0}

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for it, but not for ever."""
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    @asynccontextmanager
    async def client(
        self, *, handles: bool = False, kv: KvMode = "recompute", deadlines: Deadlines | None = None
    ) -> AsyncIterator[VllmEngine]:
        """Our client, which has published policy 0. Without `handles` it cannot restart the servers."""
        replicas = [server.process if handles else server.process.url for server in self.servers]
        engine = VllmEngine(replicas, self.version, kv=kv, deadlines=deadlines)
        try:
            await self.publish(engine, 0)
            yield engine
        finally:
            await engine.close()

    async def publish(self, engine: VllmEngine, policy: int) -> int:
        """Publish a policy through the client; its version."""
        self.version += 1
        self.published[self.version] = policy
        path, digest = self.servers[0].file(policy)
        await engine.update_weights(path, self.version, digest)
        return self.version

    async def pace(self, step_s: float, *numbers: int) -> None:
        """Slow these servers (none named: all) down, or (0) let them go."""
        for number in numbers or range(len(self.servers)):
            await self.servers[number].plant("pace", step_s)

    async def sampled(self, engine: VllmEngine, number: int, at_least: int = 0) -> int:
        """Tokens that a replica has sampled since its start, once they are so many: its books may be behind its answers."""
        while (count := int((await engine.replicas[number].load_figures()).generated_tokens)) < at_least:
            pass
        return count

    def check(self, asked: GenerateRequest, answer: Generation) -> set[int]:
        """All versions of an answer that lacks nothing and whose every token was sampled by its version's policy alone."""
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == asked.max_tokens
        assert answer.finish_reason == "length" and answer.versions == sorted(answer.versions)
        for version in set(answer.versions):
            off = apart(self.policies[self.published[version]], asked.token_ids, answer.token_ids, answer.logprobs)
            assert off[torch.tensor(answer.versions) == version].max() < TOLERANCE
        return set(answer.versions)

    async def mend(self) -> None:
        """Let what is stopped or slow go on, and start what is dead again."""
        for server in self.servers:
            if server.process.alive:
                server.signal(signal.SIGCONT)
            try:
                await server.plant("pace", 0)
            except EngineError:
                await server.process.restart()


class Flight:
    """Requests that stream through a client, each of a session of its own, of so many tokens."""

    flown = 0

    def __init__(self, fleet: Fleet, engine: VllmEngine, n: int, tokens: int) -> None:
        self.fleet, self.engine = fleet, engine
        Flight.flown += 1
        names = [f"flight-{Flight.flown}-{i}/0" for i in range(n)]
        self.requests = [request([*PROMPT, i], tokens, seed=i, request_id=name) for i, name in enumerate(names)]
        self.tasks: list[asyncio.Task[Generation]] = []

    def start(self) -> Flight:
        """Send them."""
        self.tasks = [asyncio.create_task(self.engine.generate(asked)) for asked in self.requests]
        return self

    def streams(self) -> list[Stream]:
        """All that are being received."""
        return [stream for replica in self.engine.replicas for stream in replica._streams]

    def received(self, number: int) -> list[list[int]]:
        """What has come from a replica of the answers that it is at."""
        return [list(stream.ids) for stream in self.engine.replicas[number]._streams]

    async def grow(self, tokens: int) -> None:
        """Wait until all have so many tokens more. None may end meanwhile."""

        def enough(goals: dict[Stream, int]) -> bool:
            assert not any(task.done() for task in self.tasks), "the requests were too short for this test"
            return all(len(stream.ids) >= goal for stream, goal in goals.items())

        await until(lambda: len(self.streams()) == len(self.tasks))
        goals = {stream: len(stream.ids) + tokens for stream in self.streams()}
        await until(lambda: enough(goals))

    def at(self, number: int) -> list[int]:
        """Which of the requests are this replica's."""
        homes = self.engine.router._homes
        return [i for i, asked in enumerate(self.requests) if homes[session_of(asked.request_id)] == number]

    async def land(self) -> list[Generation]:
        """All answers, checked."""
        answers = await asyncio.gather(*self.tasks)
        for asked, answer in zip(self.requests, answers, strict=True):
            self.fleet.check(asked, answer)
        return answers


async def both_serve(fleet: Fleet, engine: VllmEngine, version: int) -> None:
    """Once both replicas are there, new requests go to either; all of them are this version's, exactly."""
    await until(lambda: all(lane.state == "open" for lane in engine.router.lanes))
    flight = Flight(fleet, engine, 4, 20).start()
    for answer in await flight.land():
        assert set(answer.versions) == {version}
    assert len(flight.at(0)) == len(flight.at(1)) == 2
    expected, scored = logprobs(fleet.policies[fleet.published[version]], PROMPT), await engine.canary(PROMPT)
    assert len(scored) == 2
    for _, scores in scored:
        torch.testing.assert_close(torch.tensor(scores), expected, atol=TOLERANCE, rtol=0)


def there_and_back(server: Server) -> None:
    """Updates from one policy to the other and back are exact, and the two can be told apart."""

    async def work() -> list[float]:
        found = []
        for policy in (0, 1, 0, 1, 0):
            await server.update(policy)
            found.append(await server.distance(policy))
        return found

    assert max(server.run(work())) < TOLERANCE
    assert server.run(server.distance(1)) > FAR


def needs_fix(server: Server, fix: str) -> None:
    """Without one of the plug-in's fixes an update loads wrong weights; with it, the next one is exact."""

    async def work() -> tuple[float, float]:
        await server.update(0)
        await server.plant("without_fix", fix)
        try:
            await server.update(1)
            wrong = await server.distance(1)
        finally:
            await server.plant("without_fix", None)
        await server.update(1)
        return wrong, await server.distance(1)

    wrong, right = server.run(work())
    assert wrong > FAR
    assert right < TOLERANCE


def flipped(good: Path, bad: Path) -> str:
    """A copy with one bit turned, under the whole file's sha256."""
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    return sha256(good)
