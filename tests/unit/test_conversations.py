"""Given conversations: the actions are exactly the assistant turns with their stop token, as a session would record them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.toy_repair import tokenizer
from harness.chat import Chat
from harness.conversations import Conversation, conversations, tokenise
from harness.errors import ConfigError
from harness.trajectory import Trajectory
from tests.support import PlayedEngine, session_of, tool_call
from trainer.sft import demonstration

TOOLS = [{"type": "function", "function": {"name": "edit", "description": "", "parameters": {}}}]
THINKING = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and (loop.last or loop.nextitem.role == 'tool') %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML; tool output is a user's, and thoughts of earlier turns are dropped, as Qwen3 does."""


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer.write(folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    return Chat(folder, ["<|im_end|>"])


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}_0", "content": text}


LONG = [
    {"role": "system", "content": "be brief"},
    user("hi \u2028 there"),
    said("", "look first", [call("edit", '{"use": "a"}')]),
    tool("edited"),
    said("done, naïve 🙂", "that was it"),
    user("thanks"),
    user("and bye"),
    said("bye"),
]


def turns(t: Trajectory, chat: Chat) -> list[str]:
    """The text of each action span."""
    return [chat.decode(t.tokens[s.start : s.stop].tolist()) for s in t.spans if s.kind == "action"]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines) + "\n")
    return path


def test_actions_are_the_assistants_turns(chat: Chat, thinking: Chat) -> None:
    conversation = Conversation(messages=LONG, tools=TOOLS)
    edit = tool_call("edit", '{"use": "a"}')
    for made, first, second in (
        (chat, edit, "done, naïve 🙂"),
        (thinking, f"<think>\nlook first\n</think>\n\n{edit}", "<think>\nthat was it\n</think>\n\ndone, naïve 🙂"),
    ):
        t = tokenise(conversation, made, "c")
        assert turns(t, made) == [f"{first}<|im_end|>", f"{second}<|im_end|>", "bye<|im_end|>"]
        assert [s.kind[0] for s in t.spans] == list("oaoaoa")
        assert (t.rollout_logprobs[t.loss_mask] == 0).all() and (t.policy_versions[t.loss_mask] == 0).all()
        before = made.decode(t.tokens[: t.spans[1].start].tolist())
        assert before == made.render(LONG[:2], TOOLS, prompt=True)
        between = made.decode(t.tokens[t.spans[4].start : t.spans[4].stop].tolist())
        assert between == "\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>user\nand bye<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", ["chat", "thinking"])
def test_tokens_are_those_of_a_session(kind: str, request: pytest.FixtureRequest) -> None:
    """An agent that asks the same questions, and an engine that says the same: the same tokens and masks."""
    made: Chat = request.getfixturevalue(kind)
    given = tokenise(Conversation(messages=LONG, tools=TOOLS), made, "c")
    texts = [text.removesuffix("<|im_end|>") for text in turns(given, made)]
    session = session_of(made, PlayedEngine(made, list(texts)))

    async def play() -> None:
        messages = list(LONG[:2])
        for new in (LONG[3:4], LONG[5:7], []):
            reply = await session.complete(messages, TOOLS)
            messages += [reply.message(), *new]

    asyncio.run(play())
    (recorded,) = session.trajectories("c", {})
    assert recorded.tokens.tolist() == given.tokens.tolist()
    assert recorded.turn_ids.tolist() == given.turn_ids.tolist()


def test_what_follows_the_last_turn_carries_no_loss(chat: Chat) -> None:
    short = tokenise(Conversation(messages=LONG[:3]), chat, "c")
    longer = tokenise(Conversation(messages=LONG[:4]), chat, "c")
    assert longer.tokens[: len(short)].tolist() == short.tokens.tolist()
    assert short.loss_mask[-1] and not longer.loss_mask[len(short) :].any()


def test_a_file_becomes_trajectories(chat: Chat, tmp_path: Path) -> None:
    """One per line, blank lines aside; a line separator inside a text is no end of line. They train."""
    file = write(tmp_path / "c.jsonl", {"messages": LONG, "tools": TOOLS}, "", {"messages": [user("a"), said("b")]})
    paths = conversations(file, chat, tmp_path)
    assert [p.name for p in paths] == ["conversation-1.0.parquet", "conversation-3.0.parquet"]
    first, second = map(Trajectory.load, paths)
    assert first.tokens.tolist() == tokenise(Conversation(messages=LONG, tools=TOOLS), chat, "x").tokens.tolist()
    assert turns(second, chat) == ["b<|im_end|>"] and second.info["source"] == "conversations"
    example = demonstration(first, 0.0)
    np.testing.assert_array_equal(example.weights, first.loss_mask)
    np.testing.assert_array_equal(example.tokens, first.tokens)


GOOD = {"messages": [user("a"), said("b")]}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"messages": [', "Expecting value"),
        ("[]", ""),
        ('"text"', ""),
        ({"messages": [user("a"), user("b")]}, "needs an assistant turn"),
        ({"messages": [said("a"), user("b")]}, "after the opening"),
        ({"messages": [user("a"), said("b"), said("c")]}, "two assistant turns"),
        ({"messages": [user("a")]}, "`messages`"),
        ({"messages": "a"}, "`messages`"),
        ({"messages": ["a", "b"]}, "messages.0"),
        ({"tools": []}, "`messages`"),
        ({"messages": [user("a"), said("b")], "tool": []}, "`tool`: Extra inputs"),
    ],
)
def test_errors_name_file_and_line(chat: Chat, tmp_path: Path, line: Any, why: str) -> None:
    file = write(tmp_path / "c.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(ConfigError) as caught:
        conversations(file, chat, tmp_path)
    assert caught.value.message.startswith(f"`sft.conversations`: {file}:3: ")
    assert why in caught.value.message and "\n" not in caught.value.message
    assert '"messages"' in caught.value.hint


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_an_empty_file(chat: Chat, tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"c\.jsonl has no conversation"):
        conversations(tmp_path / "c.jsonl", chat, tmp_path)


def test_files_that_cannot_be_read(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    for name in ("missing.jsonl", "latin.jsonl"):
        with pytest.raises(ConfigError, match=f"cannot read .*{name}") as caught:
            conversations(tmp_path / name, chat, tmp_path)
        assert caught.value.hint


def test_a_template_that_does_not_say_the_turn(tmp_path: Path, chat: Chat) -> None:
    """Its generation prompt is not how its assistant turns begin."""
    tokenizer.write(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"))
    odd = Chat(tmp_path, ["<|im_end|>"])
    file = write(tmp_path / "c.jsonl", GOOD)
    with pytest.raises(ConfigError, match=r"c\.jsonl:1: the chat template does not continue"):
        conversations(file, odd, tmp_path)
