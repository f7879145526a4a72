"""The three shapes as pure functions: what a client sends becomes chat messages, and a reply comes back as it was given out."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.chat import Chat
from harness.gateway import anthropic, chat_completions, responses
from harness.gateway.shape import Call, Refusal, Shape, Stamp
from harness.protocols import Reply, ToolCall
from tests.support import PlayedEngine, session_of, tool_call

SHAPES: dict[str, Shape] = {"chat": chat_completions, "anthropic": anthropic, "responses": responses}
STAMP = Stamp("0123", 5)
CALL = Call(messages=[], tools=[], model="m", stream=False, ignored_sampling=False)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
U, A, T = "user", "assistant", "tool"


# --- a client of each shape: the history it keeps, and what it puts together from events -----------------------------


def first(name: str) -> dict[str, Any]:
    """An opening request with a system prompt and a tool."""
    user = {"role": U, "content": "go"}
    if name == "chat":
        return {"messages": [{"role": "system", "content": "sys"}, user], "tools": [FUNCTION]}
    if name == "anthropic":
        tool = {"name": "bash", "description": "Run.", "input_schema": SCHEMA}
        return {"system": "sys", "messages": [user], "tools": [tool], "max_tokens": 9}
    tool = {"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA, "strict": False}
    return {"instructions": "sys", "input": [user], "tools": [tool]}


def followed(name: str, body: dict[str, Any], answer: dict[str, Any], results: list[str], text: str = "") -> dict[str, Any]:
    """The next request: the answer echoed as it came, a result for each call, and text if any."""
    body = copy.deepcopy(body)
    user = [{"role": U, "content": text}] if text else []
    if name == "chat":
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        done = [{"role": T, "tool_call_id": c["id"], "content": r} for c, r in zip(calls, results, strict=True)]
        body["messages"] += [message, *done, *user]
    elif name == "anthropic":
        used = [block for block in answer["content"] if block["type"] == "tool_use"]
        done = [{"type": "tool_result", "tool_use_id": b["id"], "content": r} for b, r in zip(used, results, strict=True)]
        texts = [{"type": "text", "text": text}] if text else []
        body["messages"] += [{"role": A, "content": answer["content"]}, {"role": U, "content": done + texts}]
    else:
        used = [item for item in answer["output"] if item["type"] == "function_call"]
        outputs = zip(used, results, strict=True)
        done = [{"type": "function_call_output", "call_id": i["call_id"], "output": r} for i, r in outputs]
        body["input"] += [*answer["output"], *done, *user]
    return body


def assembled_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for choice in (event["choices"][0] for event in events if event["choices"]):
        delta = copy.deepcopy(choice["delta"])
        for part in delta.pop("tool_calls", []):
            index = part.pop("index")
            calls = message.setdefault("tool_calls", [])
            if index == len(calls):
                calls.append(part)
            else:
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
        for key, value in delta.items():
            message[key] = value if key == "role" else message.get(key, "") + value
        finish = choice["finish_reason"]
    head = {key: events[0][key] for key in ("id", "created", "model")}
    choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}]
    return {**head, "object": "chat.completion", "choices": choices, "usage": events[-1]["usage"]}


def assembled_anthropic(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for event in events:
        if event["type"] == "message_start":
            message = copy.deepcopy(event["message"])
            assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(copy.deepcopy(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert events[-1]["type"] == "message_stop"
    return message


def assembled_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(copy.deepcopy(event["item"]))
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(copy.deepcopy(event["part"]))
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            items[event["output_index"]]["status"] = "completed"
            assert items[event["output_index"]] == event["item"]
    return {**events[-1]["response"], "output": items}


ASSEMBLED: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "chat": assembled_chat,
    "anthropic": assembled_anthropic,
    "responses": assembled_responses,
}


def decoded(raw: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each checked for its form."""
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        *names, data = part.split("\n")
        if data == "data: [DONE]":
            assert part is parts[-1]
            continue
        event = json.loads(data.removeprefix("data: "))
        assert names == ([f"event: {event['type']}"] if "type" in event else [])
        events.append(event)
    return events


# --- properties ------------------------------------------------------------------------------------------------------

