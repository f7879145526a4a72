"""A typed function is a tool: its schema, its arguments checked, its answer; what no schema can say is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from harness.errors import ConfigError
from harness.protocols import ToolResult
from harness.tools import tool


class Place(BaseModel):
    x: int
    title: str = ""


async def search(
    text: str, most: Annotated[int, "how many"] = 5, where: Literal["here", "there"] = "here", at: Place | None = None
) -> dict[str, Any]:
    """Search for
    something.

    Args:
        text (str): what to look for,
            on one line
        where: which side: here or there

    Returns:
        what was found
    """
    return {"text": text, "most": most, "where": where, "at": at}


def answer(function: Callable[..., Any], **arguments: Any) -> str:
    return asyncio.run(tool(function).call(arguments)).content


def test_the_signature_is_the_schema() -> None:
    made = tool(search)
    assert (made.name, made.description) == ("search", "Search for something.")
    properties = made.parameters["properties"]
    assert properties["text"] == {"type": "string", "description": "what to look for, on one line"}
    assert properties["most"] == {"type": "integer", "description": "how many", "default": 5}
    assert properties["where"]["enum"] == ["here", "there"]
    assert properties["where"]["description"] == "which side: here or there"
    assert made.parameters["required"] == ["text"] and made.parameters["additionalProperties"] is False
    assert set(made.parameters["$defs"]["Place"]["properties"]) == {"x", "title"}
    assert set(made.parameters) == {"type", "properties", "required", "additionalProperties", "$defs"}, "no titles"


def test_arguments_arrive_as_their_types() -> None:
    assert answer(search, text="a", at={"x": 1}) == '{"text":"a","most":5,"where":"here","at":{"x":1,"title":""}}'

    def at(place: Place) -> str:
        """Say where."""
        return f"{type(place).__name__} {place.x}"

    assert answer(at, place={"x": 2}) == "Place 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "error: `text` is missing"),
        ({"text": "a", "n": 1}, "error: `n` is not an argument"),
        ({"text": 1}, "error: `text`: input should be a valid string"),
        ({"text": "a", "at": {"x": "far"}}, "error: `at.x`: input should be a valid integer"),
        ({"most": "x"}, "error: `text` is missing (and 1 more)"),
    ],
)
def test_a_bad_call_is_one_sentence_to_the_model(arguments: dict[str, Any], said: str) -> None:
    content = answer(search, **arguments)
    assert content.startswith(said) and "\n" not in content


@dataclass
class Found:
    count: int


@pytest.mark.parametrize(
    ("value", "content"),
    [("text", "text"), (None, "null"), (3, "3"), (Found(2), '{"count":2}'), ([Place(x=1)], '[{"x":1,"title":""}]')],
)
def test_what_it_returns_is_the_content(value: Any, content: str) -> None:
    def give() -> Any:
        """Give."""
        return value

    assert answer(give) == content


def test_a_tool_result_stays_one_and_what_is_raised_is_raised() -> None:
    class Box:
        def shut(self) -> ToolResult:
            """Shut it."""
            return ToolResult("shut", done=True)

        def jam(self) -> str:
            """Jam."""
            raise OSError("jammed")

    assert asyncio.run(tool(Box().shut).call({})) == ToolResult("shut", done=True)
    with pytest.raises(OSError, match="jammed"):
        answer(Box().jam)

    def give() -> object:
        """Give what is no JSON."""
        return object()

    with pytest.raises(TypeError, match="`give` returned what is no JSON"):
        answer(give)


def test_names_that_pydantic_uses_are_free() -> None:
    def odd(model_config: int, copy: int, _under: int = 0, schema: int = 0) -> int:
        """Sum."""
        return model_config + copy + _under + schema

    assert answer(odd, model_config=1, copy=2, _under=3, schema=4) == "10"


def no_type(x) -> str:  # type: ignore[no-untyped-def]
    """Say."""


def spread(*x: int) -> str:  # type: ignore[empty-body]
    """Say."""


def strange(x: asyncio.Lock) -> str:  # type: ignore[empty-body]
    """Say."""


def a_function(x: Callable[[], None]) -> str:  # type: ignore[empty-body]
    """Say."""


def unknown(x: Nowhere) -> str:  # type: ignore[empty-body, name-defined]  # noqa: F821
    """Say."""


def silent(x: int) -> str:  # type: ignore[empty-body]
    pass


def talks_of_another(x: int) -> str:  # type: ignore[empty-body]
    """Say.

    Args:
        y: nothing
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_type, "`x` without a type"),
        (spread, "takes `\\*x"),
        (strange, "no JSON schema"),
        (a_function, "no JSON schema"),
        (unknown, "cannot be read"),
        (silent, "no docstring"),
        (talks_of_another, "`y`, which is no argument"),
        (lambda: "", "no model can call"),
    ],
)
def test_what_says_too_little_is_refused_when_declared(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tool(function)
    assert caught.value.hint
