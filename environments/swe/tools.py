"""The tools of agents that have none of their own: a bash in the sandbox, and the end of the work.

Flows in: a sandbox, and what of its output the model may see. Flows out: `Tool`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.protocols import Sandbox, Tool, ToolResult

_COMMAND = {"type": "string", "description": "what bash is to run"}
_BASH = {"type": "object", "properties": {"command": _COMMAND}, "required": ["command"], "additionalProperties": False}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def shell_tools(
    sandbox: Sandbox, *, command_s: float, output_chars: int, work: str = "the repository", before: str = ""
) -> Sequence[Tool]:
    """bash and submit. `before` is run before each command, in the same shell: a new shell has lost its variables."""

    async def bash(arguments: dict[str, Any]) -> ToolResult:
        result = await sandbox.exec(f"{before}{arguments['command']}", timeout_s=command_s)
        return ToolResult(f"{clip(result.output, output_chars)}\n[exit code {result.exit_code}]")

    async def submit(_: dict[str, Any]) -> ToolResult:
        return ToolResult("submitted", done=True)

    return (
        Tool(
            "bash",
            f"Run a command in a bash that keeps its folder and variables between calls; it has {command_s:g} seconds, no "
            "network and no input. Returns output and exit code.",
            _BASH,
            bash,
        ),
        Tool("submit", f"Hand in {work} as it is. Nothing can be changed afterwards.", _NOTHING, submit),
    )


def clip(text: str, limit: int) -> str:
    """Head and tail of a text, with the gap marked."""
    text = text.rstrip("\n")
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
