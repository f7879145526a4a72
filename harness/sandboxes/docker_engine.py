"""One Docker engine: the SDK's blocking calls in a bounded pool of threads, and the streams to shells in containers.

Flows in: an address (None: the environment's) and calls. Flows out: answers, or `SandboxError`. Only calls that may be made
twice are made again when the engine does not answer; a restart of the engine takes a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import socket
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_exponential

from harness.errors import ConfigError, SandboxError
from harness.sandboxes.docker_ssh import Tunnel
from harness.sandboxes.process import alive

CALL_S = 120
AGAIN_S = 15.0
"""How long a call that may be made twice is repeated while the engine cannot be reached."""
ENDING_S = 2.0
"""How long the engine may take to notice that a container whose stream has ended is dead."""
OTHER_THREADS = 8
"""Threads beside those that start containers, so that removals and attachments do not wait for starts."""


class Engine:
    """See the module docstring."""

    def __init__(self, url: str | None = None, starts: int = 4) -> None:
        import docker
        import requests

        self._errors = (docker.errors.DockerException, requests.exceptions.RequestException)
        self._refusal = docker.errors.APIError
        self._unreachable = requests.exceptions.ConnectionError
        environment = os.environ.get("DOCKER_HOST", "")
        self._tunnel: Tunnel | None = None
        threads = starts + OTHER_THREADS
        options: dict[str, Any] = {"timeout": CALL_S, "max_pool_size": 2 * threads}
        address = environment if url is None and environment.startswith("ssh:") else url
        self.name = url or environment or "unix:///var/run/docker.sock"
        try:
            if address is None:
                self._client = docker.from_env(**options)
            else:
                if address.startswith("ssh:"):
                    self._tunnel = Tunnel(address)
                    address = f"unix://{self._tunnel.socket}"
                self._client = docker.DockerClient(base_url=address, **options)
        except self._errors as error:
            if self._tunnel is not None:
                self._tunnel.close()
            hint = "install and start it, or set sandbox.id=process"
            hint = hint if url is None else f"start it, or correct sandbox.engines; `docker -H {url} info` must work"
            raise ConfigError(f"Docker cannot be reached at {self.name}: {error}", hint=hint) from error
        self.api: Any = self._client.api
        if self.api.base_url.startswith("https:"):
            raise ConfigError(f"Docker at {self.api.base_url}: TLS is not supported", hint="use ssh://user@host")
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="docker")

    async def call[T](self, function: Callable[..., T], *arguments: Any, again: bool = False) -> T:
        """Do `now` in a thread of the pool."""
        work = functools.partial(self.now, function, *arguments, again=again)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def now[T](self, function: Callable[..., T], *arguments: Any, again: bool = False) -> T:
        """Make a blocking call; `again` (idempotent ones only) repeats it if unreachable. Raises `SandboxError`."""
        retrying = Retrying(
            stop=stop_after_delay(AGAIN_S) if again else stop_after_attempt(1),
            wait=wait_exponential(0.2, max=2),
            retry=retry_if_exception_type((self._unreachable, ConnectionError)),
            reraise=True,
        )
        try:
            answer: T = retrying(self._through, function, *arguments)
            return answer
        except (*self._errors, ConnectionError) as error:
            raise SandboxError(f"docker: {error}") from error

    def _through[T](self, function: Callable[..., T], *arguments: Any) -> T:
        if self._tunnel is not None:
            self._tunnel.ensure()
        return function(*arguments)

    def close(self) -> None:
        """End the threads and connections."""
        self._threads.shutdown(wait=False)
        self._client.close()
        if self._tunnel is not None:
            self._tunnel.close()

    # --- images and containers ---------------------------------------------------------------------------------------

    def image_folder(self, image: str) -> str:
        """The working folder of an image, which is pulled if it is missing."""
        try:
            try:
                found = self.api.inspect_image(image)
            except self._refusal:
                self._client.images.pull(image)
                found = self.api.inspect_image(image)
        except self._refusal as error:
            hint = f"pull, load or build it under that name: `docker image inspect {image}` must find it"
            raise SandboxError(f"image {image} is missing and cannot be pulled: {error}", hint=hint) from error
        return str(found["Config"]["WorkingDir"] or "/sandbox")

    def boot(self, container: dict[str, Any]) -> str:
        """Create and start a container; its id."""
        host_config = self.api.create_host_config(**container["host_config"])
        made = str(self.api.create_container(**{**container, "host_config": host_config})["Id"])
        try:
            self.api.start(made)
        except self._errors:
            self.remove(made)
            raise
        return made

    def stop(self, container: str) -> None:
        """Kill every process of a container and wait until they are dead; one that is dead already is no error."""
        try:
            self.api.kill(container)
        except self._refusal as error:
            if error.status_code != 409:  # not running
                raise
        self.api.wait(container, timeout=CALL_S)

    def restart(self, container: str) -> None:
        """Kill every process of a container and start it again with the same files."""
        self.stop(container)
        self.api.start(container)

    def remove(self, container: str) -> None:
        """Kill and remove it; one that is gone, or is being removed by somebody else, is no error."""
        try:
            self.api.remove_container(container, force=True, v=True)
        except self._refusal as error:
            if error.status_code not in (404, 409):
                raise

    def state(self, container: str) -> dict[str, Any] | None:
        """Its `State`, of a container that may be about to end; None if there is no such container."""
        try:
            self.api.wait(container, timeout=ENDING_S)
        except self._refusal as error:
            if error.status_code == 404:
                return None
            raise
        except self._errors:
            pass  # it has not ended in that time; if the engine is away, the next call says so
        found = self.inspect(container)
        return None if found is None else dict(found["State"])

    def inspect(self, container: str) -> dict[str, Any] | None:
        """All that the engine knows of it; None if there is no such container."""
        try:
            return dict(self.api.inspect_container(container))
        except self._refusal as error:
            if error.status_code == 404:
                return None
            raise

    def find(self, label: str, sizes: bool = False) -> list[dict[str, Any]]:
        """Containers with that label, running or not; `SizeRw` are the bytes over the image, if asked for."""
        return list(self.api.containers(all=True, size=sizes, filters={"label": label}))

    def reap(self, run_id: str | None, spared: str = "") -> int:
        """Remove the run's containers (None: those of dead owners on this machine, and of any past their deadline).

        Of the run `spared` only those past their deadline: the others may be adopted.
        """
        found = self.find("sao.run" if run_id is None else f"sao.run={run_id}")
        if run_id is None:
            found = [
                container
                for container in found
                if _overdue(container["Labels"])
                or (owner_alive(container["Labels"]) is False and container["Labels"]["sao.run"] != spared)
            ]
        for container in found:
            self.remove(container["Id"])
        return len(found)

    # --- what is in a container --------------------------------------------------------------------------------------

    def attach(self, container: str) -> socket.socket:
        """A connection to the standard input and output of process 1."""
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        return _own_socket(self.api.attach_socket(container, params=streams))

    def spawn(
        self, container: str, command: list[str], folder: str, tty: bool = False, environment: dict[str, str] | None = None
    ) -> tuple[str, socket.socket]:
        """Start a program in a running container: its exec id and a connection to it.

        What it says before it has been sent anything may be lost.
        """
        options = {"stdin": True, "tty": tty, "workdir": folder, "environment": environment}
        made = str(self.api.exec_create(container, command, **options)["Id"])
        return made, _own_socket(self.api.exec_start(made, tty=tty, socket=True))

    def run(self, container: str, command: list[str]) -> None:
        """Run a short command to its end, whatever that is."""
        self.api.exec_start(self.api.exec_create(container, command)["Id"])

    def exit_code(self, exec_id: str) -> int | None:
        """The exit code of what `spawn` started; None if it runs, or the engine has forgotten it."""
        try:
            found = self.api.exec_inspect(exec_id)
        except self._refusal as error:
            if error.status_code == 404:
                return None
            raise
        return None if found["Running"] else int(found["ExitCode"])

    def read_archive(self, container: str, path: str) -> bytes:
        """A regular file, through the engine. Raises `FileNotFoundError`."""
        try:
            chunks, _ = self.api.get_archive(container, path)
        except self._refusal as error:
            if error.status_code == 404 and self.find_one(container):
                raise FileNotFoundError(2, os.strerror(2), path) from error
            raise
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            return file.read() if file else b""

    def find_one(self, container: str) -> bool:
        """Whether there is such a container, running or not."""
        return bool(self.api.containers(all=True, filters={"id": container}))

    def write_archive(self, container: str, path: str, data: bytes, owner: tuple[int, int] = (0, 0)) -> None:
        """A regular file, through the engine, with its parent folders.

        One that exists is replaced by another one with its owner and mode, also behind a link; a new one gets `owner`.
        """
        entry = tarfile.TarInfo()
        (entry.uid, entry.gid), entry.mode = owner, 0o644
        if (found := self._entry(container, path)) is not None:
            path, entry.uid, entry.gid, entry.mode = found[0], found[1].uid, found[1].gid, found[1].mode
        entry.name, entry.size, entry.mtime = path.lstrip("/"), len(data), int(time.time())
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(entry, io.BytesIO(data))
        self.api.put_archive(container, "/", buffer.getvalue())

    def _entry(self, container: str, path: str) -> tuple[str, tarfile.TarInfo] | None:
        """Where a path leads, and what is there; None if that is nothing."""
        try:
            chunks, stat = self.api.get_archive(container, path)
            if stat["linkTarget"]:
                path = stat["linkTarget"]
                chunks, _ = self.api.get_archive(container, path)
        except self._refusal as error:
            if error.status_code == 404 and self.find_one(container):
                return None
            raise
        with contextlib.closing(chunks), tarfile.open(fileobj=io.BytesIO(next(chunks)), mode="r|") as archive:
            entry = archive.next()  # the rest of a big file may be missing here
        assert entry is not None
        return path, entry


class AttachedStream:
    """Standard input and output of a program.

    Without a terminal the engine sends frames (stream number, three zeros, length, bytes), with one just the bytes.
    """

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter, framed: bool) -> None:
        self._reader, self._writer, self._framed = reader, writer, framed

    @classmethod
    async def open(cls, connection: socket.socket, framed: bool = True) -> AttachedStream:
        """Over a connection of `Engine.attach` or `Engine.spawn`."""
        loop, reader = asyncio.get_running_loop(), _Reader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), framed)

    @property
    def ended(self) -> bool:
        """Whether the other side is gone; nothing has to be read to know."""
        return self._reader.ended or self._writer.is_closing()

    async def read(self) -> bytes:
        """See `Stream`."""
        if not self._framed:
            return await self._reader.read(2**16)
        try:
            size = 0
            while size == 0:
                size = int.from_bytes((await self._reader.readexactly(8))[4:], "big")
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return b""

    async def write(self, data: bytes) -> None:
        """See `Stream`."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Let go of the socket."""
        self._writer.close()


class _Reader(asyncio.StreamReader):
    ended = False

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        self.ended = True
        super().set_exception(exc)


def _own_socket(file: Any) -> socket.socket:
    # The SDK's socket dies with its HTTP response; ours has no such tie.
    connection: socket.socket = file._sock.dup()
    file._response.close()
    return connection


def owner_alive(labels: dict[str, str]) -> bool | None:
    """Whether the process runs that made a container with these labels; None if that was on another machine."""
    pid, _, started = labels.get("sao.owner", "").partition(":")
    return alive(int(pid), started) if labels.get("sao.host") == socket.gethostname() and pid.isdigit() else None


def _overdue(labels: dict[str, str]) -> bool:
    deadline = labels.get("sao.deadline", "")
    return deadline.isdigit() and int(deadline) < time.time()
