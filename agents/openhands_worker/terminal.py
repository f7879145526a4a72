"""OpenHands' terminal tool with a terminal of the sandbox behind it: stock name, schema and observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openhands.sdk.tool import ToolExecutor, register_tool
from openhands.tools.terminal import TerminalTool
from openhands.tools.terminal.definition import (
    _LITERAL_ARG_HINT_TEMPLATE,
    TerminalAction,
    TerminalObservation,
    looks_like_python_literal_argument,
)
from openhands.tools.terminal.metadata import CmdOutputMetadata
from openhands.tools.terminal.utils import split_bash_commands

Ask = Callable[..., Any]
NAME = "sandbox_terminal"
_ONE_AT_A_TIME = (
    "Cannot execute multiple commands at once.\nPlease run each command separately OR chain them into a single "
    "command via && or ;\nProvided commands:\n"
)


class SandboxTerminal(TerminalTool):
    """The tool as the model sees it."""

    name = "terminal"

    @classmethod
    def create(cls, conv_state: Any, episode: str = "", **_: Any) -> Sequence[TerminalTool]:
        """For the episode of that id, which has registered how to ask in `ASK`."""
        made: Sequence[TerminalTool] = super().create(conv_state, executor=Executor(ASK[episode]))
        return made


class Executor(ToolExecutor[TerminalAction, TerminalObservation]):
    """Runs in a thread of its own; a command takes as long as the harness lets it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __call__(self, action: TerminalAction, conversation: Any = None) -> TerminalObservation:
        """One command."""
        if action.reset and action.is_input:
            raise ValueError("Cannot use reset=True with is_input=True")
        if not action.is_input and (kind := looks_like_python_literal_argument(action.command)):
            text = _LITERAL_ARG_HINT_TEMPLATE.format(literal_kind=kind, head=action.command.lstrip()[:60])
            return TerminalObservation.from_text(text=text, command=action.command, exit_code=None, is_error=True)
        if len(commands := split_bash_commands(action.command)) > 1:
            listed = "\n".join(f"({i + 1}) {command}" for i, command in enumerate(commands))
            return TerminalObservation.from_text(text=_ONE_AT_A_TIME + listed, command=action.command, is_error=True)
        result = self._ask(
            "terminal",
            command=action.command,
            is_input=action.is_input,
            timeout_s=action.timeout,
            reset=action.reset,
        )
        metadata = CmdOutputMetadata(
            exit_code=result["exit_code"],
            pid=result["pid"],
            username=result["username"] or None,
            hostname=result["hostname"] or None,
            working_dir=result["working_dir"] or None,
            py_interpreter_path=result["python"] or None,
            prefix=result["prefix"],
            suffix=result["suffix"],
        )
        return TerminalObservation.from_text(
            text=result["output"],
            command=action.command,
            metadata=metadata,
            exit_code=result["exit_code"],
            is_error=result["is_error"],
            timeout=result["timed_out"],
        )


ASK: dict[str, Ask] = {}
"""How the tools of each episode ask the harness. OpenHands' registry of tools is global, so the episode is a parameter."""

register_tool(NAME, SandboxTerminal)
