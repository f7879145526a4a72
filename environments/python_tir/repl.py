"""A Python that lives as long as its episode: cells in, what the model is shown out.

The program in the sandbox (`repl_program.py`) keeps the cell's limit itself. Here it is started again when it does not
answer, has ended, or has answered what is no answer: all that is the doing of the code that ran in it. Only a lost sandbox is
an error, and a Python that does not start in a sandbox that nothing has touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import EnvironmentFault
from harness.protocols import ByteStream, Sandbox

START_S = 60.0
MARGIN_S = 30.0
"""Beyond the cell's limit and the program's own grace: a busy machine must not look like a dead program."""
LINE_MAX = 1 << 18
SHOWN_MAX = 10_000
"""Characters; the program keeps to fewer, unless a cell has forged its answer."""
PROGRAM = resources.files(__package__).joinpath("repl_program.py").read_text()


class CellEnd(BaseModel):
    """The program's answer to a cell."""

    model_config = ConfigDict(extra="forbid", strict=True)
    cell: int
    output: str
    end: Literal["ok", "error", "interrupted", "killed", "died"]
    why: str


class Lost(Exception):
    """The program is gone or no longer makes sense."""


class Repl:
    """See the module docstring. One cell at a time."""

    def __init__(self, sandbox: Sandbox, *, python: str = "python3", cell_s: float = 10.0) -> None:
        self._sandbox, self._python, self._cell_s = sandbox, python, cell_s
        self._stream: ByteStream | None = None
        self._pending = b""
        self._cells = 0
        self.restarts = 0
        """How often the state was lost."""

    async def start(self) -> None:
        """Start it in a fresh sandbox. Raises `EnvironmentFault` if there is no Python."""
        try:
            await self._open()
        except Lost as lost:
            raise EnvironmentFault(f"{self._python} does not start: {lost}") from lost

    async def run(self, code: str) -> str:
        """What the cell printed, and in brackets how it ended if not well. Raises `SandboxError`."""
        self._cells += 1
        try:
            if self._stream is None:
                await self._open()
            end = await self._ask(code)
        except Lost as lost:
            await self.close()
            self.restarts += 1
            with contextlib.suppress(Lost):  # the code may have removed Python; where the sandbox is lost, this raises
                await self._open()
            return f"[Python {lost}; state lost]"
        self.restarts += end.end in ("killed", "died")
        return shown(end, self._cell_s)

    async def close(self) -> None:
        """End it. Safe to call twice."""
        stream, self._stream, self._pending = self._stream, None, b""
        if stream is not None:
            await stream.close()

    async def _open(self) -> None:
        self._stream = await self._sandbox.spawn((self._python, "-I", "-c", PROGRAM))
        try:
            async with _within(START_S):
                first = await self._line()
            if first.strip() != b'{"ready": true}':
                raise Lost(f"said {first[:200].decode(errors='replace')!r}")
        except Lost:
            await self.close()
            raise

    async def _ask(self, code: str) -> CellEnd:
        assert self._stream is not None
        request = json.dumps({"cell": self._cells, "code": code, "seconds": self._cell_s}).encode()  # ASCII
        async with _within(self._cell_s + MARGIN_S):
            try:
                await self._stream.write(request + b"\n")
            except ConnectionError as error:
                raise Lost("has ended") from error
            while True:
                line = await self._line()
                try:
                    end = CellEnd.model_validate_json(line)
                except ValidationError as error:
                    raise Lost("answered nonsense") from error
                if end.cell == self._cells:
                    return end

    async def _line(self) -> bytes:
        assert self._stream is not None
        while b"\n" not in self._pending:
            if len(self._pending) > LINE_MAX:
                raise Lost("answered nonsense")
            data = await self._stream.read()
            if not data:
                raise Lost(f"has ended {self._pending[:500].decode(errors='replace')}".rstrip())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def shown(end: CellEnd, cell_s: float) -> str:
    """The tool's text."""
    notes = {
        "interrupted": f"[interrupted after {cell_s:g} s; state kept]",
        "killed": f"[killed: it did not stop when interrupted after {cell_s:g} s; state lost]",
        "died": f"[Python ended with {end.why}; state lost]",
    }
    text = "\n".join(filter(None, [end.output[:SHOWN_MAX].rstrip("\n"), notes.get(end.end, "")]))
    return text or "[no output]"


class _within:
    """A time limit whose passing is `Lost`."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *reason: object) -> None:
        try:
            await self._timeout.__aexit__(*reason)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise Lost("does not answer") from error
