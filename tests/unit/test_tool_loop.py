"""The tool loop: what a model can get wrong in a call is answered in words it can read, and nothing of it is an exception."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.scripted import ScriptedAgent, ScriptedAgentConfig
from agents.tool_loop import ToolLoop, ToolLoopConfig, mismatch, run_tool
from harness.chat import Chat
from harness.parsers import hermes
from harness.protocols import ANSWER, Tool, ToolCall, ToolResult
from harness.sandboxes.memory import MemorySandbox
from harness.task import Limits, Task, Termination
from tests.support import USER, PlayedEngine, session_of, tool_call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "a": {"type": "array"},
        "o": {"type": "object"},
        "any": {},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["s"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"s": "x"}, None),
        ({"s": "", "i": 0, "n": 0, "b": False, "a": [], "o": {}, "any": None}, None),
        ({"s": "x", "n": 1.5}, None),
        ({"s": "x", "any": [{}]}, None),
        ({"s": "x", "maybe": "y"}, None),
        ({"s": "x", "maybe": None}, None),
        ({"s": "x", "maybe": 3}, "`maybe` is not of type"),
        ({}, "`s` is missing"),
        ({"i": 1}, "`s` is missing"),
        ({"s": None}, "`s` is not of type string"),
        ({"s": 1}, "`s` is not of type string"),
        ({"s": "x", "i": "1"}, "`i` is not of type integer"),
        ({"s": "x", "i": 1.5}, "`i` is not of type integer"),
        ({"s": "x", "i": True}, "`i` is not of type integer"),
        ({"s": "x", "n": True}, "`n` is not of type number"),
        ({"s": "x", "n": "1"}, "`n` is not of type number"),
        ({"s": "x", "b": 1}, "`b` is not of type boolean"),
        ({"s": "x", "a": {}}, "`a` is not of type array"),
        ({"s": "x", "o": []}, "`o` is not of type object"),
        ({"s": "x", "z": 1}, "`z` is not an argument"),
        (None, "not an object"),
        ([], "not an object"),
        ("s", "not an object"),
    ],
)
def test_mismatch(arguments: Any, says: str | None) -> None:
    found = mismatch(arguments, SCHEMA)
    assert (found is None) == (says is None), found
    assert says is None or says in str(found)


def test_more_arguments_pass_where_the_schema_does_not_forbid_them() -> None:
    assert mismatch({"z": 1}, {"type": "object", "properties": {}}) is None
    assert mismatch({"z": 1}, {}) is None


def called(name: str, arguments: str, *, says: str = "ok") -> tuple[str, list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    async def call(given: dict[str, Any]) -> ToolResult:
        seen.append(given)
        return ToolResult(says)

    tools = [Tool("edit", "", SCHEMA, call), Tool("look", "", {}, call)]
    return asyncio.run(run_tool(tools, ToolCall("c", name, arguments))).content, seen


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("nope", "{}", "error: no tool 'nope'; there are: edit, look"),
        ("", "{}", "error: no tool ''"),
        ("malformed", "{broken", "error: no tool 'malformed'"),
        ("edit", "", "error: the arguments are not JSON"),
        ("edit", "{'s': 1}", "error: the arguments are not JSON"),
        ("edit", '{"s": "x"} trailing', "error: the arguments are not JSON"),
        ("edit", "[" * 100_000, "error: the arguments are not JSON"),
        ("edit", '{"s": "x", "i": ' + "1" * 5000 + "}", "error: the arguments are not JSON"),
        ("edit", "null", "error: the arguments are not an object"),
        ("edit", '"{}"', "error: the arguments are not an object"),
        ("edit", '{"s": 5}', "error: `s` is not of type string"),
        ("edit", '{"s": "x", "i": NaN}', "error: `i` is not of type integer"),
    ],
)
def test_a_wrong_call_is_answered_and_not_made(name: str, arguments: str, says: str) -> None:
    content, seen = called(name, arguments)
    assert content.startswith(says)
    assert seen == []


def test_a_right_call_is_made() -> None:
    assert called("edit", '{"s": "é\\n"}') == ("ok", [{"s": "é\n"}])
    assert called("look", "{}") == ("ok", [{}])


@given(st.text(), st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_call_is_an_exception(name: str, arguments: str) -> None:
    content, seen = called(name, arguments)
    assert content == "ok" if seen else content.startswith("error: ")


# --- the parser ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("just text", "just text", []),
        (tool_call("a", "{}"), "", [("a", "{}")]),
        ("x " + tool_call("a", '{"k": "</tool"}') + " y", "x  y", [("a", '{"k": "</tool"}')]),
        ("<tool_call>{}</tool_call>", "", [("malformed", "{}")]),
        ("<tool_call>[1]</tool_call>", "", [("malformed", "[1]")]),
        ("<tool_call>5</tool_call>", "", [("malformed", "5")]),
        ("<tool_call></tool_call>", "", [("malformed", "")]),
        ('<tool_call>{"name": 5}</tool_call>', "", [("malformed", '{"name": 5}')]),
        ('<tool_call>{"name": "a"}', "", [("a", "{}")]),
        ('<tool_call>{"name": "a"', "", [("a", '{"name": "a"')]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", "null")]),
        ('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>', "", [("a", "{}"), ("b", "{}")]),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found, made = hermes(text, 3)
    assert found == content
    assert [(c.name, c.arguments) for c in made] == calls
    assert [c.id for c in made] == [f"call_3_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("depth", [10, 900, 1200, 1300, 1400, 1450, 1480, 1490, 1495, 1500, 1600, 5000, 100_000])
def test_deep_arguments_are_a_call_or_malformed_never_an_error(depth: int) -> None:
    (call,) = hermes('<tool_call>{"name": "a", "arguments": ' + "[" * depth + "]" * depth + "}</tool_call>", 0)[1]
    assert call.name in ("a", "malformed")


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', '{"name"', "x", "\n", "}"])).map(
        "".join
    )
    | st.text()
)
def test_hermes_takes_any_text(text: str) -> None:
    content, calls = hermes(text, 0)
    assert (len(calls) > 0) == ("<tool_call>" in text), "what looks like a call is answered as one"
    assert len(calls) <= text.count("<tool_call>")
    assert "<tool_call>" not in content


# --- whole episodes --------------------------------------------------------------------------------------------------


class Live:
    """Two tools: `act` and `end`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        self.tools: tuple[Tool, ...] = (Tool("act", "", schema, self._act), Tool("end", "", schema, self._end))

    async def _act(self, _: dict[str, Any]) -> ToolResult:
        self.calls.append("act")
        return ToolResult(f"acted {len(self.calls)}")

    async def _end(self, _: dict[str, Any]) -> ToolResult:
        self.calls.append("end")
        return ToolResult("over", done=True)

    async def score(self) -> Any:
        raise NotImplementedError


