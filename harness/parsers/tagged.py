"""Calls whose arguments are tagged one by one, with strings written raw: the reader that Qwen3-Coder and GLM share."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.parsers.blocks import MALFORMED, scan, until_close
from harness.parsers.schema import argument_types, json_text
from harness.protocols import ToolCall


@dataclass(frozen=True, slots=True)
class Tags:
    """Patterns of a format. All but `value_end` are matched where the pattern before ended."""

    name: re.Pattern[str]
    """Behind `<tool_call>`; group 1 is the tool's name."""
    key: re.Pattern[str]
    """From one argument's end to the next one's value; group 1 is its key."""
    value_end: re.Pattern[str]
    """Searched from a value's start; found everywhere, at the latest at the end of the text, so that unclosed values end."""
    end: re.Pattern[str]
    """From the last argument to the end of the block."""


def tagged(tags: Tags, text: str, turn: int, tools: Sequence[dict[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls. A block with a name but with something else than arguments in it has its raw text as arguments."""

    types_of = functools.cache(lambda name: argument_types(tools, name))

    def read(text: str, position: int) -> tuple[str, str, int]:
        head = tags.name.match(text, position)
        if head is None:
            raw, end = until_close(text, position)
            return MALFORMED, raw.strip(), end
        name, at = head.group(1), head.end()
        types = types_of(name)
        arguments: dict[str, str] = {}
        while key := tags.key.match(text, at):
            value, at = _value(tags, text, key.end())
            arguments[key.group(1)] = json_text(value, types.get(key.group(1), set()))
        if close := tags.end.match(text, at):
            return name, "{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in arguments.items()) + "}", close.end()
        rest, end = until_close(text, at)
        return name, (text[head.end() : at] + rest).strip(), end

    return scan(text, turn, read)


def _value(tags: Tags, text: str, start: int) -> tuple[str, int]:
    found = tags.value_end.search(text, start)
    return (text[start : found.start()], found.end()) if found else (text[start:], len(text))
