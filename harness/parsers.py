"""Tool calls out of sampled text. A malformed call stays a call, so that the agent answers it with an error the model can
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from harness.protocols import ToolCall

Parser = Callable[[str, int], tuple[str, tuple[ToolCall, ...]]]
"""(text of a turn, turn number) -> (content, calls)."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str, turn: int) -> tuple[str, tuple[ToolCall, ...]]:
    """Hermes and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    What is not JSON, or JSON without a name, becomes a call named `malformed` whose arguments are the raw text.
    """
    calls = []
    for number, match in enumerate(_HERMES.finditer(text)):
        raw = match.group(1).strip()
        identity = f"call_{turn}_{number}"
        try:
            value = json.loads(raw)
            arguments = value.get("arguments", {})
            name = value["name"]
            if not isinstance(name, str):
                raise TypeError("name")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            calls.append(ToolCall(identity, "malformed", raw))
            continue
        calls.append(ToolCall(identity, name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return _HERMES.sub("", text).strip(), tuple(calls)


PARSERS: dict[str, Parser] = {"hermes": hermes}
