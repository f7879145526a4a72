"""Tool-call parsers on sound, broken and hostile turns, and the corpus of nasty turns with its answers written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Never

import pytest

from harness.chat import split_reasoning
from harness.parsers import PARSERS, glm, hermes, plain_json, qwen3_coder
from harness.parsers.schema import argument_types

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "data" / "nasty_turns.jsonl").read_text().splitlines()]
SCHEMA = {
    "properties": {
        "command": {"type": "string"},
        "timeout": {"type": "number"},
        "is_input": {"type": "boolean"},
        "view_range": {"type": "array"},
        "note": {"type": ["string", "null"]},
    }
}
TOOLS = [{"type": "function", "function": {"name": "terminal", "parameters": SCHEMA}}]


def refuse(constant: str) -> Never:
    raise ValueError(constant)


def is_json(text: str) -> bool:
    """True for JSON that Python reads."""
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def calls_of(name: str, text: str) -> list[tuple[str, str]]:
    """The calls of a turn, without their ids."""
    return [(c.name, c.arguments) for c in PARSERS[name](text, 0, TOOLS)[1]]


# --- the corpus ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", CORPUS, ids=[turn["name"] for turn in CORPUS])
def test_nasty_turns(turn: dict[str, Any]) -> None:
    _, text = split_reasoning(turn["text"], False)
    content, calls = hermes(text, 3, [])
    assert [[c.name, is_json(c.arguments)] for c in calls] == turn["calls"]
    assert (content == "") == turn["content_empty"]
    assert [c.id for c in calls] == [f"call_3_{n}" for n in range(len(calls))]


def test_the_corpus_is_large_and_of_text() -> None:
    """Tokenizers cannot hold half surrogates: the corpus has them in escapes only."""
    assert len(CORPUS) >= 48
    assert len({turn["name"] for turn in CORPUS}) == len(CORPUS)
    for turn in CORPUS:
        assert turn["text"].encode().decode() == turn["text"] and turn["why"]


# --- Hermes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "call"),
    [
        (
            '{"name": "t", "arguments": {"a": 1.0, "b": 1180591620717411303424}}',
            ("t", '{"a": 1.0, "b": 1180591620717411303424}'),
        ),
        ('{"name": "t", "arguments": {"a": 1, "a": 2}}', ("t", '{"a": 2}')),
        ('{"name": "t", "arguments": {"a": "\\ud800"}}', ("t", '{"a": "\\ud800"}')),
        ('{"name": "t", "arguments": "{\\"a\\": 1}"}', ("t", '{"a": 1}')),
        ('{"name": "t", "arguments": {"a": NaN}}', ("t", '{"a": NaN}')),
        ('{"name": "t", "arguments": {"a": 1e400}}', ("t", '{"a": 1e400}')),
        ('{"name": "t", "arguments": {"a": 1,}}', ("t", '{"a": 1,}')),
        ('{"name": "t", "arguments": {"a": 1,} }', ("t", '{"a": 1,}')),
        ('{"name": "t", "arguments": {"a": 1}', ("t", '{"a": 1}')),
        ('{"name": "t", "arguments": {"a": "${B}', ("t", '{"a": "${B}')),
        ('{"name": "t", "arguments": {"a": 1}} extra', ("t", '{"a": 1}} extra')),
        ('{"arguments": {"a": 1,}, "name": "t"}', ("t", '{"a": 1,}, "name": "t"')),
        ('{"name": "t", "command": "x",}', ("t", '{"name": "t", "command": "x",}')),
        ("{'name': 't', 'arguments': {'a': None}}", ("t", "{'a': None}")),
        ('{"name": "two words", "arguments": {"a": 1,}}', ("malformed", '{"name": "two words", "arguments": {"a": 1,}}')),
        ('{"arguments": {"name": "t"}}', ("malformed", '{"arguments": {"name": "t"}}')),
        ("", ("malformed", "")),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_hermes(raw: str, call: tuple[str, str], end: str) -> None:
    """Sound arguments are lossless; of a broken call the name and the raw arguments are kept."""
    assert calls_of("hermes", f"<tool_call>\n{raw}\n{end}") == [call]


def test_hermes_content_is_what_is_between_the_calls() -> None:
    call = '<tool_call>{"name": "t"}</tool_call>'
    content, calls = hermes(f" a{call}b{call}\n</tool_call>c ", 2, TOOLS)
    assert content == "ab\n</tool_call>c"
    assert [(c.id, c.name, c.arguments) for c in calls] == [("call_2_0", "t", "{}"), ("call_2_1", "t", "{}")]


RUN = ("terminal", '{"command": "ls"}')
NONE = ("terminal", "{}")


# --- Qwen3-Coder and GLM ---------------------------------------------------------------------------------------------


def xml(*parameters: tuple[str, str]) -> str:
    """A call of `terminal` in Qwen3-Coder's form."""
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<tool_call>\n<function=terminal>\n{body}</function>\n</tool_call>"


