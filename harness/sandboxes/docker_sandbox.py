"""One container as a `Sandbox`: commands through its shell, programs, files, and what it means when one of them fails.

Flows in: a running `Container`, commands, files. Flows out: results. What a command can cause is its result, and `killed_by`
names the limit; what it cannot cause (removed, killed from outside, engine gone, deadline) is a `SandboxError`.

Small files go through the shell (3 ms against 40 ms of the archive call), big ones through the archive call into a file beside,
for bash reads byte by byte; the shell writes them over the old file, which stays the same file. Only one that the container's
user may not write is replaced.

A container over its disk budget is killed; the next command starts it again with its files, and has `docker_monitor.GRACE_S`
to make room. After `DISK_KILLS` times it stays dead: commands come back at once, and files can still be read and written, so
that a verdict can be given.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import posixpath
import secrets
import shlex
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from harness.errors import SandboxError
from harness.protocols import ByteStream, ExecResult
from harness.sandboxes.docker_engine import AttachedStream
from harness.sandboxes.docker_limits import NO_FORK, Counters
from harness.sandboxes.docker_pool import Container
from harness.sandboxes.docker_program import KILL_SESSION, Program, Refusal
from harness.sandboxes.shell import KILLED, OUTPUT_CAP, Limit, Shell

log = logging.getLogger(__name__)

FILE_S = 60.0
SHELL_FILE_MAX = 64 * 1024
ENGINE_DISK = "/"
"""Where a container has the engine's disk; other file systems in it (`/dev/shm`) are memory of its own, and small."""
# The fields behind the name are state, parent, group, session; what the engine has started has no parent inside.
_STAT = "read -r line 2>/dev/null </proc/$pid/stat || continue; fields=(${line##*) }); "
# Again, because they may have forked meanwhile. In the order of their numbers, because a script that sees what it waits for die
# goes on. But not the `sleep` that process 1 lives by once its input has ended: until it is one it has no input either.
KILL_OTHERS = (
    "sessions=; read -r line </proc/$$/stat; fields=(${line##*) }); mine=${fields[3]}; "
    f"for pid in /proc/[0-9]*; do pid=${{pid#/proc/}}; {_STAT}"
    '[[ ${fields[1]} = 0 && ${fields[3]} != "$mine" ]] && sessions+=" ${fields[3]}"; done; '
    "for round in {1..100}; do doomed=(); for pid in /proc/[0-9]*; do pid=${pid#/proc/}; "
    f"[[ $pid != 1 && -L /proc/$pid/fd/0 ]] || continue; {_STAT}"
    '[[ " $sessions " = *" ${fields[3]} "* && ${fields[0]} != Z && $line != *" (sleep) "?" 1 "* ]] && doomed[pid]=1; done; '
    '[ ${#doomed[@]} = 0 ] && break; kill -9 "${!doomed[@]}" 2>/dev/null; done'
)
"""A command that kills the sessions of process 1's shell and of all programs that were started from outside, but its own."""
DISK_KILLS = 3
"""Times that a container over its disk budget is started again."""


