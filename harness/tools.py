"""A typed function as a tool of the model: its signature is the schema, its docstring the description.

Flows in: a function or a bound method, plain or `async`, every argument annotated, with a docstring. Flows out: a `Tool`.
Arguments are described by a Google-style "Args:" part or by `Annotated[int, "text"]`, and checked by pydantic before the
function runs: a bad call is answered to the model with one sentence. What the function returns is the content: text as it
is, a `ToolResult` as it is, anything else as JSON. What it raises is a fault of the environment, never of the policy.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from harness.errors import ConfigError
from harness.protocols import Tool, ToolResult

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_ARGS = re.compile(r"^[ \t]*(?:Args|Arguments):[ \t]*$", re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*(?:Returns|Raises|Yields|Examples?|Notes?):", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)")

turn_of_episode: ContextVar[Callable[[], int]] = ContextVar("turn_of_episode")
"""Set by the harness for each episode: the index of the model's latest turn."""


def current_turn() -> int:
    """The turn (from 0) of the model that this tool call belongs to: the key of `Score.turn_rewards`. In a tool call only."""
    return turn_of_episode.get()()


def tool(function: Callable[..., Any]) -> Tool:
    """The tool that a function is. Raises `ConfigError` if its declaration says too little or what no schema can say."""
    name = function.__name__
    if not NAME.fullmatch(name):
        raise _wrong(name, "has a name that no model can call", "define it with `def` under a plain name")
    described, texts = _docstring(name, function)
    arguments = _arguments(name, function, texts)

    async def call(given: dict[str, Any]) -> ToolResult:
        try:
            valid = arguments.model_validate(given)
        except ValidationError as error:
            return ToolResult(f"error: {_sentence(error)}")
        fields = type(valid).model_fields
        result = function(**{str(field.alias): getattr(valid, key) for key, field in fields.items()})
        return _result(name, await result if inspect.isawaitable(result) else result)

    return Tool(name, described, _schema(name, arguments), call)


def _arguments(name: str, function: Callable[..., Any], texts: dict[str, str]) -> type[BaseModel]:
    """A model with one field per argument, each under a name of its own, so that no argument can be in pydantic's way."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # names that do not exist, and whatever evaluating an annotation can raise
        raise _wrong(name, f"has an annotation that cannot be read: {error}", "import the type at module level") from error
    fields: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _wrong(name, f"takes `{parameter}`", "give every argument a name of its own")
        if key not in hints:
            raise _wrong(name, f"has an argument `{key}` without a type", f"write `{key}: str`, or another type")
        text = next((m for m in getattr(hints[key], "__metadata__", ()) if isinstance(m, str)), texts.get(key))
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{len(fields)}"] = (Annotated[hints[key], Field(alias=key, description=text)], default)
    for unknown in texts.keys() - parameters.keys():
        raise _wrong(name, f"describes `{unknown}`, which is no argument", "correct the Args part of its docstring")
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise _unfit(name, error) from error


def _schema(name: str, arguments: type[BaseModel]) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = _plain(arguments.model_json_schema())
    except PydanticUserError as error:
        raise _unfit(name, error) from error
    schema.pop("description", None)
    schema.setdefault("properties", {})
    return schema


def _plain(schema: Any) -> Any:
    """Without the titles that pydantic adds, which cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _plain(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def _docstring(name: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(description, text by argument)."""
    text = inspect.getdoc(function) or ""
    head, *rest = _ARGS.split(text, maxsplit=1)
    described = " ".join(_SECTION.split(head, maxsplit=1)[0].split())
    if not described:
        raise _wrong(name, "has no docstring", "say in one sentence what it does: the model reads it")
    texts: dict[str, str] = {}
    key, indent = "", None
    for line in _SECTION.split(rest[0], maxsplit=1)[0].splitlines() if rest else ():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        found = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if found:
            key, texts[found[1]] = found[1], found[2]
        elif key:
            texts[key] = f"{texts[key]} {line.strip()}".strip()
    return described, texts


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return f"`{path}` is missing{more}"
    if first["type"] == "extra_forbidden":
        return f"`{path}` is not an argument{more}"
    said = f"`{path}`: " if path else ""
    return f"{said}{first['msg'][:1].lower()}{first['msg'][1:]}{more}"


def _result(name: str, value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(to_json(value).decode())
    except PydanticSerializationError as error:
        raise TypeError(f"tool `{name}` returned what is no JSON: {error}") from error


def _unfit(name: str, error: Exception) -> ConfigError:
    first = str(error).split("\n", 1)[0]
    return _wrong(name, f"has a type that has no JSON schema: {first}", "use str, int, float, bool, list, Literal or a model")


def _wrong(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"tool `{name}` {what}", hint=hint)
