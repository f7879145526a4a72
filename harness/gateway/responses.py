"""OpenAI responses: `POST {url}/responses`, whole or as server-sent events; no state is kept between calls.

Flows in: instructions and input items. Flows out: chat messages for the session, and a reply as output items: reasoning,
message, function_call. One turn is several items; they are one assistant message again when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.gateway import chat_completions
from harness.gateway.shape import (
    Call,
    Stamp,
    bad,
    event,
    flag,
    function_tool,
    ignored_sampling,
    joined,
    objects,
    refuse,
    shows_tools,
    string,
    tool_call,
)
from harness.protocols import Message, Reply

OFFERED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "top_logprobs": (None, 0),
}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

error = chat_completions.error


def parse(body: dict[str, Any]) -> Call:
    """The call that a body asks for. Raises `Refusal`."""
    refuse(body, OFFERED)
    text = body.get("text") or {}
    if not isinstance(text, dict):
        raise bad("`text` is not an object")
    refuse(text, {"format": (None, {"type": "text"})})
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": string(body["instructions"], "`instructions`")})
    asked = body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else objects(asked, "`input`")
    if not items:
        raise bad("`input` is neither text nor a list of items")
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    tools = [_tool(raw) for raw in objects(body.get("tools"), "`tools`")]
    return Call(
        messages=messages,
        tools=tools if shows_tools(body.get("tool_choice")) else [],
        model=string(body.get("model") or "policy", "`model`"),
        stream=flag(body.get("stream"), "`stream`"),
        ignored_sampling=ignored_sampling(body),
    )


def _add(messages: list[Message], item: dict[str, Any], where: str) -> None:
    """Append an item; what the model said in one turn goes into one assistant message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        identity = string(item.get("call_id"), f"{where}: `call_id`")
        messages.append({"role": "tool", "tool_call_id": identity, "content": joined(item.get("output"), where, TEXTS)})
    elif kind == "function_call":
        arguments = string(item.get("arguments"), f"{where}: the arguments of a call")
        call = tool_call(item.get("call_id"), item.get("name"), arguments, where)
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = joined(item.get("content") or item.get("summary"), where, TEXTS)
        if thought:
            _turn(messages)["reasoning_content"] = thought
    elif kind == "message":
        role = chat_completions.ROLES.get(string(item.get("role"), f"{where}: the role"))
        if role not in ("system", "user", "assistant"):
            raise bad(f"{where}: no role {item['role']!r:.60}; there are: system, developer, user, assistant")
        text = joined(item.get("content"), where, TEXTS)
        if role != "assistant":
            messages.append({"role": role, "content": text})
        else:
            turn = _turn(messages)
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
    else:
        raise bad(f"{where}: an item of type {kind!r:.60}; there are: message, reasoning, function_call, function_call_output")


def _turn(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type") != "function":
        raise bad(f"a tool of type {raw.get('type')!r:.60}; functions are offered")
    return function_tool(raw, "parameters", "`tools`")


def answer(reply: Reply, call: Call, stamp: Stamp) -> dict[str, Any]:
    """The response."""
    cut = reply.finish_reason == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    return {
        **_begun(call, stamp),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply, stamp),
        "usage": usage,
    }


def _begun(call: Call, stamp: Stamp) -> dict[str, Any]:
    head = {"id": f"resp_{stamp.id}", "object": "response", "created_at": stamp.created, "model": call.model}
    state: dict[str, Any] = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
    return {**head, **state, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def _items(reply: Reply, stamp: Stamp) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{stamp.id}", "summary": [], "content": thought})
    if reply.content or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        items.append({"type": "message", "id": f"msg_{stamp.id}", "role": "assistant", "content": [part]})
    for i, c in enumerate(reply.tool_calls):
        call = {"call_id": c.id, "name": c.name, "arguments": c.arguments}
        items.append({"type": "function_call", "id": f"fc_{stamp.id}_{i}", **call})
    return [{**item, "status": "completed"} for item in items]


def events(reply: Reply, call: Call, stamp: Stamp) -> Iterator[bytes]:
    """The response as events, numbered: created, each item as it comes and is done, completed or incomplete."""
    for number, data in enumerate(_events(reply, call, stamp)):
        yield event({**data, "sequence_number": number}, data["type"])


def _events(reply: Reply, call: Call, stamp: Stamp) -> Iterator[dict[str, Any]]:
    done = answer(reply, call, stamp)
    for state in ("created", "in_progress"):
        yield {"type": f"response.{state}", "response": _begun(call, stamp)}
    for index, item in enumerate(done["output"]):
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, **empty, "status": "in_progress"},
        }
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **arguments}
        else:
            yield from _text(item["content"][0], at)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{done['status']}", "response": done}


def _text(part: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The one part of a message or a reasoning item."""
    at = {**at, "content_index": 0}
    more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **more}
    yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}
