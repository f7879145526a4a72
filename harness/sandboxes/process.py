"""Sandboxes that are plain processes of this machine, for where there is no container engine. NOT a security boundary.

Flows in: a run id and commands. Flows out: results; while it lives, one folder and one process group per sandbox.
A command runs with this user's rights. It is kept from accidents, not from intent: an environment without the caller's
secrets, resource limits, no network where the kernel allows it, and an end that finds its children.

    <temp>/sao-<run>-<owner pid>-<owner start>-<n>/    one per provider; `reap` reads the owner off the name
        <k>/work                                       a sandbox's working folder and HOME; commands start here
        <k>/tmp                                        its TMPDIR

Every process carries SAO_SANDBOX=<provider folder's name>/<k>, so Linux finds it even outside its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from harness.errors import ConfigError, SandboxError
from harness.protocols import ByteStream, ExecResult
from harness.sandboxes.process_stream import KILL_S, STUCK, TAKE_TERMINAL, ProcessStream, Program, let_signals_through
from harness.sandboxes.shell import SUPERVISOR, Shell
from harness.task import Task

log = logging.getLogger(__name__)

OPEN_FILES = 1024
_UNSHARE = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))
_numbers = itertools.count(1)


class ProcessConfig(BaseModel):
    """Limits of each process of a sandbox."""

    model_config = ConfigDict(extra="forbid")

    memory_mb: int = Field(8192, ge=64)
    """Address space."""
    cpu_s: int = Field(3600, ge=1)
    file_mb: int = Field(1024, ge=1)
    """Size of one file."""
    processes: int = Field(4096, ge=16)
    """Counted over all processes of this user; the kernel does not hold root to it."""


class ProcessSandboxes:
    """See the module docstring."""

    Config = ProcessConfig

    def __init__(self, config: ProcessConfig, run_id: str) -> None:
        if not re.fullmatch(r"[\w.-]+", run_id):
            raise ConfigError(f"run id {run_id!r} cannot name a folder", hint="use letters, digits, '.', '_' and '-'")
        name = f"sao-{run_id}-{os.getpid()}-{start_time(os.getpid())}-{next(_numbers)}"
        self._folder = Path(tempfile.gettempdir()).resolve() / name
        self._open: list[ProcessSandbox] = []
        self._unshare: tuple[str, ...] = ()
        limits = {
            "v": config.memory_mb * 1024,
            "t": config.cpu_s,
            "f": config.file_mb * 1024,
            "u": config.processes,
            "n": OPEN_FILES,
        }
        # Each may be refused (a lower hard limit, macOS); a new network namespace has its loopback down.
        self._limits = "".join(f"ulimit -{flag} {value} 2>/dev/null; " for flag, value in limits.items())
        self._limits += "command -v ip >/dev/null && ip link set lo up 2>/dev/null; "

    async def start(self) -> None:
        """Find bash and the way to cut the network off; say once what this sandbox is not."""
        if shutil.which("bash") is None:
            raise ConfigError("sandbox 'process' needs bash, which is not on PATH", hint="install bash")
        self._unshare = await _find_unshare()
        network = "without network" if self._unshare else "WITH network: this kernel refuses a network namespace"
        log.warning("process sandboxes are not a security boundary: commands run as this user, %s", network)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        let_signals_through()

    async def acquire(self, task: Task) -> ProcessSandbox:
        """A new folder; bash starts with the first command."""
        sandbox = ProcessSandbox(
            self._folder / str(next(_numbers)),
            ("nice", "-n", "5", *self._unshare, "bash", "-c"),
            self._limits,
            partial(self.acquire, task),
        )
        self._open = [other for other in self._open if not other.closed]
        self._open.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox of this run."""
        results = await asyncio.gather(*(sandbox.close() for sandbox in self._open), return_exceptions=True)
        # Also what a cancelled close left half done.
        await asyncio.to_thread(kill_marked, f"{self._folder.name}/", exact=False)
        await asyncio.to_thread(_remove, self._folder)
        for error in filter(None, results):
            raise error

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        """Kill and remove what the run (None: every run whose owner is dead) left; how many processes and folders."""
        removed = 0
        for folder in Path(tempfile.gettempdir()).resolve().glob("sao-*-*-*-*"):
            run, pid, started, _ = folder.name.removeprefix("sao-").rsplit("-", 3)
            with contextlib.suppress(FileNotFoundError):  # its owner, or another reaper, is removing it
                ours = folder.stat().st_uid == os.getuid() and pid.isdigit()
                if ours and (run == run_id if run_id is not None else not alive(int(pid), started)):
                    removed += kill_marked(f"{folder.name}/", exact=False) + 1
                    _remove(folder)
        return removed


