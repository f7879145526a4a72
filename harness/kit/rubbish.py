"""What a model may write by mistake: calls that a tool must survive, and replies that a verdict must."""

from __future__ import annotations

import json
import math
from typing import Any

TEXTS = (
    "",
    "\0",
    "../../../../etc/passwd",
    "'; DROP TABLE x; --",
    "$(exit 7)`false`",
    "\u00e9\u4e16\U0001f600\ud83d",
    "x" * 20_000,
)
VALUES: dict[str, tuple[Any, ...]] = {
    "string": TEXTS,
    "integer": (0, -1, 10**30),
    "number": (0, -1.5, 1e308, math.nan),
    "boolean": (True, False),
    "array": ([], [None], [[1], "x"]),
    "object": ({}, {"x": None}),
    "null": (None,),
}


def rubbish_calls(function: dict[str, Any]) -> list[str]:
    """Turns that call a tool badly: no JSON, no object, nothing, too much, wrong types, and right types with odd values."""
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    kinds = {key: _kind(schema) for key, schema in properties.items()}
    every = [
        *({key: VALUES[kind][i % len(VALUES[kind])] for key, kind in kinds.items()} for i in range(len(TEXTS))),
        {},
        {"no_such_argument": 1},
        dict.fromkeys(kinds),
        {key: 7 if kind == "string" else "seven" for key, kind in kinds.items()},
    ]
    texts = ["", "{", "[]", "null", *(json.dumps(arguments) for arguments in every)]
    unique = dict.fromkeys(texts)
    name = json.dumps(function["name"])
    return [f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>' for text in unique]


def _kind(schema: dict[str, Any]) -> str:
    kinds = [schema.get("type"), *(part.get("type") for part in schema.get("anyOf", ()))]
    return next((kind for kind in kinds if isinstance(kind, str) and kind in VALUES), "string")