words = st.text(max_size=12)
objects = st.dictionaries(words, st.one_of(words, st.integers(), st.none(), st.lists(st.booleans(), max_size=2)), max_size=3)
arguments = st.one_of(objects.map(json.dumps), words, st.sampled_from(["{oops", "", "[1]", '{"a": NaN}', "[" * 5000, "null"]))
replies = st.builds(
    lambda content, calls, reasoning, finish: Reply(
        content, tuple(ToolCall(f"call_0_{i}", name, text) for i, (name, text) in enumerate(calls)), finish, reasoning, 11, 7
    ),
    words,
    st.lists(st.tuples(st.sampled_from(["bash", "malformed"]), arguments), max_size=3),
    words,
    st.sampled_from(["stop", "length"]),
)


@pytest.mark.parametrize("name", SHAPES)
@given(reply=replies)
def test_a_reply_comes_back_as_the_turn_it_was(name: str, reply: Reply) -> None:
    """Through JSON, as a client echoes it: one assistant message, the same words, calls, ids; the past stays equal."""
    shape, body = SHAPES[name], first(name)
    answer = json.loads(json.dumps(shape.answer(reply, CALL, STAMP)))
    after = shape.parse(followed(name, body, answer, ["r"] * len(reply.tool_calls), "more"))
    past = shape.parse(body).messages
    assert after.messages[: len(past)] == past
    echo, *rest = after.messages[len(past) :]
    said = reply.message()
    calls = said.pop("tool_calls", [])
    echoed = echo.pop("tool_calls", [])
    assert echo == said
    assert [(c["id"], c["function"]["name"]) for c in echoed] == [(c["id"], c["function"]["name"]) for c in calls]
    for was, now in zip(calls, echoed, strict=True):
        was, now = was["function"]["arguments"], now["function"]["arguments"]
        assert now == was or json.loads(now) == json.loads(was), "the same text, or the same object"
    results = [{"role": T, "tool_call_id": c["id"], "content": "r"} for c in calls]
    assert rest == [*results, {"role": U, "content": "more"}]


@pytest.mark.parametrize("name", SHAPES)
@given(reply=replies)
def test_events_add_up_to_the_answer(name: str, reply: Reply) -> None:
    shape = SHAPES[name]
    call = Call(messages=[], tools=[], model="m", stream=True, ignored_sampling=False, include_usage=True)
    events = decoded(b"".join(shape.events(reply, call, STAMP)))
    assert ASSEMBLED[name](events) == shape.answer(reply, call, STAMP)


@pytest.mark.parametrize("name", SHAPES)
def test_all_shapes_say_the_same_to_the_session(name: str) -> None:
    body = first(name)
    before = copy.deepcopy(body)
    call = SHAPES[name].parse(body)
    assert call.messages == [{"role": "system", "content": "sys"}, {"role": U, "content": "go"}]
    assert call.tools == [FUNCTION]
    assert (call.model, call.stream, call.ignored_sampling) == ("policy", False, False)
    assert SHAPES[name].parse({**body, "tool_choice": "none"}).tools == []
    assert SHAPES[name].parse({**body, "tool_choice": {"type": "auto"}}).tools == [FUNCTION]
    assert body == before, "parsing changes nothing"


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_with_tools_is_one_trajectory(chat: Chat, name: str) -> None:
    shape, body = SHAPES[name], first(name)
    turns = ["a" + tool_call("bash", '{"command":  "ls"}') * 2, tool_call("bash", "{oops"), "", "done"]
    session = session_of(chat, PlayedEngine(chat, turns))

    async def play(body: dict[str, Any]) -> Reply:
        for _ in turns:
            call = shape.parse(json.loads(json.dumps(body)))
            reply = await session.complete(call.messages, call.tools)
            again = shape.parse(json.loads(json.dumps(body)))
            assert await session.complete(again.messages, again.tools) is reply
            answer = shape.answer(reply, call, STAMP)
            body = followed(name, body, answer, ["r"] * len(reply.tool_calls), "" if reply.tool_calls else "go on")
        return reply

    assert asyncio.run(play(body)).content == "done"
    (t,) = session.trajectories("t", {})
    assert t.n_turns == len(turns)