def played(chat: Chat, agent: Any, turns: list[str], **limits: Any) -> tuple[Termination, Live, PlayedEngine]:
    live, engine = Live(), PlayedEngine(chat, turns)
    session = session_of(chat, engine)
    task = Task("t", (USER,))
    end = asyncio.run(agent.run(task, live, None, session, Limits(**limits)))
    assert len(session.trajectories("t", {})) == 1, "the loop's own echoes extend the conversation"
    return end, live, engine


LOOP = ToolLoop(ToolLoopConfig())
ACT, END = tool_call("act", "{}"), tool_call("end", "{}")


def test_every_call_of_a_turn_is_answered_in_order(chat: Chat) -> None:
    end, live, engine = played(chat, LOOP, [ACT + tool_call("nope", "{}") + ACT, END])
    assert (end, live.calls) == (Termination.FINISHED, ["act", "act", "end"])
    text = chat.decode(engine.requests[1].token_ids)
    assert text.index("acted 1") < text.index("no tool 'nope'") < text.index("acted 2")


def test_calls_after_the_end_are_not_made(chat: Chat) -> None:
    end, live, _ = played(chat, LOOP, [END + ACT])
    assert (end, live.calls) == (Termination.FINISHED, ["end"])


def test_a_turn_without_a_call_is_nudged_and_counts(chat: Chat) -> None:
    agent = ToolLoop(ToolLoopConfig(nudge="call something!"))
    end, live, engine = played(chat, agent, ["hm", "hm"], max_turns=2)
    assert (end, live.calls, len(engine.requests)) == (Termination.MAX_TURNS, [], 2)
    assert "call something!" in chat.decode(engine.requests[1].token_ids)


def test_a_task_that_takes_answers_says_which_reply_is_one(chat: Chat) -> None:
    class Asking(Live):
        async def on_reply(self, text: str) -> ToolResult:
            self.calls.append(text)
            return ToolResult("in a box, please", done="box" in text)

    live, engine = Asking(), PlayedEngine(chat, ["42", ACT + "box", "box 42", "more"])
    end = asyncio.run(LOOP.run(Task("t", (USER,)), live, None, session_of(chat, engine), Limits()))  # type: ignore[arg-type]
    assert (end, live.calls, len(engine.requests)) == (Termination.FINISHED, ["42", "act", "box 42"], 3)
    assert "in a box, please" in chat.decode(engine.requests[1].token_ids)


@pytest.mark.parametrize("reply", ["42", "", ACT])
def test_a_task_without_tools_ends_with_the_first_reply(chat: Chat, reply: str) -> None:
    live, engine, sandbox = Live(), PlayedEngine(chat, [reply]), MemorySandbox()
    live.tools = ()
    end = asyncio.run(LOOP.run(Task("t", (USER,)), live, sandbox, session_of(chat, engine), Limits()))
    assert (end, live.calls, len(engine.requests)) == (Termination.FINISHED, [], 1)
    assert asyncio.run(sandbox.read(ANSWER)).decode() == hermes(reply, 0)[0]


def test_the_task_s_own_messages_are_not_changed(chat: Chat) -> None:
    task = Task("t", (dict(USER),))
    asyncio.run(LOOP.run(task, Live(), None, session_of(chat, PlayedEngine(chat, [ACT, END])), Limits()))  # type: ignore[arg-type]
    assert task.messages == (USER,)


def test_the_scripted_agent_plays_its_list_whatever_the_model_says(chat: Chat) -> None:
    agent = ScriptedAgent(ScriptedAgentConfig(calls=[("act", "{}"), ("act", "nonsense"), ("end", "{}"), ("act", "{}")]))
    end, live, _ = played(chat, agent, ["a", END, "c", "d"])
    assert (end, live.calls) == (Termination.FINISHED, ["act", "end"])
    end, live, _ = played(chat, agent, ["a", "b"], max_turns=2)
    assert (end, live.calls) == (Termination.MAX_TURNS, ["act"])
