"""The containers of one engine: started ones kept ready, a budget over all of them, and a limit on starts at a time.

Flows in: images to have a container of, and who wants it. Flows out: `Container`s, each the caller's until it is given back.

    reserve ──▶ take ──▶ (ready one, else room is made and one is started) ──▶ give_back: removed, its place is free
                  └──▶ refill, in the background, while there is room beside the episodes' containers
    adopt: the same place for a container that a killed process of the run has left
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from harness.errors import SandboxError
from harness.sandboxes.docker_config import WARM, DockerConfig
from harness.sandboxes.docker_engine import AttachedStream, Engine, owner_alive
from harness.sandboxes.shell import WATCHED_SUPERVISOR

log = logging.getLogger(__name__)

SHUNNED_S = 30.0
"""How long an engine that failed a start comes last."""


class Container:
    """One container: the way to its shell, and what the monitor did to it."""

    def __init__(self, engine: Engine, container_id: str, image: str, folder: str) -> None:
        self.engine, self.id, self.image, self.folder = engine, container_id, image, folder
        self.name = f"container {container_id[:12]}"
        self.began = time.monotonic()
        self.stopped: Literal["", "disk", "deadline"] = ""
        """What the monitor has stopped it for, until it is started again; `stopping` is held while it does."""
        self.sibling = False
        self.stream: AttachedStream | None = None
        self.stopping = asyncio.Lock()
        self.started_again = float("-inf")
        self._joined: str | None = None
        self._unused = False

    @property
    def age_s(self) -> float:
        """Since it was started or, for a ready one, since an episode has it."""
        return time.monotonic() - self.began

    async def attach(self) -> None:
        """Connect to the supervisor that is process 1: once after each start, for its input may end for good."""
        self.stream = await AttachedStream.open(await self.engine.call(self.engine.attach, self.id, again=True))
        self._joined, self._unused = None, True

    async def open(self) -> AttachedStream:
        """A stream to a supervisor that waits: that of process 1 or, if its connection is lost, a second one."""
        if self.stream is None or self.stream.ended or not self._unused:
            self.detach()
            command = ["bash", "-c", WATCHED_SUPERVISOR]
            self._joined, connection = await self.engine.call(self.engine.spawn, self.id, command, self.folder, again=True)
            self.stream = await AttachedStream.open(connection)
        self._unused = False
        return self.stream

    async def restart(self) -> None:
        """Kill every process and start it again with the same files."""
        self.detach()
        async with self.stopping:
            await self.engine.call(self.engine.restart, self.id, again=True)
            self.stopped, self.started_again = "", time.monotonic()
        await self.attach()

    async def supervisor_killed(self) -> bool:
        """Whether a command has killed the second supervisor; process 1 cannot be killed from inside."""
        if self._joined is None:
            return False
        return bool(await self.engine.call(self.engine.exit_code, self._joined, again=True))

    def detach(self) -> None:
        """Let go of the stream."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None


