"""GLM-4.5 and GLM-4.6:

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

All between the value's tags is the value. It ends at a closing tag behind which the block goes on, so that text with such tags
in it survives unless it imitates the format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness.parsers.tagged import Tags, tagged
from harness.protocols import ToolCall

_TAGS = Tags(
    name=re.compile(r"\s*([\w.-]+)"),
    key=re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</?tool_call>|\Z))|\n?(?=</tool_call>\s*(?:<tool_call>|\Z))|\Z"),
    end=re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)"),
)


def glm(text: str, turn: int, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls; an argument is a string unless its schema in `tools` forbids strings."""
    return tagged(_TAGS, text, turn, tools)