# --- single facts ----------------------------------------------------------------------------------------------------


def test_chat_messages_keep_what_templates_read() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops", "extra": 1}, "index": 0}
    echo = {"role": A, "content": None, "tool_calls": [call], "refusal": None, "audio": None, "function_call": None}
    sent = [
        {"role": "developer", "content": parts, **mark},
        {"role": U, "content": "x", "name": "n"},
        {**echo, "reasoning_content": "hm", "provider_specific_fields": {}},
        {"role": T, "tool_call_id": "c", "content": parts, "name": "f"},
    ]
    assert chat_completions.parse({"messages": sent}).messages == [
        {"role": "system", "content": "a\nb"},
        {"role": U, "content": "x", "name": "n"},
        {
            "role": A,
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}],
        },
        {"role": T, "tool_call_id": "c", "content": "a\nb", "name": "f"},
    ]


def test_anthropic_blocks_keep_their_order() -> None:
    text, result = {"type": "text", "text": "t"}, {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    blocks = [result, {**result, "content": [text, text]}, text, text, {**result, "content": "r"}, text]
    sent = [{"role": U, "content": blocks}, {"role": U, "content": []}]
    assert anthropic.parse({"messages": sent, "system": [text, text]}).messages == [
        {"role": "system", "content": "t\nt"},
        {"role": T, "tool_call_id": "c", "content": ""},
        {"role": T, "tool_call_id": "c", "content": "t\nt"},
        {"role": U, "content": "t\nt"},
        {"role": T, "tool_call_id": "c", "content": "r"},
        {"role": U, "content": "t"},
        {"role": U, "content": ""},
    ]


def test_responses_take_plain_text() -> None:
    assert responses.parse({"input": "hi"}).messages == [{"role": U, "content": "hi"}]


def test_the_reason_of_the_end_and_usage() -> None:
    call = (ToolCall("c", "bash", "{}"),)
    for reply, chat_reason, anthropic_reason, status in (
        (Reply("x", (), "stop", "", 3, 4), "stop", "end_turn", "completed"),
        (Reply("x", call, "stop", "", 3, 4), "tool_calls", "tool_use", "completed"),
        (Reply("x", call, "length", "", 3, 4), "length", "max_tokens", "incomplete"),
    ):
        completion = chat_completions.answer(reply, CALL, STAMP)
        assert completion["choices"][0]["finish_reason"] == chat_reason
        assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        message = anthropic.answer(reply, CALL, STAMP)
        assert message["stop_reason"] == anthropic_reason
        assert message["usage"] == {"input_tokens": 3, "output_tokens": 4}
        response = responses.answer(reply, CALL, STAMP)
        assert response["status"] == status
        assert response["usage"]["total_tokens"] == 7


def test_usage_is_streamed_only_if_asked_for() -> None:
    reply = Reply("x", (), "stop", "", 3, 4)
    assert all("usage" not in event for event in decoded(b"".join(chat_completions.events(reply, CALL, STAMP))))
    asked = chat_completions.parse({**first("chat"), "stream": True, "stream_options": {"include_usage": True}})
    events = decoded(b"".join(chat_completions.events(reply, asked, STAMP)))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 7)