def tags(*parameters: tuple[str, str]) -> str:
    """A call of `terminal` in GLM's form."""
    body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in parameters)
    return f"<tool_call>terminal\n{body}</tool_call>"


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("command", "123", "123"),
        ("command", '{"a": [1]}', '{"a": [1]}'),
        ("command", "true", "true"),
        ("command", '"quoted"', '"quoted"'),
        ("command", "", ""),
        ("command", "\n a\n\n", "\n a\n\n"),
        ("note", "null", "null"),
        ("unheard_of", "5", "5"),
        ("timeout", "5", 5),
        ("timeout", "5.0", 5.0),
        ("timeout", "soon", "soon"),
        ("timeout", "NaN", "NaN"),
        ("timeout", "", ""),
        ("is_input", "true", True),
        ("is_input", "True", True),
        ("is_input", "None", None),
        ("is_input", "yes", "yes"),
        ("view_range", "[1, -1]", [1, -1]),
        ("view_range", "[1, ", "[1, "),
    ],
)
def test_types_come_from_the_schema(key: str, raw: str, value: Any) -> None:
    """A string argument is the raw text, whatever it looks like; another one is JSON, or the raw text if it is none."""
    for name, text in (("qwen3_coder", xml((key, raw))), ("glm", tags((key, raw)))):
        ((tool, arguments),) = calls_of(name, text)
        assert tool == "terminal"
        assert repr(json.loads(arguments)) == repr({key: value})


def test_arguments_keep_numbers_that_floats_do_not_hold() -> None:
    for name, write in (("qwen3_coder", xml), ("glm", tags)):
        assert calls_of(name, write(("timeout", "1e400"), ("x", "y"))) == [("terminal", '{"timeout": 1e400, "x": "y"}')]


