"""What the terminal suites share: a terminal in a sandbox, and a model's patience with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agents.terminal import Terminal, TerminalResult
from harness.protocols import Sandbox
from tests.contracts.sandbox_support import COMMAND_S, play

LONG_S = 120.0
"""A no-change timeout that no command here reaches, also on a slow machine."""
SHORT_S = 0.5


def on_terminal(kind: str, story: Callable[[Terminal, Sandbox], Awaitable[None]], quiet_s: float = LONG_S) -> None:
    """Run a story in one terminal."""

    async def in_sandbox(sandbox: Sandbox) -> None:
        terminal = Terminal(sandbox, no_change_s=quiet_s)
        await story(terminal, sandbox)
        await terminal.close()
        await terminal.close()

    play(kind, in_sandbox)


async def says(terminal: Terminal, command: str, code: int = 0) -> str:
    """The output of a command that completes."""
    first = await terminal.run(command)
    if first.exit_code != -1:
        assert (first.is_error, first.timed_out, first.prefix) == (False, False, ""), first
    result = await until_over(terminal, first)  # a busy machine may take longer than the model's patience
    assert result.exit_code == code, result
    assert result.suffix == f"\n[The command completed with exit code {code}.]"
    return result.output


async def until_over(terminal: Terminal, result: TerminalResult) -> TerminalResult:
    """Wait on, as a model would, with all output so far."""
    output = result.output
    async with asyncio.timeout(COMMAND_S):
        while result.exit_code == -1:
            result = await terminal.run("")
            output += result.output
    return TerminalResult(output, result.exit_code, suffix=result.suffix)


async def until_started(terminal: Terminal, command: str) -> TerminalResult:
    """The first answer of a command that runs on, once it has said `begun`; a busy machine may take longer than that."""
    result = await terminal.run(command)
    async with asyncio.timeout(COMMAND_S):
        while "begun" not in result.output:
            assert result.exit_code == -1, result
            result = await terminal.run("")
    return result
