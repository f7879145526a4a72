"""Tool calls out of sampled text, one module per format. A malformed call stays a call, so that the agent answers it with its
own error.

Flows in: the text of one turn, without reasoning and stop token, and the request's tools. Flows out: what was said besides, and
the calls. No text makes a parser raise, and none takes more than linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.parsers.glm import glm
from harness.parsers.hermes import hermes
from harness.parsers.plain_json import plain_json
from harness.parsers.qwen3_coder import qwen3_coder
from harness.protocols import ToolCall

Parser = Callable[[str, int, Sequence[dict[str, Any]]], tuple[str, tuple[ToolCall, ...]]]
"""(text of a turn, turn number, tools of the request in the OpenAI shape) -> (content, calls)."""

PARSERS: dict[str, Parser] = {"hermes": hermes, "qwen3_coder": qwen3_coder, "glm": glm, "plain_json": plain_json}
"""The values of `rollout.tool_calls`."""

__all__ = ["PARSERS", "Parser", "glm", "hermes", "plain_json", "qwen3_coder"]
