"""A run's services: folder, ledger, chat, plug-ins, engine and trainer, opened and closed together.

Flows in: a `Config` (or a folder to resume). Flows out: a `Run` that the stages and the loop use. Closing ends every process
and sandbox that the run started, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from harness.chat import Chat
from harness.config import Config
from harness.engines.embedded import EmbeddedEngine
from harness.engines.http import HttpEngine
from harness.episode import Stage
from harness.errors import EngineError
from harness.learner import Learner
from harness.ledger import Ledger
from harness.parsers import PARSERS
from harness.protocols import Environment, InferenceEngine, SandboxProvider
from harness.registry import plugin_config
from harness.rundir import RunDir
from harness.session import TokenSession
from harness.task import Split, Task

log = logging.getLogger("sao")

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest |log-prob difference| between trainer and engine on the probe after a publish, nats."""


class Run:
    """One run's services. `async with Run(...)`; engine and trainer are started by `launch`."""

    def __init__(self, folder: RunDir, config: Config, *, resumed: bool = False) -> None:
        self.folder, self.config, self.resumed = folder, config, resumed
        self.ledger = Ledger(folder.path)
        self.generation = self.ledger.get("generation", 0) + 1
        self.ledger.put("generation", self.generation)
        environment, options = plugin_config("environment", config.environment.table())
        self.environment: Environment = environment(options)
        self.model = folder.path / "model" if config.model.path is None else Path(config.model.path)
        self.engine: HttpEngine
        self.learner: Learner
        self.chat: Chat
        self.sandboxes: SandboxProvider
        self.version = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Run:
        self._stack.callback(self.folder.close)
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
        """Start the trainer ranks."""
        settings = self.config.trainer
        learner = await Learner.launch(
            self.folder.log("trainer"),
            ranks=settings.ranks,
            threads=settings.threads,
            start_s=self.config.engine.start_s,
        )
        self._stack.push_async_callback(learner.close)
        self.learner = learner
        await learner.call("setup", trainer=settings.model_dump())

    async def launch_engine(self) -> None:
        """Start (or connect to) the engine with the run's model, version 0."""
        settings = self.config.engine
        self.chat = Chat(self.model, self.config.model.stop)
        if settings.url is not None:
            self.engine = HttpEngine(settings.url)
        else:
            self.engine = await EmbeddedEngine.launch(
                self.model,
                self.folder.log("engine"),
                slots=settings.max_batch,
                max_len=self.config.limits.max_context,
                version=0,
                threads=settings.threads,
                seed=self.config.seed,
                start_s=settings.start_s,
            )
        self._stack.push_async_callback(self.engine.close)

    async def launch(self) -> None:
        """Start engine and trainer side by side."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.launch_engine())
            if not hasattr(self, "learner"):
                group.create_task(self.launch_learner())

    async def demonstrator(self, engine: InferenceEngine, chat: Chat, sandbox: dict[str, Any]) -> Stage:
        """A stage on which a script acts, in its own kind of sandbox."""
        return self._stage(engine, chat, await self._open_sandboxes(sandbox))

    def stage(self) -> Stage:
        """The stage of this run's policy."""
        return self._stage(self.engine, self.chat, self.sandboxes)

    def _stage(self, engine: InferenceEngine, chat: Chat, sandboxes: SandboxProvider) -> Stage:
        agent, options = plugin_config("agent", self.config.agent.table())
        limits = self.config.limits.limits()
        parser = PARSERS[self.config.rollout.tool_calls]

        def session(episode_id: str, seed: int | None) -> TokenSession:
            return TokenSession(chat, engine, parser, limits, episode_id, seed=seed)

        return Stage(self.environment, agent(options), sandboxes, limits, session)

    def tasks(self, split: Split) -> Sequence[Task]:
        """The environment's tasks."""
        return self.environment.tasks(split)

    async def publish(self, version: int) -> None:
        """Move the trainer's weights into the engine as `version`, and prove with a probe that they arrived."""
        path = self.folder.path / "weights" / f"v{version:06d}.safetensors"
        probe = self.chat.opening(self.tasks("heldout")[0].messages, ())[: self.config.limits.max_context]
        written = await self.learner.call("publish", path=str(path), probe=probe)
        await self.engine.update_weights(path, version, written["sha256"])
        scored = await self.engine.score(probe)
        apart = [abs(a - b) for a, b in zip(scored, written["probe"], strict=True)]
        if not all(x <= PROBE_TOLERANCE[self.config.trainer.dtype] for x in apart):
            raise EngineError(
                f"after publishing version {version} engine and trainer differ by up to {max(apart):.2e} nats on the probe",
                hint="the weights did not arrive whole; see the engine's log",
            )
        self.version = version
        for old in sorted((self.folder.path / "weights").glob("v*.safetensors"))[:-2]:
            old.unlink()
