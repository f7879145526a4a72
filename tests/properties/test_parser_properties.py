"""What a chat template writes, its parser reads: calls through template, tokens and back; and no text makes a parser raise."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.chat import Chat
from harness.parsers import PARSERS

TEMPLATES = Path(__file__).parents[1] / "unit" / "data" / "templates"
TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "option": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "flag": {"type": "boolean"},
    "list": {"$ref": "#/$defs/List"},
    "map": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
NAMES = ("terminal", "file_editor")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": TYPES, "$defs": {"List": {"type": "array"}}},
        },
    }
    for name in NAMES
]
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=terminal>", "</function>", "<parameter=text>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "terminal", "arguments": {"text": ', '"arguments"', "{", "}",
    "[", "]", "\\ud800", '"', "'", "\\", "\\u", ",", ":", "\n", "\r\n", " ", "\t", "\0", "```", "```json\n",
    "<|im_end|>", "<|im_start|>", "{{ x }}", "terminal", "text", "null", "None", "True", "NaN", "1e400",
    "-0", "5", "\u2028", "é", "🙂", "\u202e", "</think>", "&lt;",
)  # fmt: skip
wild = st.lists(st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=8).map(
    "".join
)
"""Text that looks like all of the formats."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | wild,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(wild, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": wild,
        "option": wild,
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.none(),
        "flag": st.booleans(),
        "list": st.lists(json_values, max_size=3),
        "map": st.dictionaries(wild, json_values, max_size=3) | st.none(),
        "unknown": wild,
    },
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
contents = st.sampled_from(["", "I look.", "Zuerst: sieh\nnach\n\n- {x}: [1]", "🙂 </tool_call> <|im_start|>"])

IMITATES = {
    "qwen3_coder": re.compile(
        r"</parameter>\s*(?:<parameter=|</function>|</?tool_call>|\Z)"
        r"|</function>\s*(?:</?tool_call>|\Z)|</tool_call>\s*(?:<tool_call>|\Z)"
    ),
    "glm": re.compile(r"</arg_value>\s*(?:<arg_key>|</?tool_call>|\Z)|</tool_call>\s*(?:<tool_call>|\Z)"),
}
"""Values that the format cannot carry: raw text, followed by the value's own end, that reads like the end of a value."""
OWN_END = {"qwen3_coder": "\n</parameter>\n<parameter=", "glm": "</arg_value>\n<arg_key>"}


@pytest.fixture(scope="module", params=sorted(PARSERS))
def form(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Chat]:
    """A format's name and a model that writes it."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(model_folder / "tokenizer.json", folder)
    shutil.copy(TEMPLATES / f"{request.param}.jinja", folder / "chat_template.jinja")
    return request.param, Chat(folder, ["<|im_end|>"])


def written(chat: Chat, content: str, made: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of a turn as the policy would sample it."""
    functions = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in made]
    turn = {"role": "assistant", "content": content, "tool_calls": functions}
    return chat.text_of(chat.answer([{"role": "user", "content": "go"}], turn, TOOLS))


def carried(name: str, value: Any) -> bool:
    """True if the format can hold the value of an argument."""
    if name not in IMITATES:
        return True
    raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return IMITATES[name].search(raw + OWN_END[name], 0, len(raw) + len(OWN_END[name]) - 1) is None


@given(made=calls, content=contents)
def test_calls_come_back(form: tuple[str, Chat], made: list[tuple[str, dict[str, Any]]], content: str) -> None:
    """Names, order, number, values and types; the content too."""
    name, chat = form
    assume(all(carried(name, value) for _, values in made for value in values.values()))
    said, found = PARSERS[name](written(chat, content, made), 7, TOOLS)
    assert [(c.name, json.loads(c.arguments)) for c in found] == made
    assert repr([json.loads(c.arguments) for c in found]) == repr([values for _, values in made]), "1, 1.0 and True are equal"
    assert [c.id for c in found] == [f"call_7_{n}" for n in range(len(made))]
    assert said == content


@given(made=calls)
def test_what_a_format_cannot_carry_is_still_a_call(form: tuple[str, Chat], made: list[tuple[str, dict[str, Any]]]) -> None:
    """Whatever the values: no call is lost, though its arguments may be cut and text may look like more calls."""
    name, chat = form
    _, found = PARSERS[name](written(chat, "", made), 0, TOOLS)
    names = iter(c.name for c in found)
    assert all(wanted in names for wanted, _ in made), "a subsequence"


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join) | st.text(max_size=200))
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    """Half surrogates, NUL, anything. A turn with an opening tag has a call; calls of a text can be sent as text."""
    content, found = PARSERS[name](text, 0, TOOLS)
    assert len(content) <= len(text)
    if name != "plain_json":
        assert bool(found) == ("<tool_call>" in text)
    half = re.compile("[\ud800-\udfff]")
    assert half.search(text) or not any(half.search(c.name + c.arguments) for c in found)


@given(data=st.data())
def test_tools_of_any_shape_are_only_no_help(data: st.DataObject) -> None:
    """An agent's tools come from outside: an argument that they do not describe is a string."""
    schema = data.draw(json_values)
    tools: Any = [schema, {"function": schema}, {"function": {"name": "a", "parameters": {"properties": {"b": schema}}}}]
    text = "<tool_call>\n<function=a>\n<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>"
    _, (call,) = PARSERS["qwen3_coder"](text, 0, tools)
    assert json.loads(call.arguments) in ({"b": "5"}, {"b": 5})