class DockerSandbox:
    """One container."""

    def __init__(
        self,
        container: Container,
        release: Callable[[], Awaitable[None]],
        another: Callable[[], Awaitable[DockerSandbox]],
    ) -> None:
        self._container, self._release, self._another = container, release, another
        self._engine = container.engine
        self._shell = Shell(self._container.open, self._kill, self._why_ended, watched=True)
        self._lock = asyncio.Lock()
        self._counters = Counters()
        self._stream: AttachedStream | None = None
        self._programs: list[Program] = []
        self._untold = False  # that a shell was lost while no command ran
        self._disk_kills, self._disk_told = 0, False
        self._gone: SandboxError | None = None
        self.closed = False

    @property
    def container_id(self) -> str:
        """As the engine knows it."""
        return self._container.id

    @property
    def name(self) -> str:
        """What `DockerSandboxes.adopt` asks for."""
        return self.container_id

    async def take_over(self) -> None:
        """End what a dead process held here, and learn the counters as they stand."""
        nonce = secrets.token_hex(16)
        answer = await self._file_command(f"{KILL_OTHERS}; {Counters.script(nonce)}")
        self._counters.hit(nonce, answer.output)

    async def fresh(self) -> DockerSandbox:
        """See `Sandbox`."""
        return await self._another()

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox`."""
        async with self._lock:
            if not await self._has_disk():
                return ExecResult(f"[{KILLED['disk']}; this command did not run]\n", 137, killed_by="disk")
            return await self._explain(await self._run(command, timeout_s))

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        full, nonce = posixpath.join(self._container.folder, path), secrets.token_hex(16)
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
        with contextlib.suppress(binascii.Error, IndexError):
            data = binascii.a2b_base64("".join(answer[1:-2]))
            if hashlib.sha256(data).hexdigest() == answer[-2]:
                return data
        return await self._call(self._engine.read_archive, full)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        full, nonce = posixpath.join(self._container.folder, path), secrets.token_hex(16)
        file, parent, beside = shlex.quote(full), shlex.quote(posixpath.dirname(full)), f"/tmp/.sao-{nonce}"
        script = (
            f"LC_ALL=C; umask 022; if [[ -e {file} && ! -f {file} ]]; then echo not a regular file; exit 1; fi; "
            f"[[ -d {parent} && -d /tmp ]] || builtin command -p mkdir -p -- {parent} /tmp || exit; "
        )
        if len(data) <= SHELL_FILE_MAX:
            result = await self._file_command(
                f"{script} builtin command -p base64 -d >| {file} <<< '{base64.b64encode(data).decode()}'"
            )
        else:
            result = await self._file_command(f"{script} builtin echo {nonce} $EUID ${{GROUPS[0]}}")
            if result.exit_code == 0:
                uid, gid = map(int, result.output.partition(nonce)[2].split()[:2])
                await self._call(self._engine.write_archive, beside, data, (uid, gid))
                result = await self._file_command(f"LC_ALL=C; umask 022; builtin command -p cat {beside} >| {file}")
                await self._file_command(f"builtin command -p rm -f {beside}")
        if result.killed_by == "disk" or (result.exit_code != 0 and "Permission denied" in result.output):
            await self._call(self._engine.write_archive, full, data)
        elif result.exit_code != 0 and "No space left on device" in result.output:
            if await self._on_engine_disk(full):
                raise SandboxError(f"{self._container.name}: its disk is full", hint="free space where Docker keeps its data")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif result.exit_code != 0:
            raise OSError(errno.EINVAL, result.output.strip(), path)

    async def _on_engine_disk(self, path: str) -> bool:
        """Whether a path is on the engine's disk; else it is on a small file system that the policy has filled."""
        nonce = secrets.token_hex(16)
        result = await self._file_command(
            f"at=$(builtin command -p readlink -m -- {shlex.quote(path)}); until [[ -e ${{at:=/}} ]]; do at=${{at%/*}}; done; "
            f'builtin echo {nonce} $(builtin command -p stat -c %d -- {ENGINE_DISK} "$at")'
        )
        devices = result.output.partition(nonce)[2].split()[:2]
        return len(devices) < 2 or devices[0] == devices[1]

    async def spawn(self, command: Sequence[str], *, tty: bool = False) -> ByteStream:
        """See `Sandbox`. Where the policy has left no room for a program, everything is killed to make some."""
        error = SandboxError("")
        for _ in range(2):
            if self._over_disk:
                async with self._lock:
                    if not await self._has_disk():
                        return Refusal(KILLED["disk"])
            self._check()
            began = self._container.started_again
            try:
                program = await Program.start(self._engine, self._container.id, self._container.folder, command, tty)
            except SandboxError as refused:
                error = refused
            else:
                if isinstance(program, Program):
                    program.why_ended, program.end = self._program_ended, self._end_program
                    self._programs = [other for other in self._programs if not other.over]
                    self._programs.append(program)
                    return program
                error = program
            async with self._lock:
                if not self._over_disk and self._container.started_again == began:
                    await self._make_room(error)
        raise await self._loss(error) from error

    async def close(self) -> None:
        """See `Sandbox`."""
        self.closed = True
        for program in self._programs:
            program.detach()
        await self._release()

    async def _file_command(self, script: str) -> ExecResult:
        """Run it in a subshell, out of reach of what commands have set, and with all of its output."""
        async with self._lock:
            for last in (False, True):  # twice: an earlier command may have left a shell that dies, or answers nobody
                if self._over_disk:
                    return ExecResult("", 137, killed_by="disk")
                result = await self._run(f"( {{ set +exuC; }} 2>/dev/null; {script} )", FILE_S, cap=None)
                if result.timed_out and last:
                    raise SandboxError(f"{self._container.name}: no file answer in {FILE_S:g} s, twice")
                if result.exit_code == 0:
                    break
            return result

    async def _run(self, command: str, timeout_s: float, cap: int | None = OUTPUT_CAP) -> ExecResult:
        """One command in the shell; one that has lost its connection while idle is found again in the same container."""
        self._check()
        if self._stream is not None and self._stream is self._container.stream and self._stream.ended:
            self._shell.forget()
            self._untold = True
        try:
            try:
                result = await self._shell.exec(command, timeout_s=timeout_s, cap=cap)
            except SandboxError:
                if not await self._died_of_memory():
                    raise
                await self._restart()  # for what a program used, or a command has left running
                self._untold = True
                result = await self._shell.exec(command, timeout_s=timeout_s, cap=cap)
        except SandboxError as error:
            raise await self._loss(error) from error
        self._stream = self._container.stream
        if self._untold and cap is not None:
            self._untold = False
            note = "\n[the connection was lost and made again: this command ran in a new shell, without variables]\n"
            result = dataclasses.replace(result, output=result.output + note)
        return result

    async def _call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """An idempotent engine call about this container."""
        try:
            return await self._engine.call(function, self._container.id, *arguments, again=True)
        except SandboxError as error:
            raise await self._loss(error) from error

    def _check(self) -> None:
        if self.closed:
            raise SandboxError(f"{self._container.name} is removed")
        if self._gone is not None:
            raise self._gone

    # --- why something ended -----------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        """Kill everything, for the next command to start anew; after the monitor has, that waits for the next command."""
        if self._over_disk:
            self._count_disk_kill()
        else:
            await self._restart()

    async def _has_disk(self) -> bool:
        """Start it again if the monitor has stopped it; not before the policy knows, and not after too many times."""
        if self._over_disk:
            told = self._disk_told  # or it was filled since the last command, by what that has left running
            self._count_disk_kill()
            if not told or self._disk_kills > DISK_KILLS:
                return False
            await self._restart()
        return True

    def _count_disk_kill(self) -> None:
        if not self._disk_told:
            self._disk_told = True
            self._disk_kills += 1

    @property
    def _over_disk(self) -> bool:
        return self._container.stopped == "disk"

    async def _make_room(self, error: SandboxError) -> None:
        """Kill everything after a program could not be started; raises if the container or the engine is lost."""
        try:
            lost = not await self._died_of_memory()
        except SandboxError:
            lost = True
        if lost and (loss := await self._loss(error)) is not error:
            raise loss from error
        await self._restart()
        self._untold = True

    async def _restart(self) -> None:
        self._shell.forget()
        self._untold = self._disk_told = False
        self._counters.clear()
        for program in self._programs:
            program.detach()
        try:
            await self._container.restart()
        except SandboxError as error:
            raise await self._loss(error) from error

    async def _why_ended(self) -> Limit:
        """The limit that ended the stream while a command ran, "" for the command itself. Raises if it was neither."""
        if self._over_disk:
            return "disk"
        if await self._container.supervisor_killed():
            return ""
        state = await self._state()
        if state is not None and state["OOMKilled"] and not state["Running"]:
            return "memory"
        raise self._named(state)

    async def _program_ended(self, program: Program) -> None:
        """See `Program.why_ended`. The kernel kills a program with a container, so its exit code may leave both open."""
        if self.closed or self._over_disk:
            return
        try:
            code = await self._engine.call(self._engine.exit_code, program.exec_id, again=True)
            if code not in (None, 128 + signal.SIGKILL):
                return
            state = await self._state()
            if program.over or self._over_disk:
                return
            if state is None or not state["Running"]:
                if state is None or not state["OOMKilled"]:
                    raise self._named(state)
            elif await self._engine.call(self._engine.exit_code, program.exec_id, again=True) is None:
                raise self._named(state)
        except SandboxError as error:
            raise await self._loss(error) from error

    async def _end_program(self, program: Program) -> None:
        """Kill a program's session, if it is not known to be dead; where that fails, it ends with the container."""
        if self.closed:
            return
        try:
            if await self._engine.call(self._engine.exit_code, program.exec_id, again=True) is None:
                command = ["bash", "-c", KILL_SESSION, program.pid]
                await self._engine.call(self._engine.run, self._container.id, command)
        except SandboxError as error:
            log.info("%s: a program is not ended before it: %s", self._container.name, error)

    async def _state(self) -> dict[str, Any] | None:
        return await self._engine.call(self._engine.state, self._container.id, again=True)

    async def _died_of_memory(self) -> bool:
        state = None if self.closed or self._gone is not None else await self._state()
        return state is not None and bool(state["OOMKilled"]) and not state["Running"]

    async def _loss(self, error: SandboxError) -> SandboxError:
        """What an error means for this container: lost, by a name, or just the error."""
        if self.closed or "lost" in error.message:
            return error
        try:
            state = await self._state()
        except SandboxError as silence:
            return SandboxError(
                f"{self._container.name} is lost: its engine {self._engine.name} does not answer: {silence.message}",
                hint="start the engine (with `live-restore` a restart keeps containers)",
            )
        return error if state is not None and state["Running"] else self._named(state)

    def _named(self, state: dict[str, Any] | None) -> SandboxError:
        if state is not None and state["Running"]:
            reason = "lost its connection while a command ran, which may or may not have taken effect"
            return SandboxError(f"{self._container.name} {reason}")
        how, hint = "removed from outside", ""
        if self._container.stopped == "deadline":
            how, hint = "removed at its deadline", "raise sandbox.deadline_s"
        elif state is not None:
            how = f"ended from outside, with code {state['ExitCode']}"
        self._gone = SandboxError(f"{self._container.name} is lost: it was {how}", hint=hint)
        return self._gone

    async def _explain(self, result: ExecResult) -> ExecResult:
        """With the limit that a failed command ran into; one that went well costs nothing."""
        if result.killed_by or result.timed_out or (result.exit_code == 0 and NO_FORK not in result.output):
            return result
        nonce = secrets.token_hex(16)
        answer = await self._run(Counters.script(nonce), FILE_S, cap=None)
        return dataclasses.replace(result, killed_by=self._counters.hit(nonce, answer.output))
