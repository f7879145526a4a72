"""The frame that Hermes, Qwen3-Coder and GLM share: `<tool_call>` blocks between the content of a turn."""

from __future__ import annotations

from collections.abc import Callable

from harness.protocols import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MALFORMED = "malformed"
"""Name of a call whose own name cannot be read; its arguments are the raw text."""


def scan(text: str, turn: int, read: Callable[[str, int], tuple[str, str, int]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a turn. `read(text, position behind <tool_call>)` gives (name, arguments, end of the block)."""
    content: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        name, arguments, position = read(text, start + len(OPEN))
        calls.append(ToolCall(f"call_{turn}_{len(calls)}", name, arguments))
    content.append(text[position:])
    return "".join(content).strip(), tuple(calls)


def until_close(text: str, position: int) -> tuple[str, int]:
    """The raw rest of a block that cannot be understood, up to the next `</tool_call>` or the end, and where the block ends."""
    end = text.find(CLOSE, position)
    return (text[position:], len(text)) if end < 0 else (text[position:end], end + len(CLOSE))
