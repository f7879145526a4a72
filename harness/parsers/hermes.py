"""Hermes and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

The last one of a turn may lack its closing tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from harness.parsers.blocks import MALFORMED, scan, until_close
from harness.parsers.json_call import call_of, salvage
from harness.protocols import ToolCall

_JSON = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+"|<(?!/?tool_call>))*+', re.DOTALL)
"""Up to the first tag outside a JSON string. Outside of strings JSON has no backslash: to stop there keeps the scan linear."""
_END = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")


def hermes(text: str, turn: int, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls. Tags inside JSON strings are text; `tools` are not needed, JSON says its types itself."""
    return scan(text, turn, _read)


def _read(text: str, position: int) -> tuple[str, str, int]:
    body = _JSON.match(text, position)
    close = _END.match(text, body.end()) if body else None
    if body and close:
        try:
            return *call_of(json.loads(body.group()), body.group().strip()), close.end()
        except (ValueError, RecursionError):
            pass  # broken JSON, below
    raw, end = until_close(text, position)
    return *(salvage(raw) or (MALFORMED, raw.strip())), end
