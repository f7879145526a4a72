"""Several conversations in a session: which one a request goes on with, how its messages are rendered, what is noted of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.toy_repair import tokenizer
from harness.chat import Chat
from harness.errors import EngineError, EpisodeEnd
from harness.journal import token_digest
from harness.protocols import GenerateRequest, Generation, Message, Reply, SamplingContract
from harness.session import TokenSession, sampling_hash
from harness.task import Termination
from tests.support import USER, PlayedEngine, Raw, session_of, tool_call

TOOLS = [{"type": "function", "function": {"name": "edit", "description": "", "parameters": {}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(session: TokenSession, *messages: Message, tools: Any = ()) -> Reply:
    return asyncio.run(session.complete(messages, tools))


def turns(session: TokenSession) -> list[int]:
    return [t.n_turns for t in session.trajectories("t", {})]


# --- which conversation ----------------------------------------------------------------------------------------------


def test_the_main_conversation_goes_on_behind_its_sub_agents(chat: Chat) -> None:
    engine = PlayedEngine(chat, [f"answer {i}" for i in range(6)])
    session = session_of(chat, engine)
    main, sub = [user("main")], [user("sub")]
    for conversation in (main, sub, main, sub, sub, main):
        conversation += [ask(session, *conversation).message(), user("more")]
    assert turns(session) == [3, 3]
    for t, numbers in zip(session.trajectories("t", {}), [(0, 2, 5), (1, 3, 4)], strict=True):
        assert t.info["facts"] == {"forks": 1}
        assert [engine.requests[n].token_ids for n in numbers] == [t.tokens[: s.start].tolist() for s in t.spans if s.turn >= 0]


def test_an_earlier_conversations_last_request_is_answered_from_the_record(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", Raw([5], "length"), "three"]), max_tokens_per_turn=1)
    first = ask(session, user("a"))
    with pytest.raises(EpisodeEnd):
        ask(session, user("b"))
    ask(session, user("c"))
    assert ask(session, user("a")) is first
    with pytest.raises(EpisodeEnd) as end:
        ask(session, user("b"))
    assert end.value.termination == session.ended == Termination.MAX_TOKENS_PER_TURN
    ask(session, user("a"))
    assert session.ended is None
    assert turns(session) == [1, 1, 1]


def test_a_branch_from_an_earlier_point_forks_and_overwrites_nothing(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one", "two", "three", "four", "five"])
    session = session_of(chat, engine)
    first = ask(session, USER)
    second = ask(session, USER, first.message(), user("left"))
    ask(session, USER, first.message(), user("right"))
    ask(session, USER, first.message(), user("left"), second.message(), user("on"))
    assert turns(session) == [3, 1]
    left, right = session.trajectories("t", {})
    assert "right" not in chat.decode(left.tokens.tolist()) and "left" not in chat.decode(right.tokens.tolist())


def test_a_branch_is_not_mistaken_for_the_conversation_that_asked_the_same_later(chat: Chat) -> None:
    """Asked again from the start, the policy said something else; the agent then goes back to what it said first."""
    session = session_of(chat, PlayedEngine(chat, ["one", "two", "other", "four", "five"]))
    first = ask(session, USER)
    ask(session, USER, first.message(), user("x"))
    other = ask(session, USER)
    ask(session, USER, first.message(), user("y"))
    assert turns(session) == [2, 1, 1], "the third conversation never said `one`"
    ask(session, USER, other.message(), user("y"))
    assert turns(session) == [2, 2, 1]


@pytest.mark.parametrize("text", ["", "<think>only thought</think>", "<think>cut off", "  \n"])
def test_the_echo_of_an_empty_answer_may_be_left_out(chat: Chat, text: str) -> None:
    def play(echo: bool) -> list[int]:
        engine = PlayedEngine(chat, [text, "two", "three"])
        session = session_of(chat, engine)
        messages = [USER]
        reply = ask(session, *messages)
        messages += [reply.message()] * echo + [user("go on")]
        messages += [ask(session, *messages).message(), user("and on")]
        ask(session, *messages)
        assert session.trajectories("t", {})[0].info["facts"] == {}
        return engine.requests[2].token_ids

    assert play(echo=True) == play(echo=False)


@pytest.mark.parametrize("text", ["said", tool_call("edit", "{}")])
def test_the_echo_of_an_answer_may_not_be_left_out(chat: Chat, text: str) -> None:
    session = session_of(chat, PlayedEngine(chat, [text, "two"]))
    ask(session, USER)
    ask(session, USER, user("go on"))
    assert turns(session) == [1, 1]


@pytest.mark.parametrize(
    ("ids", "extends"), [((0, 1), True), ((1, 0), False), ((0,), False), ((), False), ((0, 1, 1), False), ((0, 7), False)]
)
def test_all_calls_must_be_echoed_in_order(chat: Chat, ids: tuple[int, ...], extends: bool) -> None:
    session = session_of(chat, PlayedEngine(chat, [tool_call("edit", "{}") * 2, "two"]))
    echo = ask(session, USER).message()
    echo["tool_calls"] = [{"id": f"call_0_{i}", "function": {"name": "renamed", "arguments": "{}"}} for i in ids]
    ask(session, USER, echo, user("x"))
    assert turns(session) == ([2] if extends else [1, 1])


def test_other_tools_are_another_conversation_and_both_go_on(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two", "three", "four"]))
    for tools in (TOOLS, []):
        reply = ask(session, USER, tools=tools)
        assert ask(session, USER, tools=tools) is reply
    for tools, number in ((TOOLS, "one"), ([], "two")):
        ask(session, USER, {"role": "assistant", "content": number}, user("x"), tools=tools)
    assert turns(session) == [2, 2]


def test_going_back_to_what_was_said_with_other_tools_forks(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two", "three", "four"]))
    first = ask(session, USER, tools=TOOLS)
    ask(session, USER, first.message(), user("x"), tools=TOOLS)
    ask(session, USER)
    ask(session, USER, first.message(), user("y"))
    assert turns(session) == [2, 1, 1], "without tools the policy said `two`"


@pytest.mark.parametrize("at", [0, 2])
def test_a_message_changed_in_place_after_it_was_sent_is_another(chat: Chat, at: int) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two", "three"]))
    messages = [user("a")]
    messages += [ask(session, *messages).message(), user("b")]
    messages += [ask(session, *messages).message(), user("c")]
    messages[at]["content"] = "changed"
    ask(session, *messages)
    assert turns(session) == [2, 1]


# --- rendering -------------------------------------------------------------------------------------------------------


def told(chat: Chat, n: int) -> tuple[TokenSession, PlayedEngine, list[list[Message]]]:
    """A session of n turns of one conversation, and what was asked."""
    engine = PlayedEngine(chat, [f"answer {i}" for i in range(n)])
    session = session_of(chat, engine, max_turns=n)
    messages, asked = [user("start")], []
    for i in range(n):
        asked.append(list(messages))
        messages += [ask(session, *messages).message(), user(f"message {i}")]
    return session, engine, asked


def templated(folder: Path, template: str) -> Chat:
    tokenizer.write(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Chat(folder, ["<|im_end|>"])


class Counting(Chat):
    """Notes how many messages each rendering had."""

    sizes: list[int]

    def render(self, messages: Any, tools: Any, *, prompt: bool) -> str:
        self.sizes.append(len(messages))
        return super().render(messages, tools, prompt=prompt)


def test_a_turn_renders_its_own_messages_only(model_folder: Path) -> None:
    chat = Counting(model_folder, ["<|im_end|>"])
    chat.sizes = []
    session, engine, asked = told(chat, 70)
    assert [n for n in chat.sizes if n > 3] == [5, 9, 17, 33, 65, 129], "the whole history only at continuations 2, 4, 8, .."
    assert chat.sizes.count(3) == 69
    assert session.trajectories("t", {})[0].info["facts"] == {}
    assert engine.requests[-1].token_ids == Chat(model_folder, ["<|im_end|>"]).opening(asked[-1], [])


def test_a_template_that_counts_messages_is_rendered_in_full(tmp_path: Path) -> None:
    """What it writes behind a turn depends on what stands before: the short rendering is found out before it is used."""
    numbered = tokenizer.TEMPLATE.replace("{{ message.role }}", "{{ loop.index }}{{ message.role }}")
    chat = templated(tmp_path, numbered)
    session, engine, asked = told(chat, 9)
    assert session.trajectories("t", {})[0].info["facts"] == {"full_renderings": 7}
    for request, messages in zip(engine.requests, asked, strict=True):
        text = chat.decode(request.token_ids).replace("<|im_start|>assistant", "<|im_start|>Nassistant")
        whole = chat.render(messages, [], prompt=True).replace("<|im_start|>assistant", "<|im_start|>Nassistant")
        # the generation prompt has no number, and nor have the turns sampled behind it
        for i in range(len(messages)):
            whole = whole.replace(f"<|im_start|>{i + 1}assistant", "<|im_start|>Nassistant")
        assert text == whole


def test_a_template_that_refuses_the_short_history_gets_the_whole_one(tmp_path: Path) -> None:
    picky = (
        "{%- for m in messages %}{% if m.content == 'message 1' and loop.index0 < 4 %}{{ raise_exception('order') }}{% endif %}"
    )
    chat = templated(tmp_path, picky + "{% endfor %}" + tokenizer.TEMPLATE)
    session, engine, asked = told(chat, 7)
    assert session.trajectories("t", {})[0].info["facts"] == {"full_renderings": 5}
    assert engine.requests[-1].token_ids == chat.opening(asked[-1], [])


MAPPINGS = tokenizer.TEMPLATE.replace(
    "{{ call.function.arguments }}",
    "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}",
)


def test_a_template_that_reads_arguments_as_mappings_gets_them(tmp_path: Path) -> None:
    """The calls of a rewritten history, malformed ones too: no fork is refused."""
    chat = templated(tmp_path, MAPPINGS)
    texts = [tool_call("edit", '{"a": 1, "b": "x"}'), tool_call("edit", "[1]"), tool_call("edit", '""'), "<tool_call>{broken"]
    engine = PlayedEngine(chat, [*texts, "five", "six"])
    session = session_of(chat, engine)
    messages = [USER]
    for _ in texts:
        reply = ask(session, *messages)
        messages += [reply.message(), {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "x"}]
    ask(session, *messages)
    ask(session, user("summary"), *messages[1:])
    whole, fork = session.trajectories("t", {})
    assert (whole.n_turns, whole.info["facts"]) == (5, {"forks": 1})
    seen = [line for line in chat.decode(fork.tokens.tolist()).splitlines() if "arguments" in line]
    assert [line.partition('"arguments": ')[2] for line in seen] == ["a=1;b=x;}", "arguments=[1];}", "}", "arguments={broken;}"]


def test_an_echo_that_the_template_cannot_read_is_no_obstacle(tmp_path: Path) -> None:
    """The proof that is due cannot be made: that is counted, and the conversation goes on."""
    template = tokenizer.TEMPLATE.replace("{{ message.content }}", "{{ message.content.strip() }}")
    chat = templated(tmp_path, template)
    engine = PlayedEngine(chat, ["one", "two", "three", "four"])
    session = session_of(chat, engine)
    messages = [USER]
    for _ in range(4):
        ask(session, *messages)
        messages += [{"role": "assistant", "content": None}, user("on")]
    (t,) = session.trajectories("t", {})
    assert (t.n_turns, t.info["facts"]) == (4, {"unproven_renderings": 1})


QWEN3_LIKE = """\
{%- set last = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > last.query %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Tool outputs share a user's block; thoughts before the last question are dropped, which changes the history in hindsight."""


def test_a_template_that_drops_earlier_thoughts_is_extended_not_rewritten(tmp_path: Path) -> None:
    chat = templated(tmp_path, QWEN3_LIKE)
    n = 9
    said = [f"<think>\nthought {i}\n</think>\n\n" + tool_call("edit", "{}") * 2 for i in range(n)]
    engine = PlayedEngine(chat, said)
    session = session_of(chat, engine)
    messages = [USER]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for i in range(n):
        reply = ask(session, *messages)
        assert (reply.reasoning, reply.content) == (f"thought {i}", "")
        messages.append({"role": "assistant", "tool_calls": reply.message()["tool_calls"]})  # no thoughts, no content
        messages += [{"role": "tool", "tool_call_id": c.id, "content": f"output {c.id}"} for c in reply.tool_calls]
        text += said[i]
        outputs = "".join(f"\n<tool_response>\noutput call_{i}_{k}\n</tool_response>" for k in (0, 1))
        asked = "" if i % 4 else "<|im_start|>user\nand?<|im_end|>\n"
        messages += [user("and?")] if asked else []
        text += (
            f"<|im_end|>\n<|im_start|>user{outputs}<|im_end|>\n{asked}<|im_start|>assistant\n" if i < n - 1 else "<|im_end|>"
        )
    (t,) = session.trajectories("t", {})
    assert chat.decode(t.tokens.tolist()) == text
    assert t.info["facts"] == {}


# --- reasoning -------------------------------------------------------------------------------------------------------


def test_reasoning_is_apart_and_a_call_in_it_is_none(chat: Chat) -> None:
    call = tool_call("edit", "{}")
    engine = PlayedEngine(chat, [f"<think>\nmaybe {call}\n</think>\n\nyes {call}", f"<think>{call}"])
    session = session_of(chat, engine)
    reply = ask(session, USER)
    assert (reply.content, reply.reasoning) == ("yes", f"maybe {call}")
    assert [c.id for c in reply.tool_calls] == ["call_0_0"]
    assert reply.message()["reasoning_content"] == reply.reasoning
    cut = ask(session, USER, reply.message(), {"role": "tool", "tool_call_id": "call_0_0", "content": "x"})
    assert (cut.content, cut.reasoning, cut.tool_calls) == ("", call, ())


def test_a_prompt_that_opens_the_reasoning_needs_no_tag(tmp_path: Path) -> None:
    chat = templated(tmp_path, tokenizer.TEMPLATE.removesuffix("{% endif %}") + "<think>\n{% endif %}")
    session = session_of(chat, PlayedEngine(chat, ["look\n</think>\n\ndone", tool_call("edit", "{}")]))
    reply = ask(session, USER)
    assert (reply.reasoning, reply.content) == ("look", "done")
    second = ask(session, USER, reply.message(), user("x"))
    assert (second.reasoning, second.content, second.tool_calls) == (tool_call("edit", "{}"), "", ())


# --- what is noted ---------------------------------------------------------------------------------------------------


class Saying(PlayedEngine):
    """Says how it has sampled: what `said` makes of the request's contract."""

    said: Any = staticmethod(lambda sampling: sampling)

    async def generate(self, request: GenerateRequest) -> Generation:
        return replace(await super().generate(request), sampling=self.said(request.sampling))


def test_what_the_engine_says_it_used_is_confirmed(chat: Chat) -> None:
    contract = SamplingContract(0.7, 0.9, 20, 0.1, 0.2, 0.3, 1.1)
    engine = Saying(chat, ["one", "two"])
    session = session_of(chat, engine, seed=5, sampling=contract)
    reply = ask(session, USER)
    assert engine.requests[0].sampling == contract

    def info() -> dict[str, Any]:
        return session.trajectories("t", {"sampling_used": "not this"})[0].info

    settings = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 5,
    }
    assert info()["sampling_used"] == settings | {"confirmed": True}
    assert info()["sampling"] == sampling_hash(contract)
    engine.said = lambda sampling: None
    ask(session, USER, reply.message(), user("x"))
    assert info()["sampling_used"] == settings | {"confirmed": False}, "one turn is not"