class Pool:
    """See the module docstring. `changed` is called whenever a place has become free."""

    def __init__(self, engine: Engine, config: DockerConfig, run_id: str, changed: Callable[[], Awaitable[None]]) -> None:
        self.engine, self.run_id = engine, run_id
        self.taken: dict[str, Container] = {}
        self.ready: list[Container] = []
        self.wanted = config.image
        """The image of the last refill: one that failed is tried again by the monitor."""
        self.busy = 0
        """Containers that episodes have or wait for."""
        self.filling = 0
        """Containers that are being made ready."""
        self._config, self._changed = config, changed
        self._folders: dict[str, asyncio.Task[str]] = {}
        self._starts = asyncio.Semaphore(config.starts)
        self._making_room = asyncio.Lock()
        self._boots: set[asyncio.Future[str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = -SHUNNED_S

    def rank(self, image: str) -> tuple[bool, bool, float, int]:
        """For placement, the least first: engines that work, have one ready, have most room, run fewest."""
        ready = any(container.image == image for container in self.ready)
        return time.monotonic() - self._failed < SHUNNED_S, not ready, -self.room(), self.busy

    def room(self) -> float:
        """How many more episodes may have a container; ready ones give way."""
        capacity = self._config.capacity
        return float("inf") if capacity is None else capacity - self.busy - self.filling

    def reserve(self) -> None:
        """Count a container that `take` will hand out."""
        self.busy += 1

    async def take(self, image: str, episode: str) -> Container:
        """A running container of the image, for a reserved place. Raises `SandboxError`."""
        try:
            container = await self._take(image, episode)
        except BaseException as error:
            if isinstance(error, SandboxError):
                self._failed = time.monotonic()
            self.busy -= 1
            await self._changed()
            raise
        container.began = time.monotonic()
        self.taken[container.id] = container
        self.refill(image)
        return container

    async def adopt(self, container_id: str) -> Container | None:
        """A running container of this run whose owner is dead, from now on as if `take` had handed it out.

        It counts even where there is no room for it, for it runs. None if this engine has none of that id. Raises
        `SandboxError` if it may not be had.
        """
        found = await self.engine.call(self.engine.inspect, container_id, again=True)
        if found is None or found["Id"] != container_id:
            return None
        state, made, labels = found["State"]["Status"], found["Config"], found["Config"]["Labels"]
        container = Container(self.engine, container_id, made["Image"], made["WorkingDir"])
        if labels.get("sao.run") != self.run_id:
            raise SandboxError(f"{container.name} cannot be adopted: it is not of the run {self.run_id}")
        if container_id in self.taken or owner_alive(labels):
            raise SandboxError(f"{container.name} cannot be adopted: an episode has it")
        if state != "running":
            raise SandboxError(f"{container.name} cannot be adopted: it is {state}")
        self.taken[container_id] = container
        self.reserve()
        try:
            await self._make_room()
        except BaseException:
            await self.give_back(container)
            raise
        return container

    async def give_back(self, container: Container) -> None:
        """Remove it; its place is free when it is gone. Safe to call twice."""
        container.detach()
        try:
            await self.engine.call(self.engine.remove, container.id, again=True)
        finally:
            if self.taken.pop(container.id, None) is not None:
                self.busy -= 1
                await self._changed()

    def refill(self, image: str) -> None:
        """Start containers of the image in the background, up to `warm` ready ones and the budget; without one, none."""
        self.wanted = image
        if not image:
            return
        free = min(self.room() - len(self.ready), self._config.warm - len(self.ready) - self.filling)
        for _ in range(max(0, int(free))):
            self.filling += 1
            task = asyncio.ensure_future(self._fill(image))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def discard(self, container: Container) -> None:
        """Remove a ready one, if it still is ready."""
        if container in self.ready:
            self.ready.remove(container)
            container.detach()
            await self.engine.call(self.engine.remove, container.id, again=True)
            await self._changed()

    async def close(self) -> None:
        """Remove every container of this run on this engine, also what a killed predecessor of the run has left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._boots, return_exceptions=True)
        for container in (*self.ready, *self.taken.values()):
            container.detach()
        try:
            found = await self.engine.call(self.engine.find, f"sao.run={self.run_id}", again=True)
            removals = (self.engine.call(self.engine.remove, container["Id"], again=True) for container in found)
            await asyncio.gather(*removals)
            await self.engine.call(self.engine.reap, None, again=True)
        finally:
            self.engine.close()

    async def folder_of(self, image: str) -> str:
        """The image's working folder; the image is pulled if it is missing, once however many ask."""
        if image not in self._folders:
            self._folders[image] = asyncio.ensure_future(self.engine.call(self.engine.image_folder, image, again=True))
        try:
            return await asyncio.shield(self._folders[image])
        except SandboxError:
            self._folders.pop(image, None)
            raise

    async def _take(self, image: str, episode: str) -> Container:
        while ready := [container for container in self.ready if container.image == image]:
            if ready[0].stream is not None and not ready[0].stream.ended:
                self.ready.remove(ready[0])
                return ready[0]
            await self.discard(ready[0])
        await self._make_room()
        return await self._boot(image, episode)

    async def _make_room(self) -> None:
        """Ready ones give way to what is reserved."""
        async with self._making_room:
            while self.ready and self.room() < len(self.ready):
                await self.discard(self.ready[0])

    async def _fill(self, image: str) -> None:
        try:
            self.ready.append(await self._boot(image, WARM))
        except SandboxError as error:
            self._failed = time.monotonic()
            log.warning("%s: no container could be made ready: %s", self.engine.name, error)
        finally:
            self.filling -= 1
            await self._changed()

    async def _boot(self, image: str, episode: str) -> Container:
        folder = await self.folder_of(image)
        arguments = self._config.container(image, folder, self.run_id, episode)
        async with self._starts:
            boot = asyncio.ensure_future(self.engine.call(self.engine.boot, arguments))
            self._boots.add(boot)
            boot.add_done_callback(self._boots.discard)
            try:
                container = Container(self.engine, await asyncio.shield(boot), image, folder)
                await container.attach()
            except BaseException:
                # The thread cannot be stopped: see it through, so that its container has an owner to remove it.
                await asyncio.wait([boot])
                if boot.exception() is None:
                    await self.engine.call(self.engine.remove, boot.result())
                raise
        return container


class Fleet:
    """All engines: who gets the next container, and who waits until one is free."""

    def __init__(self, wait_s: float) -> None:
        self.pools: list[Pool] = []
        self._wait_s = wait_s
        self._siblings = 0
        self._condition = asyncio.Condition()

    async def acquire(self, image: str, episode: str, *, sibling: bool = False) -> tuple[Pool, Container]:
        """A container from the engine with most room; nothing has run yet, so one that fails hands on to the next."""
        failures: dict[Pool, SandboxError] = {}
        while True:
            pool = await self._place(image, set(failures), sibling)
            if sibling:
                self._siblings += 1
            try:
                container = await pool.take(image, episode)
            except BaseException as error:
                self._siblings -= sibling
                if not isinstance(error, SandboxError):
                    raise
                failures[pool] = error
                if len(failures) == len(self.pools):
                    raise
                log.warning("%s cannot start a container, another engine is tried: %s", pool.engine.name, error)
            else:
                container.sibling = sibling
                return pool, container

    async def adopt(self, container_id: str) -> tuple[Pool, Container]:
        """See `Pool.adopt`; the engine that has it is found. Raises `SandboxError` if none has."""
        refusal: SandboxError | None = None
        for pool in self.pools:
            try:
                if (container := await pool.adopt(container_id)) is not None:
                    return pool, container
            except SandboxError as error:
                refusal = error
        raise refusal or SandboxError(f"container {container_id[:12]} cannot be adopted: it is gone")

    async def give_back(self, pool: Pool, container: Container) -> None:
        """See `Pool.give_back`."""
        if container.sibling:
            container.sibling = False
            self._siblings -= 1
        await pool.give_back(container)

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until no engine is making a container ready."""
        try:
            async with asyncio.timeout(timeout_s), self._condition:
                await self._condition.wait_for(lambda: not any(pool.filling for pool in self.pools))
        except TimeoutError:
            raise SandboxError(f"containers are still being made ready after {timeout_s:g} s") from None

    async def changed(self) -> None:
        """A place may have become free."""
        async with self._condition:
            self._condition.notify_all()

    async def _place(self, image: str, failed: set[Pool], sibling: bool) -> Pool:
        def best() -> Pool | None:
            pools = sorted((pool for pool in self.pools if pool not in failed), key=lambda pool: pool.rank(image))
            # Episodes that hold a container and wait for a second one would wait for each other: one of them may pass.
            return next((pool for pool in pools if pool.room() > 0 or (sibling and self._siblings == 0)), None)

        try:
            async with asyncio.timeout(self._wait_s), self._condition:
                pool = await self._condition.wait_for(best)
        except TimeoutError:
            held = sum(pool.busy for pool in self.pools)
            raise SandboxError(
                f"no container became free within {self._wait_s:g} s; {held} are in use",
                hint="raise sandbox.max_containers or its budgets, or lower rollout.concurrency",
            ) from None
        assert pool is not None
        pool.reserve()
        return pool