def _user(name: str, content: Any) -> dict[str, Any]:
    return {"input" if name == "responses" else "messages": [{"role": U, "content": content}]}


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:,"}},
    "anthropic": {"type": "image", "source": {}},
    "responses": {"type": "input_image", "image_url": "data:,"},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, _user(name, [part]), part["type"]) for name, part in IMAGES.items()),
    *((name, _user(name, [{"type": ["x"]}]), "reads text only") for name in SHAPES),
    *((name, _user(name, [{"type": "text", "text": 5}]), "not a string") for name in SHAPES),
    *((name, _user(name, 5), "not a list") for name in SHAPES),
    *((name, {**first(name), "model": 5}, "`model`") for name in SHAPES),
    *((name, {**first(name), "stream": 1}, "`stream`") for name in SHAPES),
    *((name, {**first(name), "tools": 5}, "`tools`") for name in SHAPES),
    *((name, {**first(name), "tools": [{"type": "web_search"}]}, "web_search") for name in SHAPES),
    *((name, {**first(name), "tool_choice": "required"}, "cannot be forced") for name in SHAPES),
    *((name, {**first(name), "tool_choice": {"type": "function", "name": "bash"}}, "cannot be forced") for name in SHAPES),
    ("chat", {**first("chat"), "tools": [{"type": "function", "function": {}}]}, "name of a tool"),
    ("chat", {**first("chat"), "n": 2}, "`n`"),
    ("chat", {**first("chat"), "logprobs": True}, "`logprobs`"),
    ("chat", {**first("chat"), "top_logprobs": 5}, "`top_logprobs`"),
    ("chat", {**first("chat"), "stop": ["\n"]}, "`stop`"),
    ("chat", {**first("chat"), "response_format": {"type": "json_object"}}, "`response_format`"),
    ("chat", {**first("chat"), "functions": [{"name": "f"}]}, "use `tools`"),
    ("chat", {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "'function'"),
    ("chat", {"messages": [{"role": A, "function_call": {"name": "f", "arguments": ""}}]}, "use `tool_calls`"),
    ("chat", {"messages": [{"role": T, "tool_call_id": 5, "content": ""}]}, "`tool_call_id`"),
    ("chat", {"messages": [{"role": A, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}]}, "arguments"),
    ("chat", {"messages": [{"role": A, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]}, "id of a call"),
    ("chat", {"messages": [{"role": A, "tool_calls": [{"id": "c", "function": {"arguments": ""}}]}]}, "name of a call"),
    ("chat", {"messages": [{"role": A, "reasoning_content": 5}]}, "`reasoning_content`"),
    ("anthropic", {"messages": []}, "`messages`"),
    ("anthropic", {"messages": [{"role": "system", "content": "x"}]}, "'system'"),
    ("anthropic", {**first("anthropic"), "stop_sequences": ["x"]}, "`stop_sequences`"),
    ("anthropic", {**first("anthropic"), "system": 5}, "`system`"),
    ("anthropic", {"messages": [{"role": U, "content": [{"type": "tool_result"}]}]}, "`tool_use_id`"),
    ("anthropic", {"messages": [{"role": A, "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]}, "input of a call"),
    ("anthropic", {"messages": [{"role": A, "content": [{"type": "thinking"}]}]}, "thinking"),
    ("anthropic", {"messages": [{"role": U, "content": [{"type": "tool_use", "id": "c"}]}]}, "tool_use"),
    ("responses", {"input": []}, "`input`"),
    ("responses", {"input": 5}, "`input`"),
    ("responses", {**first("responses"), "previous_response_id": "resp_1"}, "`previous_response_id`"),
    ("responses", {**first("responses"), "background": True}, "`background`"),
    ("responses", {**first("responses"), "text": {"format": {"type": "json_schema"}}}, "`format`"),
    ("responses", {**first("responses"), "text": 5}, "`text`"),
    ("responses", {**first("responses"), "instructions": 5}, "`instructions`"),
    ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
    ("responses", {"input": [{"role": T, "content": "x"}]}, "'tool'"),
    ("responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "id of a call"),
    ("responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "`call_id`"),
]


@pytest.mark.parametrize(("name", "body", "says"), REFUSED)
def test_what_cannot_be_honoured_is_named(name: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal) as caught:
        SHAPES[name].parse(body)
    assert caught.value.status == 400
    assert says in caught.value.message
    assert len(caught.value.message) < 250


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["type", "role", "content", "text"]), inner)
    ),
    max_leaves=8,
)
KEYS = ("messages", "input", "tools", "system", "instructions", "tool_choice", "stream", "stream_options", "text", "model", "n")


@pytest.mark.parametrize("name", SHAPES)
@given(body=st.dictionaries(st.sampled_from(KEYS), json_values))
def test_any_json_is_a_call_or_refused(name: str, body: dict[str, Any]) -> None:
    try:
        call = SHAPES[name].parse(body)
    except Refusal:
        return
    assert call.messages and all(isinstance(message["content"], str) for message in call.messages)
