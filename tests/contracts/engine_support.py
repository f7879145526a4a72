"""What the engine suites share: small policy folders, their exact log-probs, requests, and an engine as a test sees it."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.toy_repair import tokenizer
from harness.chat import Chat
from harness.engines.embedded import EmbeddedEngine
from harness.engines.http import HttpEngine
from harness.engines.scripted import ScriptedEngine
from harness.engines.vllm import VllmEngine
from harness.protocols import GenerateRequest
from trainer.model import Policy, random_policy
from trainer.weights import export, sha256, write_file

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
MAX_LEN = 40_000
TOLERANCE = 1e-4
"""Nats, fp32 on both sides."""
FAR = 0.5
"""Nats. Two random policies differ by several."""
STEP_S = 0.05
"""Added to each of vLLM's steps where a test must find requests still running."""
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM on CPUs has no kernel for less
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def write_policy(folder: Path, seed: int, fields: dict[str, Any] = DENSE) -> Path:
    """A model folder with random weights and the toy tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    policy = random_policy(fields | {"vocab_size": tokenizer.build_tokenizer().get_vocab_size()}, seed)
    policy.model.config.to_json_file(folder / "config.json")
    write_file(dict(export(policy.model)), folder / "model.safetensors")
    return folder


def distributions(policy: Policy, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log p of every token after each of these, [L, V], by one full forward."""
    with torch.no_grad():
        n = len(tokens)
        places = {"position_ids": torch.arange(n)[None], "cu_seqlens": [0, n]}
        logits = policy.model(input_ids=torch.tensor(tokens)[None], use_cache=False, **places).logits[0]
        return torch.log_softmax(logits / temperature, -1)


def logprobs(policy: Policy, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log p of tokens 1.. by one full forward, [L-1]."""
    return distributions(policy, tokens, temperature)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def apart(policy: Policy, prompt: list[int], ids: list[int], got: list[float], temperature: float = 1.0) -> torch.Tensor:
    """|difference| in nats between what an engine answered for each token and the policy's own log-prob."""
    return (torch.tensor(got) - logprobs(policy, prompt + ids, temperature)[len(prompt) - 1 :]).abs()


def request(prompt: list[int], n: int, *, seed: int | None = 0, stop: tuple[int, ...] = (), **more: Any) -> GenerateRequest:
    return GenerateRequest(prompt, n, stop, seed=seed, **more)


async def launch(model: Path, log: Path, **changes: Any) -> EmbeddedEngine:
    """An embedded engine that serves version 7."""
    options = {"slots": 4, "max_len": MAX_LEN, "version": 7, "threads": 1, "seed": 0, "start_s": 120.0}
    return await EmbeddedEngine.launch(model, log, **(options | changes))


async def started(engine: Any, n: int) -> None:
    """Until n requests run."""
    while (await engine.metrics())["running"] < n:
        pass


async def load(server: HttpEngine, model: Path, version: int) -> None:
    """The three calls of an update, without pause and resume."""
    path = model / "model.safetensors"
    await server._call("POST", "/start_weight_update")
    await server._call("POST", "/update_weights", {"update_info": {"path": str(path), "sha256": sha256(path)}})
    await server._call("POST", "/finish_weight_update", {"weight_version": str(version)})


class World:
    """An engine and the loop in which its connections live."""

    def __init__(self, runner: asyncio.Runner, engine: Any, chat: Chat) -> None:
        self.runner, self.engine, self.chat = runner, engine, chat

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for it, but not for ever."""
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    async def update(self, model: Path, version: int) -> None:
        """Publish a model folder's weights."""
        path = model / "model.safetensors"
        await self.engine.update_weights(path, version, sha256(path))


class ScriptedWorld(World):
    """A script: it has a version, but no weights."""

    engine: ScriptedEngine


class Served(World, ABC):
    """An engine with weights, behind HTTP."""

    slots: int
    """So many requests are computed at once; more wait."""
    servers: list[HttpEngine]
    """Raw access to the routes of each server."""

    @abstractmethod
    async def computed(self) -> float:
        """Grows with everything that is computed."""

    @abstractmethod
    async def waiting(self) -> float:
        """Requests that wait for a slot or for the end of a pause."""

    @abstractmethod
    def pausing(self, model: Path, version: int) -> AbstractAsyncContextManager[None]:
        """An update that stands still inside: paused and loaded, not yet resumed."""

    @abstractmethod
    def slowly(self) -> AbstractAsyncContextManager[None]:
        """Inside, a request of some hundred tokens does not end before its test is done with it."""


class EmbeddedWorld(Served):
    """The embedded engine."""

    engine: EmbeddedEngine
    slots = 4

    def __init__(self, runner: asyncio.Runner, engine: EmbeddedEngine, chat: Chat) -> None:
        super().__init__(runner, engine, chat)
        self.servers = [engine]

    async def computed(self) -> float:
        return (await self.engine.metrics())["busy_s"]

    async def waiting(self) -> float:
        return (await self.engine.metrics())["waiting"]

    @asynccontextmanager
    async def pausing(self, model: Path, version: int) -> AsyncIterator[None]:
        await self.engine._call("POST", "/pause")
        assert (await self.engine._call("GET", "/health"))["paused"] is True
        await load(self.engine, model, version)
        yield
        await self.engine._call("POST", "/resume")

    @asynccontextmanager
    async def slowly(self) -> AsyncIterator[None]:
        yield  # its control calls come between steps, so a request is never far ahead of them


class VllmWorld(Served):
    """Real vLLM servers behind the client of many replicas."""

    engine: VllmEngine
    slots = 64

    def __init__(self, runner: asyncio.Runner, engine: VllmEngine, chat: Chat) -> None:
        super().__init__(runner, engine, chat)
        self.servers = list(engine.replicas)

    async def computed(self) -> float:
        return sum([(await replica.load_figures()).generated_tokens for replica in self.engine.replicas])

    async def waiting(self) -> float:
        figures = await self.engine.metrics()
        return figures["waiting"] + figures["queued"]

    @asynccontextmanager
    async def pausing(self, model: Path, version: int) -> AsyncIterator[None]:
        arrived, gate = asyncio.Semaphore(0), asyncio.Event()
        for replica in self.engine.replicas:
            replica.resume = partial(self._late, replica.resume, arrived, gate)  # type: ignore[method-assign]
        update = asyncio.create_task(self.update(model, version))
        for replica in self.engine.replicas:
            await arrived.acquire()
            del replica.resume
        yield
        gate.set()
        await update

    @staticmethod
    async def _late(resume: Callable[[], Awaitable[None]], arrived: asyncio.Semaphore, gate: asyncio.Event) -> None:
        arrived.release()
        await gate.wait()
        await resume()

    @asynccontextmanager
    async def slowly(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for server in self.servers:
                await stack.enter_async_context(slowed(server, STEP_S))
            yield


@asynccontextmanager
async def slowed(server: HttpEngine, step_s: float) -> AsyncIterator[None]:
    """Each step of a vLLM server with `planted.Planted` takes so much longer, as a larger model's would."""
    await server._call("POST", "/collective_rpc", {"method": "pace", "args": [step_s]})
    try:
        yield
    finally:
        await server._call("POST", "/collective_rpc", {"method": "pace", "args": [0]})
