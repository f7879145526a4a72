"""The tools of an MCP server as tools of an environment, through the official `mcp` package (`pip install sao-harness[mcp]`).

Flows in: a command, run on this machine or in the episode's sandbox, or the URL of a server (streamable HTTP). Flows out:
`McpTools`, whose `tools` an environment offers as its own. It is opened in `begin` and closed in the live task's `close`.
A command on this machine runs with this user's rights and a bare environment: for servers that you trust; what the agent can
misuse belongs into the sandbox. Text is shown to the model; images and sound are named, not shown.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from harness.errors import ConfigError, EnvironmentFault
from harness.protocols import Sandbox, Tool, ToolResult

CLOSE_S = 20.0
REFUSED = (-32602, -32601)
"""JSON-RPC codes of a call that the server does not take: the model's to read."""
TOO_LATE = -32001


class McpTools:
    """A connection to a server. `tools` are there once `connect` has returned."""

    def __init__(self, server: str) -> None:
        self.tools: tuple[Tool, ...] = ()
        self._server = server
        self._client: Any = None
        self._end = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, server: str | Sequence[str], *, sandbox: Sandbox | None = None, call_s: float = 60.0, start_s: float = 60.0
    ) -> McpTools:
        """Connect to a URL, or start a command (in `sandbox` if given). `call_s`, `start_s`: seconds of a call, of the start.

        Raises `ConfigError` if `mcp` is not installed or the program does not exist, `EnvironmentFault` if no server answers.
        """
        self = cls(server if isinstance(server, str) else server[0])
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport = _transport(server, sandbox)
        self._owner = asyncio.create_task(self._own(transport, call_s, ready))  # it enters and leaves what must be one task's
        try:
            async with asyncio.timeout(start_s):
                await asyncio.shield(ready)
        except FileNotFoundError as error:
            raise ConfigError(f"MCP server: there is no program {self._server!r}", hint="install it, or correct it") from error
        except BaseException as error:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=CLOSE_S)
            if isinstance(error, Exception):
                raise EnvironmentFault(f"MCP server {self._server} did not start: {_first(error)!r}") from error
            raise
        return self

    async def close(self) -> None:
        """Disconnect, and end a server that was started. Safe to call twice."""
        self._end.set()
        if self._owner is not None:
            await asyncio.wait({self._owner}, timeout=CLOSE_S)
            self._owner.cancel()

    async def _own(self, transport: Any, call_s: float, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        try:
            async with Client(transport, read_timeout_seconds=call_s) as client:
                self._client = client
                self.tools = tuple([self._tool(tool) async for tool in _listed(client)])
                ready.set_result(None)
                await self._end.wait()
        except Exception as error:  # noqa: BLE001 - told to whoever waits; a server that dies later is met by the next call
            if not ready.done():
                ready.set_exception(_first(error))

    def _tool(self, tool: Any) -> Tool:
        async def call(arguments: dict[str, Any]) -> ToolResult:
            return await self._call(tool.name, arguments)

        return Tool(re.sub(r"[^a-zA-Z0-9_-]", "_", tool.name), tool.description or tool.name, tool.input_schema, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError

        whole = json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))  # half surrogates break the pipe
        try:
            result = await self._client.call_tool(name, whole)
        except MCPError as error:
            if error.error.code in (*REFUSED, TOO_LATE):
                return ToolResult(f"error: {error.error.message}")
            raise EnvironmentFault(f"MCP server {self._server}: {name}: {error.error.message}") from error
        except TimeoutError:
            return ToolResult("error: the tool did not answer in time")
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        return ToolResult(f"error: {text}" if result.is_error else text)


def _transport(server: str | Sequence[str], sandbox: Sandbox | None) -> Any:
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise ConfigError("the package `mcp` is not installed", hint="pip install 'sao-harness[mcp]'") from error
    if isinstance(server, str):
        return server
    if sandbox is None:
        return StdioServerParameters(command=server[0], args=list(server[1:]))
    return _in_sandbox(sandbox, server)


async def _listed(client: Any) -> AsyncIterator[Any]:
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if not cursor:
            return


@asynccontextmanager
async def _in_sandbox(sandbox: Sandbox, command: Sequence[str]) -> AsyncIterator[tuple[Any, Any]]:
    """MCP's stdio over a program in the sandbox: one JSON message per line."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    stream = await sandbox.spawn(["sh", "-c", 'exec "$@" 2>/dev/null', "sh", *command])  # a stream holds stderr as well
    to_client, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_client = anyio.create_memory_object_stream[Any](0)

    async def receive() -> None:
        rest = b""
        async with to_client:
            while data := await stream.read():
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(bytes.strip, lines):
                    await to_client.send(SessionMessage(jsonrpc_message_adapter.validate_json(line)))

    async def send() -> None:
        async with from_client:
            async for message in from_client:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await stream.write(text.encode() + b"\n")

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            group.start_soon(send)
            yield from_server, to_server
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await stream.close()


def _first(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
