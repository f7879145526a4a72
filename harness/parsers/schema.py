"""The JSON types that tools give their arguments, for the formats that write strings raw and all else as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Never

_DEPTH = 4
"""References and alternatives are followed this far."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What templates that print Python values make of JSON's constants."""


def argument_types(tools: Sequence[dict[str, Any]], name: str) -> dict[str, set[str]]:
    """The JSON types of each argument of a tool; none for an argument whose schema does not say."""
    for tool in tools:
        function = _mapping(_mapping(tool).get("function"))
        if function.get("name") == name:
            schema = _mapping(function.get("parameters"))
            return {key: set(_types(value, schema, _DEPTH)) for key, value in _mapping(schema.get("properties")).items()}
    return {}


def json_text(value: str, types: set[str]) -> str:
    """A raw value as JSON text: itself if it is JSON and cannot be meant as a string, else a JSON string of it."""
    if types and "string" not in types:
        text = _PYTHON.get(value.strip(), value)
        try:
            json.loads(text, parse_constant=_refuse)
            return text
        except (ValueError, RecursionError):
            pass  # not JSON: the agent says what is wrong with it
    return json.dumps(value)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> list[str]:
    schema = _mapping(schema)
    declared = schema.get("type")
    found = [t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)]
    options = [o for key in ("anyOf", "oneOf", "allOf") for o in (schema.get(key) or ()) if isinstance(schema[key], list)]
    if isinstance(reference := schema.get("$ref"), str):
        options.append(_resolve(reference, root))
    return found + [t for option in options if depth for t in _types(option, root, depth - 1)]


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for part in reference.removeprefix("#/").split("/"):
        value = _mapping(value).get(part)
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    """Tools come from any agent: what is no object says nothing."""
    return value if isinstance(value, Mapping) else {}


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")
