"""Plain JSON, as Llama 3.1 writes it: the answer ends with `{"name": ..., "arguments": {...}}` (or "parameters"), or with an
array of such objects, perhaps in a fenced block. What stands before is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from harness.parsers.json_call import call_of, salvage
from harness.protocols import ToolCall

_START = re.compile(r'(?:\[\s*)?\{\s*"(?:name|arguments|parameters|type|id)"\s*:')
_FENCE = re.compile(r"```(?:json)?\s*\Z")
_KEYS = {"arguments", "parameters"}
_DECODER = json.JSONDecoder()


def plain_json(text: str, turn: int, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls. What starts like a call and is broken JSON from there on stays a call; `tools` are not needed."""
    body = text.rstrip()
    if body.endswith("```"):
        body = body[:-3].rstrip()
    position = 0
    while start := _START.search(body, position):
        try:
            value, position = _DECODER.raw_decode(body, start.start())
            calls = _calls(value, body[start.start() :]) if position == len(body) else []
        except (ValueError, RecursionError):
            raw = body[start.start() :]
            broken = salvage(raw) if any(f'"{key}"' in raw for key in _KEYS) else None
            calls, position = [broken] if broken else [], len(body)
        if calls:
            made = tuple(ToolCall(f"call_{turn}_{n}", *call) for n, call in enumerate(calls))
            return _FENCE.sub("", body[: start.start()]).strip(), made
    return text.strip(), ()


def _calls(value: Any, raw: str) -> list[tuple[str, str]]:
    """The calls of a JSON value, none if nothing in it is one."""
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(v, dict) and isinstance(v.get("name"), str) and v.keys() & _KEYS for v in values):
        return []
    return [call_of(v, json.dumps(v) if isinstance(value, list) else raw) for v in values]
