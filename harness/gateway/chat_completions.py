"""OpenAI chat completions: `POST {url}/chat/completions`, whole or as server-sent events.

Messages keep what a chat template reads (role, content as one string, reasoning_content, tool calls and their ids) and lose
the rest, such as cache marks that move from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.gateway.shape import (
    Call,
    Refusal,
    Stamp,
    bad,
    event,
    flag,
    ignored_sampling,
    joined,
    objects,
    refuse,
    shows_tools,
    string,
    tool_call,
)
from harness.protocols import Message, Reply

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OFFERED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "stop": (None, "", []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
}


def parse(body: dict[str, Any]) -> Call:
    """The call that a body asks for. Raises `Refusal`."""
    if body.get("functions") or body.get("function_call"):
        raise bad("`functions` and `function_call` are not offered; use `tools`")
    refuse(body, OFFERED)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise bad("`messages` is not a list of messages")
    messages = [_message(raw, f"messages[{i}]") for i, raw in enumerate(objects(body["messages"], "`messages`"))]
    tools = [_tool(raw) for raw in objects(body.get("tools"), "`tools`")]
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad("`stream_options` is not an object")
    return Call(
        messages=messages,
        tools=tools if shows_tools(body.get("tool_choice")) else [],
        model=string(body.get("model") or "policy", "`model`"),
        stream=flag(body.get("stream"), "`stream`"),
        ignored_sampling=ignored_sampling(body),
        include_usage=flag(options.get("include_usage"), "`include_usage`"),
    )


def _message(raw: dict[str, Any], where: str) -> Message:
    role = ROLES.get(string(raw.get("role"), f"{where}: the role"))
    if role is None:
        raise bad(f"{where}: no role {raw['role']!r:.60}; there are: {', '.join(ROLES)}")
    message: Message = {"role": role, "content": joined(raw.get("content"), where)}
    if raw.get("name") is not None:
        message["name"] = string(raw["name"], f"{where}: the name")
    if role == "tool" and raw.get("tool_call_id") is not None:
        message["tool_call_id"] = string(raw["tool_call_id"], f"{where}: `tool_call_id`")
    if role == "assistant":
        if raw.get("function_call"):
            raise bad(f"{where}: `function_call` is not offered; use `tool_calls`")
        if raw.get("reasoning_content"):
            message["reasoning_content"] = string(raw["reasoning_content"], f"{where}: `reasoning_content`")
        if calls := objects(raw.get("tool_calls"), f"{where}: `tool_calls`"):
            message["tool_calls"] = [_call(call, where) for call in calls]
    return message


def _call(raw: dict[str, Any], where: str) -> dict[str, Any]:
    function = raw.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}: a tool call without a function")
    arguments = string(function.get("arguments"), f"{where}: the arguments of a call")
    return tool_call(raw.get("id"), function.get("name"), arguments, where)


def _tool(raw: dict[str, Any]) -> dict[str, Any]:
    function = raw.get("function")
    if raw.get("type") != "function" or not isinstance(function, dict):
        raise bad(f"a tool of type {raw.get('type')!r:.60}; functions are offered")
    string(function.get("name"), "the name of a tool")
    return {"type": "function", "function": function}


def answer(reply: Reply, call: Call, stamp: Stamp) -> dict[str, Any]:
    """The chat completion."""
    choice = {"index": 0, "message": reply.message(), "logprobs": None, "finish_reason": _finish(reply)}
    return {**_head(call, stamp, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, call: Call, stamp: Stamp) -> Iterator[bytes]:
    """The chat completion in chunks: role, reasoning, content, tool calls, the reason of the end, usage if asked for."""
    head = _head(call, stamp, "chat.completion.chunk") | ({"usage": None} if call.include_usage else {})
    for delta in _deltas(reply):
        yield event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(reply)}]})
    if call.include_usage:
        yield event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for i, call in enumerate(reply.tool_calls):
        function = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": i, "id": call.id, "type": "function", "function": function}]}
        yield {"tool_calls": [{"index": i, "function": {"arguments": call.arguments}}]}


def _head(call: Call, stamp: Stamp, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{stamp.id}", "object": kind, "created": stamp.created, "model": call.model}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error body."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}


def models() -> dict[str, Any]:
    """`GET {url}/models`: the policy, whatever name a client calls it by."""
    return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "sao"}]}
