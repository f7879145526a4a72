"""The tools of a real MCP server: on this machine, in a sandbox, over HTTP; bad calls, and a server that dies."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import ConfigError, EnvironmentFault
from harness.kit.leaks import holdings, left_since
from harness.mcp_tools import McpTools
from harness.protocols import Sandbox
from tests.contracts.sandbox_support import TASK, started

pytest.importorskip("mcp")

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
NAMES = ["note", "add", "fail", "die"]


@pytest.fixture(autouse=True)
def _own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs put into the machine's folder is no leak."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def use(server: str | Sequence[str], sandbox: Sandbox | None = None) -> None:
    """What any way to reach the server must do."""
    before = holdings()
    mcp = await McpTools.connect(server, sandbox=sandbox)
    try:
        tools = {tool.name: tool for tool in mcp.tools}
        assert list(tools) == NAMES
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].parameters["required"] == ["a", "b"]
        assert (await tools["add"].call({"a": 2, "b": 3})).content == "5"
        assert [(await tools["note"].call({"text": text})).content for text in ("\ud83d", "\n\0")] == ["kept 1", "kept 2"]
        for name, arguments in (("add", {"a": "x"}), ("fail", {})):
            assert (await tools[name].call(arguments)).content.startswith("error: ")
    finally:
        await mcp.close()
        await mcp.close()
    assert await left_since(before) == []


def test_a_command_on_this_machine() -> None:
    asyncio.run(use(SERVER))


def test_a_command_in_the_sandbox() -> None:
    async def main() -> None:
        async with started("process") as provider:
            sandbox = await provider.acquire(TASK)
            await use(SERVER, sandbox)
            await sandbox.close()

    asyncio.run(main())


def test_a_url() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("running on" in line for line in process.stderr), "uvicorn says when it listens"
        asyncio.run(use(f"http://127.0.0.1:{port}/mcp"))
    finally:
        process.kill()
        process.communicate(timeout=10.0)


def test_a_server_that_dies_is_no_fault_of_the_policy() -> None:
    async def main() -> None:
        mcp = await McpTools.connect(SERVER)
        with pytest.raises(EnvironmentFault, match="closed"):
            await {tool.name: tool for tool in mcp.tools}["die"].call({})
        await mcp.close()

    asyncio.run(main())


def test_what_cannot_start_says_so() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="no program 'no-such-server'"):
            await McpTools.connect(["no-such-server"])
        with pytest.raises(EnvironmentFault, match="did not start"):
            await McpTools.connect([sys.executable, "-c", "raise SystemExit(3)"])

    asyncio.run(main())


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        asyncio.run(McpTools.connect(SERVER))
    assert "sao-harness[mcp]" in caught.value.hint