def test_the_last_of_equal_keys_wins() -> None:
    for name, write in (("qwen3_coder", xml), ("glm", tags)):
        assert calls_of(name, write(("command", "a"), ("command", "b"))) == [("terminal", '{"command": "b"}')]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<function=terminal>\n</function>\n</tool_call>", [NONE]),
        ("<function=terminal><parameter=command>ls</parameter></function></tool_call>", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</tool_call>", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</function>\n</tool_call>", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</tool_call>", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</parameter>", [RUN]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</tool_call>\n" + xml(), [RUN, NONE]),
        ("\n<function=terminal>\n<parameter=command>\nls\n</function>\n" + xml(), [RUN, NONE]),
        ("\n<function=terminal>", [NONE]),
        ('<function=terminal>{"command": 5}</function></tool_call>', [("terminal", '{"command": 5}</function>')]),
        ("<function=terminal><parameter=a>5</parameter></function>x", [("terminal", "<parameter=a>5</parameter></function>x")]),
        ("<function=>\n</function>\n</tool_call>", [("malformed", "<function=>\n</function>")]),
        ("\n<func", [("malformed", "<func")]),
        ('{"name": "terminal", "arguments": {}}</tool_call>', [("malformed", '{"name": "terminal", "arguments": {}}')]),
        ("", [("malformed", "")]),
    ],
)  # fmt: skip
def test_qwen3_coder_unclosed_and_broken(text: str, calls: list[tuple[str, str]]) -> None:
    """With a name, a call keeps the arguments that are there, or its raw text if they are something else."""
    assert calls_of("qwen3_coder", "<tool_call>" + text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("terminal</tool_call>", [NONE]),
        ("terminal<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>", [RUN]),
        ("terminal\n<arg_key>command</arg_key>\n<arg_value>ls\n</tool_call>", [RUN]),
        ("terminal\n<arg_key>command</arg_key>\n<arg_value>ls", [RUN]),
        ("terminal\n<arg_key>command</arg_key>\n<arg_value>ls\n</tool_call>" + tags(), [RUN, NONE]),
        ("terminal\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n" + tags(), [RUN, NONE]),
        ("terminal\n<arg_key>command</arg_key>", [("terminal", "<arg_key>command</arg_key>")]),
        ('terminal\n{"command": 5,}\n</tool_call>', [("terminal", '{"command": 5,}')]),
        ('{"name": "terminal"}</tool_call>', [("malformed", '{"name": "terminal"}')]),
        ("", [("malformed", "")]),
    ],
)  # fmt: skip
def test_glm_unclosed_and_broken(text: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of("glm", "<tool_call>" + text) == calls


def test_values_carry_tags_that_do_not_imitate_the_format() -> None:
    value = "grep '</parameter>' '</function>' '</tool_call>' '</arg_value>' <tool_call> x.xml"
    for name, write in (("qwen3_coder", xml), ("glm", tags)):
        assert calls_of(name, write(("command", value))) == [("terminal", json.dumps({"command": value}))]


def test_values_that_imitate_the_format_are_cut_and_the_next_call_survives() -> None:
    """What raw text cannot say: the value ends where the format says so."""
    for name, write, cut in (
        ("qwen3_coder", xml, "a\n</parameter>\n</function>\n</tool_call>\nb"),
        ("glm", tags, "a</arg_value>\n</tool_call>\nb"),
    ):
        text = write(("command", cut)) + write(("command", "c"))
        assert calls_of(name, text) == [("terminal", '{"command": "a"}'), ("terminal", '{"command": "c"}')]
    assert qwen3_coder(xml(("command", "a\n</parameter>\n<parameter=timeout>\n9")), 0, TOOLS)[1][0].arguments == (
        '{"command": "a", "timeout": 9}'
    )
    assert glm(tags(("command", "a</arg_value><arg_key>timeout</arg_key><arg_value>9")), 0, TOOLS)[1][0].arguments == (
        '{"command": "a", "timeout": 9}'
    )


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"array", "null"}),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/Text"}]}, {"array", "string"}),
        ({"allOf": [{"$ref": "#/$defs/Text"}]}, {"string"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"enum": ["a"]}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    definitions = {"Text": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    tool = {"function": {"name": "t", "parameters": {"$defs": definitions, "properties": {"x": schema}}}}
    assert argument_types([tool], "t") == {"x": types}
    assert argument_types([tool], "other") == {}


# --- plain JSON ------------------------------------------------------------------------------------------------------

CALL = '{"name": "terminal", "parameters": {"command": "ls"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [RUN]),
        (CALL.replace("parameters", "arguments"), "", [RUN]),
        (f"I look.\n\n{CALL}\n", "I look.", [RUN]),
        (f"I look: {CALL}", "I look:", [RUN]),
        (f"```json\n{CALL}\n```", "", [RUN]),
        (f"I look.\n```\n{CALL}\n```\n", "I look.", [RUN]),
        (f"[{CALL}, {CALL}]", "", [RUN, RUN]),
        (f"See {{x}} and [1].\n[\n  {CALL}\n]", "See {x} and [1].", [RUN]),
        (f"[{CALL}, 5]", "", [RUN, ("malformed", "5")]),
        (f"{CALL}\nis what I would call.", f"{CALL}\nis what I would call.", []),
        (f"{CALL}\nor rather\n{CALL}", f"{CALL}\nor rather", [RUN]),
        ('{"type": "function", "name": "t", "parameters": {}}', "", [("t", "{}")]),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"name": "Ada", "age": 036}', '{"name": "Ada", "age": 036}', []),
        ('{"tool": "t", "arguments": {}}', '{"tool": "t", "arguments": {}}', []),
        ('{"name": 5, "arguments": {}}', '{"name": 5, "arguments": {}}', []),
        ("[1, 2]", "[1, 2]", []),
        ("```\ncode\n```", "```\ncode\n```", []),
        ("", "", []),
        ('Go:\n{"name": "t", "arguments": {"a": 1,}}', "Go:", [("t", '{"a": 1,}')]),
        ('{"name": "t", "arguments": {"a": "', "", [("t", '{"a": "')]),
        ('```json\n{"name": "t", "arguments": {"a": NaN}}\n```', "", [("t", '{"a": NaN}')]),
        ('[{"name": "t", "arguments": {"a": NaN}}]', "", [("t", '{"a": NaN}')]),
    ],
)
def test_plain_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """A call ends the answer; what starts like one and is broken stays one; other JSON is content."""
    said, found = plain_json(text, 0, [])
    assert (said, [(c.name, c.arguments) for c in found]) == (content, calls)


