"""Qwen3-Coder:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

One line break on each side of a value belongs to the format. A value ends at a closing tag behind which the block goes on, so
that text with such tags in it survives unless it imitates the format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness.parsers.tagged import Tags, tagged
from harness.protocols import ToolCall

_TAGS = Tags(
    name=re.compile(r"\s*<function=([^>\n]+)>"),
    key=re.compile(r"\s*<parameter=([^>\n]+)>\n?"),
    value_end=re.compile(
        r"\n?(?:</parameter>(?=\s*(?:<parameter=|</function>|</?tool_call>|\Z))"
        r"|(?=</function>\s*(?:</?tool_call>|\Z))|(?=</tool_call>\s*(?:<tool_call>|\Z))|\Z)"
    ),
    end=re.compile(r"\s*(?:</function>\s*)?(?:</tool_call>|(?=<tool_call>)|\Z)"),
)


def qwen3_coder(text: str, turn: int, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls; an argument is a string unless its schema in `tools` forbids strings."""
    return tagged(_TAGS, text, turn, tools)
