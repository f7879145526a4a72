"""Sandboxes that are containers of a Docker engine.

Flows in: a run id, tasks (with or without an image), commands. Flows out: results; meanwhile one container per sandbox.
A container has no network, no capabilities, no new privileges, and limits on memory, processes and file size.

Its main process is the shell supervisor, and we hold the standard input and output of that: no `docker exec` at all, so
a command costs no engine call. As process 1 the supervisor reaps orphans, cannot be killed from inside (`kill -9 -1` by
a policy must not lose the episode) and stays small next to what an out-of-memory kill picks. Small files go through the
same shell (3 ms against 40 ms of the archive call), big ones through the archive call: bash reads byte by byte.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import functools
import hashlib
import io
import itertools
import os
import posixpath
import secrets
import shlex
import socket
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from harness.errors import ConfigError, SandboxError
from harness.protocols import ExecResult
from harness.sandboxes.process import alive, start_time
from harness.sandboxes.shell import SUPERVISOR, Shell
from harness.task import Task

CALL_S = 120
FILE_S = 60.0
SHELL_FILE_MAX = 64 * 1024
_numbers = itertools.count(1)


class DockerConfig(BaseModel):
    """What a container is made of, and its limits."""

    model_config = ConfigDict(extra="forbid")

    image: str = "python:3.12-slim"
    """For tasks that name none; needs bash and coreutils."""
    memory_mb: int = Field(2048, ge=64)
    """Memory and swap together."""
    pids: int = Field(256, ge=16)
    cpus: float | None = Field(None, gt=0)
    file_mb: int = Field(2048, ge=1)
    """Size of one file."""


class DockerSandboxes:
    """See the module docstring."""

    Config = DockerConfig

    def __init__(self, config: DockerConfig, run_id: str) -> None:
        self._config, self._run_id = config, run_id
        self._engine: Engine | None = None
        self._images: dict[str, asyncio.Task[str]] = {}
        self._open: list[DockerSandbox] = []

    async def start(self) -> None:
        """Reach the engine and have the default image."""
        self._engine = await asyncio.to_thread(Engine)
        try:
            await self._folder_of(self._config.image)
        except SandboxError as error:
            self._engine.close()
            self._engine = None
            raise ConfigError(error.message, hint=error.hint) from error

    async def acquire(self, task: Task) -> DockerSandbox:
        """A container of the task's image, started, with its shell attached by the first command."""
        image = task.image or self._config.image
        folder = await self._folder_of(image)
        engine = self._engine_started
        boot = asyncio.ensure_future(engine.call(engine.boot, self._container(image, folder, task)))
        try:
            container = await asyncio.shield(boot)
        except asyncio.CancelledError:
            # The thread cannot be stopped: see it through, so that its container has an owner to remove it.
            await asyncio.wait([boot])
            if boot.exception() is None:
                await engine.call(engine.remove, boot.result())
            raise
        sandbox = DockerSandbox(engine, container, folder)
        self._open = [other for other in self._open if not other.closed]
        self._open.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """Remove every container of this run."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            results = await asyncio.gather(*(sandbox.close() for sandbox in self._open), return_exceptions=True)
            # Also what a cancelled close, or a killed predecessor of this run, has left.
            found = await engine.call(engine.find, f"sao.run={self._run_id}", again=True)
            await asyncio.gather(*(engine.call(engine.remove, container["Id"], again=True) for container in found))
            engine.close()
            for error in filter(None, results):
                raise error

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        """Remove the containers of the run (None: of every run whose owner, a process of this machine, is dead)."""
        engine = Engine()
        found = engine.now(engine.find, "sao.run" if run_id is None else f"sao.run={run_id}", again=True)
        if run_id is None:
            found = [container for container in found if _orphaned(container["Labels"])]
        for container in found:
            engine.now(engine.remove, container["Id"], again=True)
        engine.close()
        return len(found)

    @property
    def _engine_started(self) -> Engine:
        if self._engine is None:
            raise SandboxError("the docker sandboxes are closed")
        return self._engine

    async def _folder_of(self, image: str) -> str:
        """The image's working folder; the image is pulled if it is missing, once however many ask."""
        if image not in self._images:
            engine = self._engine_started
            self._images[image] = asyncio.ensure_future(engine.call(engine.image_folder, image, again=True))
        try:
            return await asyncio.shield(self._images[image])
        except SandboxError:
            self._images.pop(image, None)
            raise

    def _container(self, image: str, folder: str, task: Task) -> dict[str, Any]:
        """Arguments of the engine's create call; the limits are those of its host configuration."""
        config = self._config
        return {
            "image": image,
            "entrypoint": ["bash", "-c", SUPERVISOR],
            "command": [],
            "stdin_open": True,
            "working_dir": folder,
            "labels": {
                "sao.run": self._run_id,
                "sao.host": socket.gethostname(),
                "sao.owner": f"{os.getpid()}:{start_time(os.getpid())}",
                "sao.episode": f"{task.id}#{next(_numbers)}",
            },
            "host_config": {
                "network_mode": "none",
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges"],
                "mem_limit": f"{config.memory_mb}m",
                "memswap_limit": f"{config.memory_mb}m",
                "pids_limit": config.pids,
                "nano_cpus": None if config.cpus is None else int(config.cpus * 1e9),
                "ulimits": [{"Name": "fsize", "Soft": config.file_mb << 20, "Hard": config.file_mb << 20}],
                "log_config": {"Type": "none"},  # the output is ours alone; a log would fill the disk
            },
        }