def test_another_sampling_than_asked_is_an_engine_error_and_nothing_is_recorded(chat: Chat, tmp_path: Path) -> None:
    engine = Saying(chat, ["one", "two", "three"])
    session = session_of(chat, engine, folder=tmp_path)
    reply = ask(session, USER)
    before = (tmp_path / "session.jsonl").read_bytes()
    engine.said = lambda sampling: replace(sampling, top_p=0.8, top_k=20)
    with pytest.raises(EngineError, match=r"top_p=0\.8 instead of 1\.0, top_k=20 instead of -1"):
        ask(session, USER, reply.message(), user("x"))
    assert (turns(session), session.turns) == ([1], 1)
    assert (tmp_path / "session.jsonl").read_bytes() == before


def test_every_setting_has_a_part_in_the_contracts_name() -> None:
    plain = SamplingContract()
    changed = [replace(plain, **{name: 0.5}) for name in SamplingContract.__slots__]  # type: ignore[attr-defined]
    assert len({sampling_hash(c) for c in (plain, *changed)}) == 8
    assert sampling_hash(plain) == sampling_hash(SamplingContract(1, 1, -1, 0, 0, 0, 1)) == "c97cbc3cbab1"  # type: ignore[arg-type]


def test_calls_name_what_was_sent_and_what_came_back(chat: Chat) -> None:
    session, engine, _ = told(chat, 4)
    (t,) = session.trajectories("t", {})
    assert t.info["calls"] == [
        [len(request.token_ids), token_digest(request.token_ids), token_digest(request.token_ids + generation.token_ids)]
        for request, generation in zip(engine.requests, engine.generations, strict=True)
    ]
    json.dumps(t.info)


