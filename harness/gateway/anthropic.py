"""Anthropic messages: `POST {url}/v1/messages`, whole or as server-sent events.

Flows in: system, content blocks and tools with `input_schema`. Flows out: chat messages for the session, and a reply as
content blocks: thinking, text, tool_use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness.gateway.shape import (
    Call,
    Refusal,
    Stamp,
    bad,
    event,
    flag,
    function_tool,
    ignored_sampling,
    joined,
    objects,
    parse_json,
    refuse,
    shows_tools,
    string,
    tool_call,
)
from harness.protocols import Message, Reply, ToolCall

OFFERED: dict[str, tuple[Any, ...]] = {"stop_sequences": (None, []), "mcp_servers": (None, []), "container": (None,)}
MALFORMED = "malformed_arguments"
"""Key of a call's input where the model wrote no JSON object: its raw text, for the agent to refuse."""


def parse(body: dict[str, Any]) -> Call:
    """The call that a body asks for. Raises `Refusal`."""
    refuse(body, OFFERED)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise bad("`messages` is not a list of messages")
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": joined(body["system"], "`system`")})
    for i, raw in enumerate(objects(body["messages"], "`messages`")):
        messages += _messages(raw, f"messages[{i}]")
    tools = [_tool(raw) for raw in objects(body.get("tools"), "`tools`")]
    return Call(
        messages=messages,
        tools=tools if shows_tools(body.get("tool_choice")) else [],
        model=string(body.get("model") or "policy", "`model`"),
        stream=flag(body.get("stream"), "`stream`"),
        ignored_sampling=ignored_sampling(body),
    )


def _messages(raw: dict[str, Any], where: str) -> list[Message]:
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant"):
        raise bad(f"{where}: no role {role!r:.60}; there are: user, assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, f"{where}: content")
    return [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    """One message of all blocks: what was said, thought (where it is readable) and called."""
    said = [b for b in blocks if b.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    thought = [string(b.get("thinking"), f"{where}: thinking") for b in blocks if b.get("type") == "thinking"]
    message: Message = {"role": "assistant", "content": joined(said, where)}
    if any(thought):
        message["reasoning_content"] = "\n".join(thought)
    if used := [b for b in blocks if b.get("type") == "tool_use"]:
        message["tool_calls"] = [tool_call(b.get("id"), b.get("name"), _arguments(b.get("input"), where), where) for b in used]
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Tool results as tool messages, neighbouring texts as one user message, in the order of the blocks."""
    messages: list[Message] = []
    for block in blocks or [{"type": "text", "text": ""}]:
        if block.get("type") == "tool_result":
            identity = string(block.get("tool_use_id"), f"{where}: `tool_use_id`")
            messages.append({"role": "tool", "tool_call_id": identity, "content": joined(block.get("content"), where)})
            continue
        text = joined([block], where)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + text
        else:
            messages.append({"role": "user", "content": text})
    return messages


def _tool(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type") not in (None, "custom"):
        raise bad(f"a tool of type {raw['type']!r:.60}; the client's own tools are offered")
    return function_tool(raw, "input_schema", "`tools`")


def _arguments(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise bad(f"{where}: the input of a call is not an object")
    raw = value.get(MALFORMED)
    return raw if len(value) == 1 and isinstance(raw, str) else json.dumps(value)


def _input(call: ToolCall) -> dict[str, Any]:
    try:
        value = parse_json(call.arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {MALFORMED: call.arguments}


def answer(reply: Reply, call: Call, stamp: Stamp) -> dict[str, Any]:
    """The message."""
    return _message(call, stamp, _blocks(reply), _stop(reply), _usage(reply))


def _message(
    call: Call, stamp: Stamp, content: list[dict[str, Any]], stop: str | None, usage: dict[str, int]
) -> dict[str, Any]:
    head = {"id": f"msg_{stamp.id}", "type": "message", "role": "assistant", "model": call.model}
    return {**head, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c)} for c in reply.tool_calls]


def events(reply: Reply, call: Call, stamp: Stamp) -> Iterator[bytes]:
    """The message as events: start, each block's start, delta and stop, the reason of the end, stop."""
    usage = _usage(reply)
    yield _event("message_start", message=_message(call, stamp, [], None, {**usage, "output_tokens": 0}))
    for i, block in enumerate(_blocks(reply)):
        empty, delta = _delta(block)
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    yield _event("message_delta", delta={"stop_reason": _stop(reply), "stop_sequence": None}, usage=usage)
    yield _event("message_stop")


def _delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block before its content came, and the content."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _stop(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if reply.tool_calls else "end_turn"


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}


def error(refusal: Refusal) -> dict[str, Any]:
    """Anthropic's error body."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
