"""What the request shapes share: the call that comes out of a body, one clear refusal for what is wrong with it, events.

Flows in: the bytes of a request. Flows out: a `Call` in the session's own terms. A shape is a module with the functions of
`Shape`; all are pure, so that the same history converts to equal messages each time and the session sees it extended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from harness.protocols import Message, Reply

DEPTH = 64
"""Levels of nesting that a body may have."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "seed": (None,),
    "parallel_tool_calls": (None, True),
}
"""Settings that the session decides, with the values that ask for nothing else."""


class Refusal(Exception):
    """A request that gets an error: HTTP status, message for the client, and code."""

    def __init__(self, status: int, message: str, code: str = "error") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def bad(message: str) -> Refusal:
    """What the client can correct."""
    return Refusal(400, f"bad request: {message}", "bad_request")


@dataclass(frozen=True, slots=True)
class Call:
    """A model call as the session takes it, and how the client wants the answer."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    model: str
    stream: bool
    ignored_sampling: bool
    """The client asked for sampling that is not the session's."""
    include_usage: bool = False
    """Chat completions only: a last event with the usage."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What makes an answer one of its own: a random id, and its time in Unix seconds."""

    id: str
    created: int


class Shape(Protocol):
    """A client's language; each is a module of these functions."""

    def parse(self, body: dict[str, Any]) -> Call:
        """The call that a body asks for. Raises `Refusal`."""
        ...

    def answer(self, reply: Reply, call: Call, stamp: Stamp) -> dict[str, Any]:
        """The body of a good answer."""
        ...

    def events(self, reply: Reply, call: Call, stamp: Stamp) -> Iterator[bytes]:
        """The same as server-sent events."""
        ...

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        ...


def parse_json(text: str | bytes) -> Any:
    """Strict JSON of at most `DEPTH` levels. Raises `ValueError`."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        children = (child for v in level for child in (v.values() if isinstance(v, dict) else v))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise ValueError("nested too deeply")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def decode(raw: bytes) -> dict[str, Any]:
    """A request's body. Raises `Refusal`."""
    try:
        body = parse_json(raw)
    except ValueError as error:
        why = "nested too deeply" if "deeply" in str(error) else "not JSON"
        raise bad(f"the body is {why}") from None
    if not isinstance(body, dict):
        raise bad("the body is not a JSON object")
    return body


def string(value: Any, where: str) -> str:
    """`value`, if it is a string."""
    if not isinstance(value, str):
        raise bad(f"{where} is not a string")
    return value


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """`value`, if it is a list of objects; an absent one is empty."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad(f"{where} is not a list of objects")
    return value


def flag(value: Any, where: str) -> bool:
    """`value`, if it is true or false; an absent one is false."""
    if value is not None and not isinstance(value, bool):
        raise bad(f"{where} is not true or false")
    return bool(value)


def joined(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Text content: a string as it is, text parts joined by line ends, nothing as the empty string."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = objects(content, where)
    for part in parts:
        if part.get("type") not in kinds:
            raise bad(f"{where}: a part of type {part.get('type')!r:.60}; the policy reads text only")
    return "\n".join(string(part.get("text"), f"{where}: the text of a part") for part in parts)


def ignored_sampling(body: dict[str, Any]) -> bool:
    """True if a setting that the session decides is asked to be something else."""
    return any(body.get(name) not in neutral for name, neutral in NEUTRAL.items())


def refuse(body: dict[str, Any], offered: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for every setting that has another value than the offered ones: it cannot be honoured."""
    for name, values in offered.items():
        if body.get(name) not in values:
            raise bad(f"`{name}` cannot be honoured; leave it out")


def shows_tools(choice: Any) -> bool:
    """False if `tool_choice` is none: the model is then shown no tools. Raises where a call is to be forced."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise bad("`tool_choice` can be auto or none; a call cannot be forced")
    return kind != "none"


def function_tool(tool: dict[str, Any], schema: str, where: str) -> dict[str, Any]:
    """A tool definition with name, description and a JSON schema under `schema` as an OpenAI function tool."""
    function: dict[str, Any] = {"name": string(tool.get("name"), f"{where}: the name of a tool")}
    if tool.get("description") is not None:
        function["description"] = string(tool["description"], f"{where}: the description of a tool")
    function["parameters"] = tool.get(schema) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tool_call(identity: Any, name: Any, arguments: str, where: str) -> dict[str, Any]:
    """A tool call of an assistant message; arguments are JSON text."""
    function = {"name": string(name, f"{where}: the name of a call"), "arguments": arguments}
    return {"id": string(identity, f"{where}: the id of a call"), "type": "function", "function": function}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