class ProcessSandbox:
    """One folder, one bash, and programs beside it."""

    def __init__(
        self, folder: Path, bash: tuple[str, ...], limits: str, another: Callable[[], Awaitable[ProcessSandbox]]
    ) -> None:
        self._folder, self._bash, self._limits, self._another = folder, bash, limits, another
        self._label = f"{folder.parent.name}/{folder.name}"
        self._work, self._tmp = folder / "work", folder / "tmp"
        self._spawned = False
        self._supervisor: ProcessStream | None = None
        self._programs: list[Program] = []
        self._shell = Shell(self._supervise, self._kill)
        self.closed = False
        self._make_folders()

    async def fresh(self) -> ProcessSandbox:
        """See `Sandbox`."""
        return await self._another()

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox`."""
        self._check_open()
        return await self._shell.exec(command, timeout_s=timeout_s)

    async def spawn(self, command: Sequence[str], *, tty: bool = False) -> ByteStream:
        """See `Sandbox`. A program has the environment and the limits of the shell."""
        environment = self._environment()
        if tty:
            script = f'{TAKE_TERMINAL}{self._limits}exec "$@"'
            words = (*self._bash, script, "bash")
            stream = await ProcessStream.open_terminal(
                lambda name: (*words, name, *command), self._work, {**environment, "TERM": "xterm-256color"}
            )
        else:
            words = (*self._bash, f'{self._limits}exec "$@"', "bash")
            stream = await ProcessStream.open((*words, *command), self._work, environment)
        program = Program(stream, kill_session)
        self._programs = [other for other in self._programs if not other.ended]
        self._programs.append(program)
        return program

    async def read(self, path: str) -> bytes:
        """See `Sandbox`. Raises `ValueError` if the path leads out of the sandbox."""
        return await asyncio.to_thread(_read, self._inside(path))

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`. Raises `ValueError` if the path leads out of the sandbox."""
        await asyncio.to_thread(_write, self._inside(path), data)

    async def close(self) -> None:
        """See `Sandbox`."""
        self.closed = True
        for program in self._programs:
            await program.close()
        await self._kill()
        await asyncio.to_thread(_remove, self._folder)

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError(f"sandbox {self._label} is closed")

    def _inside(self, path: str) -> Path:
        # The policy can cause this, so it is no SandboxError, which would take the episode out of training.
        self._check_open()
        real = Path(os.path.realpath(self._work / path))
        if not real.is_relative_to(self._folder):
            raise ValueError(f"path {path!r} leads out of the sandbox")
        return real

    def _make_folders(self) -> None:
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._tmp.mkdir(exist_ok=True)
        except OSError as error:
            raise _disk_error(error) from error

    def _environment(self) -> dict[str, str]:
        """Of a process that is about to be started; its folders exist, though a command may have removed them."""
        self._check_open()
        self._make_folders()
        self._spawned = True
        return {
            "PATH": os.pathsep.join((os.path.join(sys.base_exec_prefix, "bin"), os.environ.get("PATH", os.defpath))),
            "HOME": str(self._work),
            "TMPDIR": str(self._tmp),
            "LANG": "C.UTF-8",
            "SAO_SANDBOX": self._label,
        }

    async def _supervise(self) -> ProcessStream:
        environment = self._environment()
        self._supervisor = await ProcessStream.open((*self._bash, self._limits + SUPERVISOR), self._work, environment)
        return self._supervisor

    async def _kill(self) -> None:
        """Kill everything, the programs beside the shell too."""
        if not self._spawned:
            return
        if self._supervisor is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty (macOS: only zombies)
                os.killpg(self._supervisor.pid, signal.SIGKILL)
            await self._supervisor.wait_for_exit()
            self._supervisor.let_go()
            self._supervisor = None
        for program in self._programs:
            await program.kill()
        await asyncio.to_thread(kill_marked, self._label, exact=True)
        self._spawned = False


# --- finding and removing what is left -------------------------------------------------------------------------------


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks ("0" without /proc); pid and start name a process for good."""
    fields = _stat_fields(pid)
    return fields[19] if fields else "0"


