"""A run's services: folder, ledger, chat, plug-ins, engine and trainer, opened and closed together.

Flows in: a `Config` (or a folder to resume). Flows out: a `Run` that the stages and the loop use. Closing ends every process
and sandbox that the run started, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from harness.chat import Chat
from harness.config import Config
from harness.engines.probe import SEQUENCES, compare, probe_sampling
from harness.engines.start import description, engine_dtype, start_engine
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_transfer import Sender, choose
from harness.episode import Sessions, Stage
from harness.errors import EngineError
from harness.learner import Learner
from harness.ledger import Ledger
from harness.parsers import PARSERS
from harness.protocols import Agent, Environment, InferenceEngine, SandboxProvider
from harness.registry import environment, plugin_config
from harness.rundir import RunDir
from harness.session import TokenSession
from harness.task import Split, Task

log = logging.getLogger("sao")


class Run:
    """One run's services. `async with Run(...)`; engine and trainer are started by `launch`."""

    def __init__(self, folder: RunDir, config: Config, *, resumed: bool = False) -> None:
        self.folder, self.config, self.resumed = folder, config, resumed
        self.ledger = Ledger(folder.path)
        self.generation = self.ledger.get("generation", 0) + 1
        self.ledger.put("generation", self.generation)
        self.environment: Environment = environment(config.environment.table())
        self.model = folder.path / "model" if config.model.path is None else Path(config.model.path)
        self.engine: InferenceEngine
        self.learner: Learner
        self.chat: Chat
        self.sandboxes: SandboxProvider
        self.version = 0
        self._sender: Sender | None = None
        """Sends weights to the engine; None: it reads files."""
        self._agent: Agent | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Run:
        self._stack.callback(self.folder.close)
        shutil.rmtree(self.folder.path / "episodes", ignore_errors=True)  # episodes that a dead process was playing
        self._stack.callback(self.ledger.close)
        try:
            self.sandboxes = await self._open_sandboxes(self.config.sandbox.table())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _open_sandboxes(self, table: dict[str, Any]) -> SandboxProvider:
        provider, options = plugin_config("sandbox", table)
        reaped = provider.reap(None)
        if reaped:
            log.info("removed %d things that dead runs had left", reaped)
        sandboxes: SandboxProvider = provider(options, self.folder.id)
        self._stack.push_async_callback(sandboxes.close)
        await sandboxes.start()
        return sandboxes

    async def launch_learner(self) -> None:
        """Start the trainer ranks, once."""
        if hasattr(self, "learner"):
            return
        settings = self.config.trainer
        learner = await Learner.launch(
            self.folder.log("trainer"),
            ranks=settings.ranks,
            threads=settings.threads,
            start_s=self.config.engine.start_s,
        )
        self._stack.push_async_callback(learner.close)
        self.learner = learner
        ready = await learner.call("setup", trainer=settings.model_dump())
        if (vllm := self.config.engine.vllm) is not None:
            urls = (self.config.engine.url or "").split()
            way = choose(description(self.config, vllm, self.model), urls, ready["device"])
            log.info("new weights go to vLLM by %s", way)
            self._sender = None if way == "disk" else Sender(learner, way)

    async def launch_engine(self) -> None:
        """Start (or connect to) the engine with the run's model, version 0."""
        self.chat = Chat(self.model, self.config.model.stop)
        self.engine = await start_engine(self.config, self.model, self.folder.log, self._stack)

    @property
    def dtypes(self) -> tuple[str, str]:
        """Number types in which engine and trainer compute."""
        return engine_dtype(self.config), self.config.trainer.dtype

    async def launch(self) -> None:
        """Start engine and trainer side by side."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.launch_engine())
            group.create_task(self.launch_learner())

    async def demonstrator(self, engine: InferenceEngine, chat: Chat, sandbox: dict[str, Any]) -> Stage:
        """A stage on which a script acts, in its own kind of sandbox."""
        return self._stage(engine, chat, await self._open_sandboxes(sandbox))

    def stage(self) -> Stage:
        """The stage of this run's policy."""
        return self._stage(self.engine, self.chat, self.sandboxes)

    def _stage(self, engine: InferenceEngine, chat: Chat, sandboxes: SandboxProvider) -> Stage:
        limits = self.config.limits.limits()
        parser = PARSERS[self.config.rollout.tool_calls]

        def session(episode_id: str, seed: int | None) -> TokenSession:
            folder = self.folder.path / "episodes" / episode_id
            return TokenSession(chat, engine, parser, limits, episode_id, seed=seed, folder=folder)

        return self.stage_with(session, sandboxes)

    def stage_with(self, session: Sessions, sandboxes: SandboxProvider | None = None) -> Stage:
        """A stage on which whoever is behind `session` acts, with this run's agent."""
        if self._agent is None:
            made, options = plugin_config("agent", self.config.agent.table())
            self._agent = made(options)
            if (close := getattr(self._agent, "close", None)) is not None:
                self._stack.push_async_callback(close)
        return Stage(self.environment, self._agent, sandboxes or self.sandboxes, self.config.limits.limits(), session)

    def tasks(self, split: Split) -> Sequence[Task]:
        """The environment's tasks."""
        return self.environment.tasks(split)

    async def probe(self) -> None:
        """Prove that engine and trainer have one policy, and no sampler is at work (`probe.json`). Raises `EngineError`."""

        async def trainer(texts: list[list[int]]) -> list[list[float]]:
            return (await self.learner.call("logprobs", texts=texts))["logprobs"]  # type: ignore[no-any-return]

        prompts = [self.chat.opening(task.messages, ()) for task in islice(self.tasks("heldout"), SEQUENCES)]
        facts = await probe_sampling(
            self.engine,
            trainer,
            prompts,
            version=self.version,
            stop=self.chat.stop_ids,
            max_context=self.config.limits.max_context,
            dtypes=self.dtypes,
        )
        self.folder.write("probe.json", facts)
        log.info("engine and trainer are apart by up to %.1e nats on %d sampled tokens", facts["max_abs"], facts["tokens"])

    async def publish(self, version: int) -> None:
        """Move the trainer's weights into the engine as `version`, and prove with a probe that they arrived."""
        probe = self.chat.opening(self.tasks("heldout")[0].messages, ())[: self.config.limits.max_context]
        trained = await self._move(version, probe)
        apart = compare(await self.engine.score(probe), trained, self.dtypes)
        if not apart.within:
            raise EngineError(
                f"after publishing version {version} engine and trainer disagree on the probe: {apart}",
                hint="the weights did not arrive whole; see the engine's log",
            )
        self.version = version

    async def _move(self, version: int, probe: list[int]) -> list[float]:
        """Take the policy out of the trainer and into the engine; the trainer's own scores of the probe."""
        if self._sender is not None and isinstance(self.engine, VllmEngine):
            taken = await self.learner.call("publish", probe=probe, version=version)
            await self.engine.publish(self._sender.weights(version, taken["announced"]), version)
            return list(taken["probe"])
        path = self._weights(version)
        taken = await self.learner.call("publish", probe=probe, version=version, path=str(path))
        await self.engine.update_weights(path, version, taken["sha256"])
        for old in path.parent.glob("v*.safetensors"):
            if old not in (path, self._weights(self.version)):  # a replica that comes back may still be reading that one
                old.unlink()
        return list(taken["probe"])

    def _weights(self, version: int) -> Path:
        return self.folder.path / "weights" / f"v{version:06d}.safetensors"
