"""A real MCP server for the tests: `python mcp_server.py` speaks on stdio, with a port on streamable HTTP."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"kept {len(notes)}"


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it cannot be done")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
