"""What a setting accepts, in words, for the hint of a bad value.

Flows in: a pydantic model and where in it the value stands. Flows out: `one of "a", "b"`, `a whole number (at least 1)`,
.., from the model's JSON schema; empty where that cannot be said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, PydanticUserError

TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false", "object": "a table"}
BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "pattern": "matches {}",
}


def accepts(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    """What stands at `loc` (a pydantic error's) in the input of `model`."""
    try:
        schema: Any = model.model_json_schema()
    except PydanticUserError:  # a type that JSON Schema does not know
        return ""
    definitions = schema.get("$defs", {})
    here = [schema]
    for part in loc:
        below = [found for each in here if (found := _below(each, part, definitions)) is not None]
        if not below:  # the rest of the place names a member of a union
            break
        here = below
    return _either([_said(each, definitions) for each in here])


def _below(schema: dict[str, Any], part: int | str, definitions: dict[str, Any]) -> dict[str, Any] | None:
    for each in _branches(schema, definitions):
        if isinstance(part, int):
            items = each.get("prefixItems", [])
            found = items[part] if part < len(items) else each.get("items")
        else:
            found = each.get("properties", {}).get(part, each.get("additionalProperties"))
        if isinstance(found, dict):
            return found
    return None


def _branches(schema: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in schema:
        return _branches(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return [branch for each in schema["anyOf"] for branch in _branches(each, definitions)]
    return [schema]


def _said(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    return _either([_plain(each, definitions) for each in _branches(schema, definitions)])


def _plain(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return ("one of " if len(values) > 1 else "") + ", ".join(json.dumps(value, ensure_ascii=False) for value in values)
    inner: set[str] = set()
    bounds = ", ".join(text.format(schema[key]) for key, text in BOUNDS.items() if key in schema)
    what = TYPES.get(schema.get("type", ""), "")
    if schema.get("type") == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        what, bounds = (f"a list of {len(items)}", "") if "prefixItems" in schema else ("a list", bounds)
        inner = {_said(each, definitions) for each in items}
    return what + (f" ({bounds})" if bounds else "") + (f", each {inner.pop()}" if len(inner) == 1 and "" not in inner else "")


def _either(said: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(filter(None, said)))