# --- hostile texts ---------------------------------------------------------------------------------------------------

MEGABYTE = 1_000_000


@pytest.mark.parametrize("name", sorted(PARSERS))
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", "<tool_call></tool_call>", '<tool_call>{"', '<tool_call>{"</tool_call>', '<tool_call>\\"</tool_call>',
        "<tool_call>{}", '<tool_call>"\\""</tool_call>', "<tool_call>[", "<tool_call><function=a><parameter=b></tool_call>",
        "<tool_call><function=a><parameter=b></parameter>x</tool_call>", "<tool_call>a<arg_key></tool_call>",
        "<tool_call>a<arg_key>b</arg_key><arg_value></tool_call>", "</parameter> ", "</arg_value> ", "</function> ",
        '{"name":', '[{"name":', '{"name":1} ', '{"name":"a","arguments":', "[ ", '"arguments": ', "\\", '"', "}", "``` ", " ",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read(name: str, unit: str) -> None:
    """In linear time: in quadratic time these would run into the tests' time limit."""
    for before in ("", "<tool_call>", '<tool_call>{"name":"a","arguments":{"x":"', "<tool_call><function=a><parameter=b>"):
        text = before + unit * (MEGABYTE // len(unit))
        content, calls = PARSERS[name](text, 0, TOOLS)
        if name != "plain_json":
            assert bool(calls) == ("<tool_call>" in text)
        assert len(content) + sum(len(c.arguments) for c in calls) <= 3 * len(text)


@pytest.mark.parametrize("depth", [500, 900, 1_000, 1_500, 100_000])
def test_deep_nesting_is_a_call(depth: int) -> None:
    """Deeper than Python's JSON goes, the arguments stay as they were written."""
    deep = '{"a": ' * depth + "1" + "}" * depth
    call = '{"name": "t", "arguments": ' + deep + "}"
    assert calls_of("hermes", f"<tool_call>{call}</tool_call>") == [("t", deep)]
    assert calls_of("plain_json", call) == [("t", deep)]
    assert calls_of("plain_json", f"[{call}]")[0][0] == "t"
    for name, write in (("qwen3_coder", xml), ("glm", tags)):
        ((tool, arguments),) = calls_of(name, write(("timeout", deep)))
        assert tool == "terminal" and arguments in (f'{{"timeout": {deep}}}', json.dumps({"timeout": deep}))
