"""`sao engine`: vLLM's servers of a configuration, kept alive until somebody ends them.

Flows in: a configuration. Flows out: lines that say where a server is ready. A server that ends is started again at its port,
with the initial weights; whoever uses it publishes to it anew (`VllmEngine` does so by itself).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential

from harness.config import Config
from harness.engines.start import Logs, servers_of
from harness.engines.vllm_launch import VllmProcess
from harness.errors import ConfigError, EngineError, SaoError

log = logging.getLogger("sao")

FAILURES = 5
"""So often in a row a server may fail before it is given up."""
STEADY_S = 600.0
"""A server that has lived so long has not failed to start."""
Say = Callable[[str], None]


def model_folder(config: Config) -> Path:
    """The model that an engine serves outside of a run. Raises `ConfigError` where only a run makes it."""
    if config.model.path is None:
        raise ConfigError("`model.path` is not given: there is no model to serve yet", hint="set model.path=FOLDER")
    return Path(config.model.path)


def processes_of(config: Config, logs: Logs) -> list[VllmProcess]:
    """The servers of a configuration, none started yet, each with a port that it keeps. Raises `ConfigError`."""
    options = config.engine.vllm
    if options is None:
        raise ConfigError("`engine.id` = 'torch': the embedded engine is started by the run itself", hint="set engine.id=vllm")
    if config.engine.url is not None:
        raise ConfigError("`engine.url` names servers that run already", hint="drop engine.url")
    return servers_of(config, options, model_folder(config), logs)


async def serve(servers: list[VllmProcess], say: Say) -> None:
    """Start the servers, say where each is ready, start again what ends. Returns on SIGTERM, once requests have drained.

    Raises `EngineError` if one does not start at first, or if all have failed `FAILURES` times in a row.
    """
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    work = [asyncio.create_task(_serve(servers, say)), asyncio.create_task(asked.wait())]
    try:
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        await asyncio.gather(*(server.close() for server in servers))


async def _serve(servers: list[VllmProcess], say: Say) -> None:
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(_start(server, say))
    urls = " ".join(server.url for server in servers)
    say(f'a run uses them with: engine.id=vllm engine.url="{urls}"')
    errors = await asyncio.gather(*(_keep(server, say) for server in servers))
    raise EngineError(f"no server is left: {errors[0]}", hint="see the servers' logs")


async def _start(server: VllmProcess, say: Say) -> None:
    await server.restart()
    say(json.dumps({"url": server.url, "pid": server.pid}))


async def _keep(server: VllmProcess, say: Say) -> SaoError | OSError:
    """Start a running server again whenever it ends. Returns why it is given up."""
    while True:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((SaoError, OSError)),
            stop=stop_after_attempt(FAILURES),
            wait=wait_exponential(max=30.0),
            before_sleep=_announce,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    if not server.alive:
                        await _start(server, say)
                    await _steady(server)
        except (SaoError, OSError) as error:
            log.error("%s is given up: %s", server.url, error)
            return error


async def _steady(server: VllmProcess) -> None:
    """Wait for the server's end. Raises `EngineError` if it comes soon."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    status = await server.ended()
    log.warning("%s has ended with status %d; it is started again", server.url, status)
    if clock() - begin < STEADY_S:
        raise EngineError(f"the server ended with status {status}", hint="see its log")


def _announce(state: RetryCallState) -> None:
    assert state.outcome is not None and state.next_action is not None
    error = state.outcome.exception()
    log.warning("attempt %d in %.0f s, after: %s", state.attempt_number + 1, state.next_action.sleep, error)
