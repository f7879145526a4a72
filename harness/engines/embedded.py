"""Start the embedded torch engine as a process of its own and speak to it over HTTP like to any other engine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from harness import processes
from harness.engines.http import HttpEngine
from harness.errors import ConfigError, EngineError


class EmbeddedEngine(HttpEngine):
    """An `HttpEngine` that owns its server process."""

    def __init__(self, url: str, process: asyncio.subprocess.Process, log: Path, request_s: float) -> None:
        super().__init__(url, request_s=request_s)
        self._process, self._log = process, log

    @classmethod
    async def launch(
        cls,
        model: Path,
        log: Path,
        *,
        slots: int,
        max_len: int,
        version: int,
        threads: int,
        seed: int,
        start_s: float,
        noise: float = 0.0,
    ) -> EmbeddedEngine:
        """Start the server and wait until it answers with its port. Raises `EngineError` with the end of its log."""
        options = {"slots": slots, "max-len": max_len, "version": version, "threads": threads, "seed": seed, "noise": noise}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "trainer.engine.server", str(model), *flags]
        env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        process = await processes.start(command, log, env, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), start_s)
            answer = json.loads(line)
            if "error" in answer:
                raise ConfigError(f"the embedded engine: {answer['error']}", hint=answer["hint"])
            port = answer["port"]
        except (TimeoutError, ValueError, KeyError) as error:
            await processes.end(process, 0.0)
            raise EngineError(f"the embedded engine did not start:\n{processes.tail(log)}", hint=f"see {log}") from error
        except BaseException:
            await processes.end(process, 0.0)
            raise
        return cls(f"http://127.0.0.1:{port}", process, log, request_s=3_600.0)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    async def close(self) -> None:
        """Close the connections and end the process."""
        await super().close()
        await processes.end(self._process, 5.0)
