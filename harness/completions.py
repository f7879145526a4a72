"""The words of a chat-completions endpoint as we read and write them: pure functions over OpenAI's JSON and its dialects.

Flows in: the text of an answer or an error, messages on their way out. Flows out: a `Reply`, an error's own words, messages
that every endpoint takes.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from harness.gateway.shape import parse_json
from harness.protocols import FinishReason, Message, Reply, ToolCall

SHOWN = 500
"""Characters of an endpoint's own words."""


def reply_of(text: str, turn: int) -> Reply:
    """The reply in a chat completion. Raises `ValueError` for what is none. Arguments of a call stay as they were written."""
    try:
        answer = parse_json(text)
        choice = answer["choices"][0]
        message = choice["message"]
        calls = tuple(_call(call, f"call_{turn}_{i}") for i, call in enumerate(message.get("tool_calls") or ()))
        prompt, completion = _usage(answer.get("usage") or {})
        finish: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
        return Reply(_text(message.get("content")), calls, finish, reasoning, prompt, completion)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion ({type(error).__name__}: {error}): {text[:SHOWN]}") from None


def _call(call: Any, name: str) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, dict):  # not OpenAI's form, but seen
        arguments = json.dumps(arguments or {})
    if not isinstance(function["name"], str):
        raise TypeError("the name of a tool call is not text")
    return ToolCall(_text(call.get("id")) or name, _text(function["name"]), _text(arguments))


def _text(value: Any) -> str:
    """Text, none as empty; half surrogates, which are none, as question marks."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    return value.encode(errors="replace").decode()


def _usage(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of all that was sampled, thoughts included; 0 for what is not counted."""
    prompt = int(usage.get("prompt_tokens") or 0)
    total = int(usage.get("total_tokens") or prompt + int(usage.get("completion_tokens") or 0))
    return prompt, total - prompt


def sendable(message: Message) -> Message:
    """A message as every endpoint takes it: some read the arguments of earlier calls, and refuse what is no JSON object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            sound = isinstance(parse_json(function["arguments"]), dict)
        except ValueError:
            sound = False
        if not sound:
            function = {**function, "arguments": json.dumps({"": function["arguments"]})}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def words_of(text: str) -> tuple[str, str]:
    """An error's own words and its code, in whatever form it comes."""
    try:
        error = parse_json(text)
        error = error.get("error", error)
        return (error, "") if isinstance(error, str) else (str(error["message"]), str(error.get("code")))
    except (ValueError, LookupError, TypeError, AttributeError):
        return text, ""


def seconds(after: str) -> float:
    """A `Retry-After`: seconds or a date."""
    try:
        return float(after)
    except ValueError:
        pass
    try:
        return (parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
