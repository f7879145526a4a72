"""One call written as a JSON object, `{"name": ..., "arguments": {...}}`, sound or broken."""

from __future__ import annotations

import json
import re
from typing import Any

from harness.parsers.blocks import MALFORMED

_NAME = re.compile(r"""["']name["']\s*:\s*["']([\w.-]+)["']""")
_ARGUMENTS = re.compile(r"""["'](?:arguments|parameters)["']\s*:\s*""")


def call_of(value: Any, raw: str) -> tuple[str, str]:
    """(name, arguments) of a JSON value and its text. Arguments that are a string are passed on as they are.

    What JSON cannot say again (NaN, infinities, half surrogates that are no text) stays as it was written.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return MALFORMED, raw
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return salvage(raw) or (MALFORMED, raw)
    return name, text


def salvage(raw: str) -> tuple[str, str] | None:
    """(name, raw arguments) out of broken JSON; all of it as arguments where it has none; None if no name can be read."""
    name = _NAME.search(raw)
    if name is None:
        return None
    start = _ARGUMENTS.search(raw, name.end()) or _ARGUMENTS.search(raw)
    return name.group(1), _unwrapped(raw[start.end() :].strip()) if start else raw.strip()


def _unwrapped(text: str) -> str:
    """Arguments without the closing brace of the object around them, which may be missing."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        end = len(text)
    if text[end:].strip() == "}":
        return text[:end]
    outer = text.endswith("}") and text.count("}") > text.count("{")
    return text[:-1].rstrip() if outer else text
