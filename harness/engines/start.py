"""From a configuration to an engine that serves its model: started here, or reached by its URL. Runs and verbs share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from harness.config import Config, VllmConfig
from harness.engines.embedded import EmbeddedEngine
from harness.engines.http import HttpEngine
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_launch import VllmProcess, VllmServer, described, free_port
from harness.engines.vllm_replica import ReplicaHandle

Logs = Callable[[str], Path]
"""Name of a process -> its log file."""


def engine_dtype(config: Config) -> str:
    """Number type in which the engine computes; that of a server of which nothing is known is taken to be the trainer's."""
    vllm = config.engine.vllm
    if config.engine.url is not None:
        return str((vllm.server if vllm is not None else {}).get("dtype", config.trainer.dtype))
    return "float32" if vllm is None else described({"model": ".", **vllm.server}).dtype


def description(config: Config, options: VllmConfig, model: Path) -> VllmServer:
    """What each of vLLM's servers is started with."""
    settings = config.engine
    return described(
        {
            "model": model,
            "max_model_len": config.limits.max_context,
            "max_num_seqs": settings.max_batch,
            "seed": config.seed,
            "start_s": settings.start_s,
            **options.server,
        }
    )


def servers_of(config: Config, options: VllmConfig, model: Path, logs: Logs) -> list[VllmProcess]:
    """The servers of a configuration, none started yet, each with a port that it keeps. Raises `ConfigError`."""
    what = description(config, options, model)
    what.check()
    if what.port:
        ports = [what.port + number for number in range(options.replicas)]
    else:
        found: dict[int, None] = {}
        while len(found) < options.replicas:
            found[free_port(what.host)] = None
        ports = list(found)
    return [VllmProcess(what.model_copy(update={"port": port}), logs(f"vllm-{number}"), 0) for number, port in enumerate(ports)]


async def start_engine(config: Config, model: Path, log: Logs, stack: AsyncExitStack) -> HttpEngine | VllmEngine:
    """Start (or connect to) the engine of a configuration with `model` as version 0; `stack` ends it.

    Raises `ConfigError` for what cannot start, `EngineError` with the end of its log for what has not.
    """
    settings = config.engine
    engine: HttpEngine | VllmEngine
    if settings.vllm is not None:
        engine = await _vllm(config, settings.vllm, model, log, stack)
    elif settings.url is not None:
        engine = HttpEngine(settings.url)
    else:
        engine = await EmbeddedEngine.launch(
            model,
            log("engine"),
            slots=settings.max_batch,
            max_len=config.limits.max_context,
            version=0,
            threads=settings.threads,
            seed=config.seed,
            start_s=settings.start_s,
            noise=settings.noise,
        )
    stack.push_async_callback(engine.close)
    return engine


async def _vllm(config: Config, options: VllmConfig, model: Path, log: Logs, stack: AsyncExitStack) -> VllmEngine:
    settings = config.engine
    replicas: list[str | ReplicaHandle] = [*(settings.url or "").split()]
    if not replicas:
        servers = servers_of(config, options, model, log)
        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    stack.push_async_callback(server.close)
                    group.create_task(server.restart())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        replicas += servers
    return VllmEngine(replicas, kv=options.kv, window=settings.max_batch, dtype=engine_dtype(config))