def alive(pid: int, started: str) -> bool:
    """Whether the process of that pid and `start_time` still runs (a zombie does not)."""
    if sys.platform == "linux":
        fields = _stat_fields(pid)
        return bool(fields) and fields[0] != "Z" and fields[19] == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def kill_marked(label: str, *, exact: bool) -> int:
    """Kill every process whose SAO_SANDBOX is `label` (or begins with it) and wait until all are dead; their number."""
    mark = b"\0SAO_SANDBOX=" + label.encode() + (b"\0" if exact else b"")
    killed = 0
    deadline = time.monotonic() + KILL_S
    while pids := _marked(mark):  # again, because they may have forked meanwhile
        _kill_and_wait(pids, deadline)
        killed += len(pids)
    return killed


def kill_session(leader: int) -> None:
    """Kill a living session leader and everything in its session; where there is no /proc, in its process group."""
    deadline = time.monotonic() + KILL_S
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended (macOS: only zombies)
        os.killpg(leader, signal.SIGKILL)
    while pids := _in_session(leader):
        _kill_and_wait(pids, deadline)


def _stat_fields(pid: int) -> list[str]:
    # proc(5): the name in parentheses may hold anything; [0] of the rest is the state, [19] the start time.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _marked(mark: bytes) -> list[int]:
    if sys.platform != "linux":
        return []
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended, or not ours
        if mark in b"\0" + environment:
            pids.append(int(name))
    return pids


def _in_session(leader: int) -> list[int]:
    if sys.platform != "linux":
        return []
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat_fields(int(name))
        if fields and fields[3] == str(leader) and fields[0] not in "ZX":
            pids.append(int(name))
    return pids


def _kill_and_wait(pids: list[int], deadline: float) -> None:
    """All are killed before one is waited for: a session leader may not die while others write to its terminal."""
    if sys.platform != "linux":
        return
    handles = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    try:
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for pid, handle in handles.items():
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            if not ended.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise SandboxError(f"process {pid} does not die", hint=STUCK)
    finally:
        for handle in handles.values():
            os.close(handle)


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except PermissionError:  # a command took its own rights away
        for parent, names, _ in os.walk(folder):
            for name in names:
                if not os.path.islink(path := os.path.join(parent, name)):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder)


# --- files -----------------------------------------------------------------------------------------------------------


def _open_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)  # a named pipe must not block us


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=_open_file) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", opener=_open_file) as file:
            file.write(data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_error(error) from error
        raise


def _disk_error(error: OSError) -> SandboxError:
    return SandboxError(f"no sandbox folder can be written: {error}", hint="free disk space, or set TMPDIR to another disk")


async def _find_unshare() -> tuple[str, ...]:
    if shutil.which("unshare") is None:
        return ()
    for prefix in _UNSHARE:
        probe = await asyncio.create_subprocess_exec(*prefix, "true", stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        if await asyncio.wait_for(probe.wait(), KILL_S) == 0:
            return prefix
    return ()