class DockerSandbox:
    """One container."""

    def __init__(self, engine: Engine, container: str, folder: str) -> None:
        self._engine, self._container, self._folder = engine, container, folder
        self._shell = Shell(self._attach, self._kill)
        self._stream: AttachedStream | None = None
        self.closed = False

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox`."""
        self._check_open()
        return await self._shell.exec(command, timeout_s=timeout_s)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        full, nonce = posixpath.join(self._folder, path), secrets.token_hex(16)
        file = shlex.quote(full)
        result = await self._file_command(
            f"if [[ ! -e {file} ]]; then echo {nonce} missing; elif [[ -d {file} ]]; then echo {nonce} folder; "
            f"elif [[ ! -f {file} ]]; then echo {nonce} other; else echo {nonce} file; "
            f"builtin command -p base64 < {file}; builtin command -p sha256sum < {file}; fi"
        )
        # Background processes may write between our lines: the nonce finds the first, the digest proves the rest.
        answer = result.output.partition(nonce)[2].split()
        kind = answer[0] if answer else "lost"
        if kind in ("missing", "folder", "other"):
            number = {"missing": errno.ENOENT, "folder": errno.EISDIR, "other": errno.EINVAL}[kind]
            raise OSError(number, os.strerror(number), path)
        data = binascii.a2b_base64("".join(answer[1:-2])) if len(answer) > 2 else b""
        if len(answer) > 2 and hashlib.sha256(data).hexdigest() == answer[-2]:
            return data
        return await self._engine.call(self._engine.read_archive, self._container, full)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        full = posixpath.join(self._folder, path)
        file, parent = shlex.quote(full), shlex.quote(posixpath.dirname(full))
        script = (
            f"if [[ -e {file} && ! -f {file} ]]; then echo not a regular file; exit 1; fi; "
            f"[[ -d {parent} ]] || builtin command -p mkdir -p -- {parent} || exit"
        )
        if small := len(data) <= SHELL_FILE_MAX:
            script += f"; builtin command -p base64 -d >| {file} <<< '{base64.b64encode(data).decode()}'"
        result = await self._file_command(script)
        if "No space left on device" in result.output:
            raise SandboxError(
                f"container {self._container[:12]}: its disk is full", hint="free space where Docker keeps its data"
            )
        if result.exit_code != 0:
            raise OSError(errno.EINVAL, result.output.strip(), path)
        if not small:
            archive = _tar(posixpath.basename(full), data)
            await self._engine.call(self._engine.api.put_archive, self._container, posixpath.dirname(full), archive)

    async def close(self) -> None:
        """See `Sandbox`."""
        self.closed = True
        self._detach()
        await self._engine.call(self._engine.remove, self._container, again=True)

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError(f"container {self._container[:12]} is removed")

    async def _file_command(self, script: str) -> ExecResult:
        """Run it in a subshell, out of reach of what commands have set, and with all of its output."""
        self._check_open()
        for _ in range(2):  # twice: an earlier command may have left a shell that is about to die
            result = await self._shell.exec(f"( {{ set +exuC; }} 2>/dev/null; {script} )", timeout_s=FILE_S, cap=None)
            if result.timed_out:
                raise SandboxError(f"container {self._container[:12]}: no file answer in {FILE_S:g} s")
            if result.exit_code == 0:
                break
        return result

    async def _attach(self) -> AttachedStream:
        connection = await self._engine.call(self._engine.attach, self._container)
        self._stream = AttachedStream(*await asyncio.open_connection(sock=connection))
        return self._stream

    async def _kill(self) -> None:
        self._detach()
        await self._engine.call(self._engine.kill_all, self._container)

    def _detach(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class AttachedStream:
    """Standard input and output of process 1; the engine sends frames: stream number, three zeros, length, bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """See `Stream`."""
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


class Engine:
    """The blocking SDK behind a bounded pool of threads: starts cost the engine CPU, so more at once gain nothing."""

    def __init__(self) -> None:
        import docker
        import requests

        self._errors = (docker.errors.DockerException, requests.exceptions.RequestException)
        self._refusal = docker.errors.APIError
        self._unreachable = requests.exceptions.ConnectionError
        workers = 2 * (os.cpu_count() or 1)
        try:
            self._client = docker.from_env(timeout=CALL_S, max_pool_size=4 * workers)
        except self._errors as error:
            hint = "install and start it, or set sandbox.id=process"
            raise ConfigError(f"Docker cannot be reached: {error}", hint=hint) from error
        self.api: Any = self._client.api
        if self.api.base_url.startswith("https:"):
            raise ConfigError(f"Docker at {self.api.base_url}: TLS is not supported", hint="use its unix socket or ssh -L")
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="docker")

    async def call[T](self, function: Callable[..., T], *arguments: Any, again: bool = False) -> T:
        """Do `now` in a thread of the pool."""
        work = functools.partial(self.now, function, *arguments, again=again)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def now[T](self, function: Callable[..., T], *arguments: Any, again: bool = False) -> T:
        """Make a blocking call; `again` (idempotent ones only) repeats it if unreachable. Raises `SandboxError`."""
        retrying = Retrying(
            stop=stop_after_attempt(3 if again else 1),
            wait=wait_exponential(0.2, max=2),
            retry=retry_if_exception_type(self._unreachable),
            reraise=True,
        )
        try:
            return retrying(function, *arguments)
        except self._errors as error:
            raise SandboxError(f"docker: {error}") from error

    def close(self) -> None:
        """End the threads and connections."""
        self._threads.shutdown(wait=False)
        self._client.close()

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

    def attach(self, container: str) -> socket.socket:
        """A connection to the standard input and output of process 1."""
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        file = self.api.attach_socket(container, params=streams)
        # The SDK's socket dies with its HTTP response; ours has no such tie.
        connection: socket.socket = file._sock.dup()
        file._response.close()
        return connection

    def kill_all(self, container: str) -> None:
        """Kill every process of a running container and start it again with the same files."""
        self.api.kill(container)
        self.api.wait(container, timeout=CALL_S)
        self.api.start(container)

    def read_archive(self, container: str, path: str) -> bytes:
        """A regular file, through the engine."""
        chunks, _ = self.api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            return file.read() if file else b""

    def find(self, label: str) -> list[dict[str, Any]]:
        """Containers with that label, running or not."""
        return list(self.api.containers(all=True, filters={"label": label}))

    def remove(self, container: str) -> None:
        """Kill and remove it; one that is gone, or is being removed by somebody else, is no error."""
        try:
            self.api.remove_container(container, force=True, v=True)
        except self._refusal as error:
            if error.status_code not in (404, 409):
                raise


def _orphaned(labels: dict[str, str]) -> bool:
    pid, _, started = labels.get("sao.owner", "").partition(":")
    return labels.get("sao.host") == socket.gethostname() and pid.isdigit() and not alive(int(pid), started)


def _tar(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
