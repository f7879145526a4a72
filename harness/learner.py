"""The trainer as the harness sees it: torchrun ranks that connect back and obey one JSON command at a time.

Flows in: names of commands and plain arguments (paths, numbers). Flows out: plain results. Rank 0 holds the connection; when it
closes, all ranks end, so a dead harness leaves no trainer behind.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from harness import processes
from harness.errors import ConfigError, LearnerError

LINE_LIMIT = 64 * 1024**2


class Learner:
    """One trainer of one or more ranks. Use `launch`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._lock = asyncio.Lock()
        self._broken = False

    @classmethod
    async def launch(cls, log: Path, *, ranks: int, threads: int, start_s: float) -> Learner:
        """Start torchrun and wait for rank 0 to connect. Raises `LearnerError` with the end of its log."""
        secret = secrets.token_urlsafe(24)
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            if line.decode(errors="replace").strip() == secret and not connected.done():
                connected.set_result((reader, writer))
            else:
                writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=LINE_LIMIT)
        port = server.sockets[0].getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
        command += [f"--log-dir={log.parent / 'torchrun'}"]  # or it leaves a folder where temporary files are
        command += [f"--nproc-per-node={ranks}", "-m", "trainer.worker"]
        env = {
            "SAO_LEARNER": f"127.0.0.1:{port}",
            "SAO_LEARNER_SECRET": secret,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        process = await processes.start(command, log, env)
        learner = cls(process, log)
        waiter = asyncio.ensure_future(process.wait())
        try:
            either: set[asyncio.Future[Any]] = {waiter, connected}
            await asyncio.wait(either, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise LearnerError(f"the trainer did not start:\n{processes.tail(log)}", hint=f"see {log}")
            learner._reader, learner._writer = connected.result()
        except BaseException:
            await processes.end(process, 0.0)
            raise
        finally:
            waiter.cancel()
            server.close()
        return learner

    @property
    def idle(self) -> bool:
        """True if no command is being answered and the process lives."""
        return not self._lock.locked() and not self._broken and self._process.returncode is None

    async def call(
        self, command: str, timeout_s: float = 3_600.0, *, begun: asyncio.Event | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Run one command on all ranks and return rank 0's result. Raises `LearnerError`, or `ConfigError` for bad input.

        One waits for the other; `begun` is set when this one's turn has come.
        """
        assert self._writer is not None
        async with self._lock:
            if self._broken:
                raise LearnerError(f"trainer `{command}`: an earlier command was not answered", hint=f"see {self._log}")
            if begun is not None:
                begun.set()
            try:
                self._writer.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
                await self._writer.drain()
                line = await asyncio.wait_for(self._reader.readline(), timeout_s)
            except (TimeoutError, OSError) as error:
                self._broken = True
                raise LearnerError(f"trainer `{command}`: {error!r}", hint=f"see {self._log}") from error
            except asyncio.CancelledError:
                self._broken = True
                raise
        if not line:
            self._broken = True
            raise LearnerError(f"the trainer died in `{command}`:\n{processes.tail(self._log)}", hint=f"see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = ConfigError if answer.get("user") else LearnerError
            raise kind(f"trainer `{command}`: {answer['error']}", hint=answer.get("hint") or f"see {self._log}")
        return answer

    async def close(self) -> None:
        """Close the connection and end all ranks."""
        if self._writer is not None:
            self._writer.close()
        await processes.end(self._process, 5.0)
