"""Sandboxes that are containers of Docker engines.

Flows in: a run id, tasks (with or without an image), commands. Flows out: results; meanwhile one container per sandbox.
A container has no network, no capabilities, no new privileges, and limits on memory, processes, file size and disk.

    docker_config   what a container is made of          docker_engine   one engine's calls (docker_ssh: the way to it)
    docker_pool     containers ready, budget, placement  docker_monitor  disk, deadlines, what dead runs have left
    docker_sandbox  commands and files of one            docker_limits   which limit a command ran into
    docker_program  programs beside its shell

Its main process is the shell supervisor, and we hold the standard input and output of that: no `docker exec` at all, so
a command costs no engine call. As process 1 the supervisor is the init process: it reaps orphans, cannot be killed from
inside (`kill -9 -1` by a policy must not lose the episode) and stays small next to what an out-of-memory kill picks. Only
when the connection is lost (the engine or the harness was restarted) the living container is joined with a `docker exec`.

A container outlives a harness that was killed. Another process of the same run may `adopt` it; until then this run's reapers
spare it. Those of other runs on the machine do not: its owner is dead, and a label cannot be changed to name another one.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging

from harness.errors import ConfigError, SandboxError
from harness.sandboxes.docker_config import DockerConfig
from harness.sandboxes.docker_engine import Engine
from harness.sandboxes.docker_monitor import watch
from harness.sandboxes.docker_pool import Container, Fleet, Pool
from harness.sandboxes.docker_sandbox import DockerSandbox
from harness.task import Task

log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class DockerSandboxes:
    """See the module docstring."""

    Config = DockerConfig

    def __init__(self, config: DockerConfig, run_id: str) -> None:
        self._config, self._run_id = config, run_id
        self._fleet = Fleet(config.deadline_s)
        self._monitors: list[asyncio.Task[None]] = []
        self._open: list[DockerSandbox] = []

    async def start(self) -> None:
        """Reach every engine, remove what dead runs left there, have any default image, begin to make containers ready."""
        try:
            urls: list[str | None] = [*self._config.engines] or [None]
            for url in urls:
                engine = await asyncio.to_thread(Engine, url, self._config.starts)
                pool = Pool(engine, self._config, self._run_id, self._fleet.changed)
                self._fleet.pools.append(pool)
                await engine.call(engine.reap, None, self._run_id, again=True)
                if self._config.image:
                    await pool.folder_of(self._config.image)
        except SandboxError as error:
            await self.close()
            raise ConfigError(error.message, hint=error.hint) from error
        except BaseException:
            await self.close()
            raise
        for pool in self._fleet.pools:
            pool.refill(self._config.image)
            self._monitors.append(asyncio.create_task(watch(pool, self._config), name=f"watch {pool.engine.name}"))

    async def acquire(self, task: Task) -> DockerSandbox:
        """A ready container of the task's image, or a new one."""
        return await self._acquire(task, sibling=False)

    async def adopt(self, task: Task, name: str) -> DockerSandbox:
        """The container of that `DockerSandbox.name` which a killed process of this run has left, for the same task.

        Its files are as they were, and so is what it runs in the background; its shell and the programs that the dead process
        held are ended. Raises `SandboxError` if it is gone, stopped, of another run, or an episode has it.
        """
        pool, container = await self._fleet.adopt(name)
        sandbox = self._sandbox(task, pool, container)
        try:
            await sandbox.take_over()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until no container is being made ready. Raises `SandboxError` after `timeout_s`."""
        await self._fleet.until_ready(timeout_s)

    async def close(self) -> None:
        """Remove every container of this run, also those that a killed process has left and nobody has adopted."""
        for monitor in self._monitors:
            monitor.cancel()
        await asyncio.gather(*self._monitors, return_exceptions=True)
        self._monitors.clear()
        for sandbox in self._open:
            sandbox.closed = True
        pools, self._fleet.pools = self._fleet.pools, []
        results = await asyncio.gather(*(pool.close() for pool in pools), return_exceptions=True)
        for error in filter(None, results):
            raise error

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        """Remove the run's containers (None: those of dead owners on this machine, and of any past their deadline).

        On the environment's engine; a run that names engines does the same on each of those when it starts, and then
        every minute. So without an environment's engine there is nothing to do here, which is told once.
        """
        try:
            engine = Engine()
        except ConfigError as error:
            log.warning("nothing is removed: %s", error)
            return 0
        try:
            return engine.now(engine.reap, run_id, again=True)
        finally:
            engine.close()

    async def _acquire(self, task: Task, *, sibling: bool) -> DockerSandbox:
        if not self._fleet.pools:
            raise SandboxError("the docker sandboxes are closed")
        image = task.image or self._config.image
        if not image:
            raise SandboxError(f"task {task.id} names no image", hint="give one for such tasks as sandbox.image")
        pool, container = await self._fleet.acquire(image, f"{task.id}#{next(_numbers)}", sibling=sibling)
        return self._sandbox(task, pool, container)

    def _sandbox(self, task: Task, pool: Pool, container: Container) -> DockerSandbox:
        release = functools.partial(self._fleet.give_back, pool, container)
        sandbox = DockerSandbox(container, release, functools.partial(self._acquire, task, sibling=True))
        self._open = [other for other in self._open if not other.closed]
        self._open.append(sandbox)
        return sandbox