def test_a_call_that_sampled_nothing_is_no_action_turn(chat: Chat) -> None:
    engine = PlayedEngine(chat, [Raw([]), "two"])
    session = session_of(chat, engine)
    ask(session, USER, ask(session, USER).message(), user("x"))
    (t,) = session.trajectories("t", {})
    assert t.info["calls"] == [
        [len(engine.requests[1].token_ids), token_digest(engine.requests[1].token_ids), token_digest(t.tokens)]
    ]


def test_a_reply_knows_its_lengths(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one"])
    reply = ask(session_of(chat, engine), USER)
    assert (reply.prompt_tokens, reply.completion_tokens) == (len(engine.requests[0].token_ids), 4)


def test_counters_are_stored_with_every_trajectory(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]))
    session.count("nudges")
    session.count("nudges", 2)
    for text in "ab":
        ask(session, user(text))
    assert [t.info["facts"] for t in session.trajectories("t", {})] == [{"nudges": 3, "forks": 1}] * 2


@pytest.mark.parametrize("odd", ["logprobs", "versions"])
def test_an_answer_whose_lists_do_not_match_leaves_nothing(chat: Chat, odd: str) -> None:
    session = session_of(chat, PlayedEngine(chat, [Raw([5, 6], **{odd: [-0.5 if odd == "logprobs" else 1]}), "good"]))
    with pytest.raises(EngineError, match="2 tokens"):
        ask(session, USER)
    assert (session.turns, session.trajectories("t", {})) == (0, ())
    assert ask(session, USER).content == "good"
