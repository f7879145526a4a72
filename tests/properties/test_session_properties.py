"""Invariants 1 to 3 over random conversations: the tokens that the engine consumed and produced are the tokens recorded."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.chat import Chat
from harness.errors import EngineError, EpisodeEnd
from harness.journal import token_digest
from harness.protocols import Message, Reply
from tests.support import PlayedEngine, Raw, session_of, tool_call

VOCABULARY = 330
LOGPROB = st.floats(-50, 0, width=32)
WORDS = st.text(max_size=8) | st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "\n", "", "␞answer␞", "{{ x }}"])


@dataclass
class Turn:
    """One model call: what happens before it, what it samples, what follows."""

    raw: Raw
    text: str
    stopped: bool
    fails_first: bool
    repeated: bool
    rewrites: bool
    echo: str
    after: list[Message] = field(default_factory=list)


@st.composite
def turns(draw: Any) -> Turn:
    """A turn of random ids, or of text with calls in it."""
    text = draw(st.sampled_from(["", *TEXTS]))
    ids = [] if text else draw(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=12))
    stopped = draw(st.booleans())
    n = len(ids) + stopped
    raw = Raw(
        ids,
        "stop" if stopped else draw(st.sampled_from(["stop", "stop", "length"])),
        draw(st.lists(LOGPROB, min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
    )
    roles = st.sampled_from(["tool", "user", "system", "assistant"])
    after = [{"role": draw(roles), "content": draw(WORDS)} for _ in range(draw(st.integers(0, 3)))]
    flags = [draw(st.integers(0, 4)) == 0 for _ in range(3)]
    return Turn(raw, text, stopped, *flags, draw(st.sampled_from(["same", "reserialised", "emptied"])), after)


TEXTS = [
    'ok<tool_call>\n{"name": "edit", "arguments": {"use": "a", "want":  3}}\n</tool_call>',
    "<tool_call>{broken</tool_call>" + tool_call("run_tests", "{}"),
    "<tool_call>",
    "é✓",
]


def echoed(message: Message, how: str) -> Message:
    """The assistant message as an agent may send it back."""
    if how == "same":
        return message
    calls = []
    for call in message.get("tool_calls", ()):
        try:
            text = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"), sort_keys=True)
        except ValueError:
            text = "{}"
        calls.append({"id": call["id"], "type": "function", "function": {"name": "other", "arguments": text}})
    return {"role": "assistant", "content": "" if how == "emptied" else message["content"] + " ", "tool_calls": calls}


def glue(chat: Chat, messages: list[Message]) -> list[int]:
    """What follows a sampled stop token, written by hand."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return chat.encode("\n" + text + "<|im_start|>assistant\n")


@given(plan=st.lists(turns(), min_size=1, max_size=6))
@settings(max_examples=150)
def test_the_record_is_what_the_engine_saw(chat: Chat, plan: list[Turn]) -> None:
    stop = chat.stop_ids[0]
    script: list[Any] = []
    for turn in plan:
        if turn.text:
            turn.raw.ids = chat.encode(turn.text)
            n = len(turn.raw.ids) + turn.stopped
            turn.raw.logprobs, turn.raw.versions = [-0.5] * n, list(range(n))
        if turn.stopped:
            turn.raw.ids = [*turn.raw.ids, stop]
        script += [EngineError("once")] * turn.fails_first + [turn.raw]
    engine = PlayedEngine(chat, script)
    session = session_of(chat, engine)
    record: list[list[tuple[list[int], Raw | None]]] = []

    async def play() -> None:
        messages: list[Message] = [{"role": "user", "content": "start"}]
        new = chat.encode("<|im_start|>user\nstart<|im_end|>\n<|im_start|>assistant\n")
        fork = True
        for number, turn in enumerate(plan):
            if turn.fails_first:
                with pytest.raises(EngineError):
                    await session.complete(messages)
            try:
                reply = await session.complete(messages)
            except EpisodeEnd:
                assert turn.raw.finish == "length"
                reply = None
            if fork:
                record.append([])
            record[-1] += [(new, None), (turn.raw.ids, turn.raw)]
            if reply is None:
                return
            assert turn.raw.finish == "stop"
            if turn.repeated:
                assert await session.complete([dict(m) for m in messages]) is reply
            if turn.rewrites:
                messages = [{"role": "user", "content": f"summary {number}"}]
                new = chat.encode(f"<|im_start|>user\nsummary {number}<|im_end|>\n<|im_start|>assistant\n")
            else:
                messages = [*messages, echoed(reply.message(), turn.echo), *turn.after]
                new = [stop] * (turn.raw.ids[-1] != stop) + glue(chat, turn.after)
            fork = turn.rewrites

    asyncio.run(play())

    # The engine consumed exactly the stored prefix, call by call.
    calls = iter(zip(engine.requests, engine.generations, strict=True))
    for segment in record:
        prefix: list[int] = []
        for ids, raw in segment:
            if raw is not None:
                request, generation = next(calls)
                assert request.token_ids == prefix
                assert generation.token_ids == ids
            prefix = prefix + ids
    assert next(calls, None) is None

    # The trajectories are the concatenation, with mask, log-probs and versions of what was sampled.
    trajectories = session.trajectories("t", {})
    assert [t.segment for t in trajectories] == list(range(len(record)))
    for t, segment in zip(trajectories, record, strict=True):
        assert t.tokens.tolist() == [x for ids, _ in segment for x in ids]
        assert t.loss_mask.tolist() == [raw is not None for ids, raw in segment for _ in ids]
        sampled = [raw for _, raw in segment if raw is not None]
        np.testing.assert_array_equal(
            t.rollout_logprobs[t.loss_mask], np.float32([x for raw in sampled for x in raw.logprobs or ()])
        )
        assert t.policy_versions[t.loss_mask].tolist() == [x for raw in sampled for x in raw.versions or ()]
        assert t.n_turns == len(sampled)
        assert [s.turn for s in t.spans if s.kind == "action"] == list(range(len(sampled)))


# --- several conversations at once, in a session that dies and comes back ---------------------------------------------


@dataclass
class Talk:
    """A conversation as the agent keeps it: requests made, what came back, and what must be recorded of it."""

    asked: list[list[Message]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    record: list[tuple[list[int], Raw | None]] = field(default_factory=list)

    def past(self, turn: int, echo: str) -> list[Message]:
        """The conversation behind a turn; an answer without anything in it may be left out."""
        reply = self.replies[turn]
        if turn + 1 < len(self.asked):  # as it was told before
            return self.asked[turn + 1][: len(self.asked[turn]) + self.told[turn + 1]]
        if echo == "dropped" and not reply.content and not reply.tool_calls:
            return self.asked[turn]
        return [*self.asked[turn], echoed(reply.message(), "same" if echo == "dropped" else echo)]

    told: list[int] = field(default_factory=list)
    """Of each request: 1 if it began with the echo of the turn before."""


STEPS = st.tuples(
    st.sampled_from(["go on", "go on", "go on", "begin", "branch", "ask again", "repeat", "restore"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["same", "reserialised", "emptied", "dropped", "dropped"]),
    st.sampled_from(["", "", "<think>hm</think>", "<think>hm" + tool_call("edit", "{}"), "said {}", *TEXTS]),
    st.floats(-50, 0),
    st.booleans(),
    st.integers(0, 3),
)


@given(plan=st.lists(STEPS, max_size=16))
@settings(max_examples=150)
def test_conversations_side_by_side_survive_each_other_and_crashes(chat: Chat, plan: list[Any]) -> None:
    kept = _played(chat, plan, None)
    with tempfile.TemporaryDirectory() as folder:
        restored = _played(chat, plan, Path(folder))
    assert kept == restored


def _played(chat: Chat, plan: list[Any], folder: Path | None) -> list[Any]:
    """Play, check the record against what the engine saw, and return every byte of it."""
    stop = chat.stop_ids[0]
    engine = PlayedEngine(chat, [])
    session = session_of(chat, engine, seed=3, folder=folder)
    talks: list[Talk] = []
    calls: list[tuple[Talk, int]] = []

    async def ask(talk: Talk, request: list[Message], new: list[int], told: int, step: Any) -> None:
        number, (_, _, _, _, text, logprob, fails, cut) = len(engine.generations), step
        ids = chat.encode(text.format(number) if text == "said {}" else text) + [stop] * (cut > 0)
        ids = ids or chat.encode("x")
        raw = Raw(ids, "stop", [logprob] * len(ids), [number] * len(ids))
        if fails:
            engine.turns.append(EngineError("once"))
            with pytest.raises(EngineError):
                await session.complete(request)
        engine.turns.append(raw)
        reply = await session.complete(request)
        assert not engine.turns, "the engine was asked"
        talk.asked.append([dict(m) for m in request])
        talk.told.append(told)
        talk.replies.append(reply)
        talk.record += [(new, None), (ids, raw)]
        calls.append((talk, len(talk.record) - 2))

    async def play() -> None:
        nonlocal session
        for number, step in enumerate(plan):
            what, which, turn, echo, *_ = step
            fresh: Message = {"role": "user", "content": f"message {number}"}
            if what == "restore":
                if folder is not None:
                    if (folder / "session.jsonl").exists():
                        with (folder / "session.jsonl").open("ab") as file:
                            file.write(b'{"turn":{"segment"'[: which * 4])
                    session = session_of(chat, engine, seed=3, folder=folder)
                    session.restore()
                continue
            if what == "begin" or not talks:
                talks.append(Talk())
                await ask(talks[-1], [fresh], chat.opening([fresh], []), 0, step)
                continue
            talk = talks[which % len(talks)]
            turn %= len(talk.asked)
            last = turn == len(talk.asked) - 1
            if what == "repeat":
                assert await session.complete([dict(m) for m in talk.asked[-1]]) == talk.replies[-1]
            elif what == "ask again" and not last and talk.replies[turn].content:
                again = [o for o in talks if o.asked[-1] == talk.asked[turn]]
                if again:
                    assert await session.complete(talk.asked[turn]) == again[-1].replies[-1]
                    continue
                talks.append(Talk())
                await ask(talks[-1], talk.asked[turn], chat.opening(talk.asked[turn], []), 0, step)
            elif what == "branch" and not last:
                talks.append(Talk())
                request = [*talk.past(turn, echo), fresh]
                await ask(talks[-1], request, chat.opening(request, []), 0, step)
            else:
                past = talk.past(len(talk.asked) - 1, echo)
                request = [*past, fresh]
                if any(o is not talk and o.asked[-1][: len(past)] == past != talk.asked[-1] for o in talks):
                    talks.append(Talk())  # word for word the past of another
                    await ask(talks[-1], request, chat.opening(request, []), 0, step)
                    continue
                unstopped = [stop] * (talk.record[-1][0][-1] != stop)
                await ask(talk, request, unstopped + glue(chat, [fresh]), len(past) - len(talk.asked[-1]), step)

    asyncio.run(play())
    assert len(calls) == len(engine.generations) == len(engine.requests) == session.turns
    for (talk, at), request, generation in zip(calls, engine.requests, engine.generations, strict=True):
        assert request.token_ids == [x for ids, _ in talk.record[: at + 1] for x in ids]
        assert generation.token_ids == talk.record[at + 1][0]
    trajectories = session.trajectories("t", {})
    assert len(trajectories) == len(talks)
    for t, talk in zip(trajectories, talks, strict=True):
        assert t.tokens.tolist() == [x for ids, _ in talk.record for x in ids]
        assert t.loss_mask.tolist() == [raw is not None for ids, raw in talk.record for _ in ids]
        assert t.info["facts"] == ({"forks": len(talks) - 1} if len(talks) > 1 else {})
        for (n, sent, said), span in zip(t.info["calls"], [s for s in t.spans if s.turn >= 0], strict=True):
            assert (n, sent, said) == (span.start, token_digest(t.tokens[: span.start]), token_digest(t.tokens[: span.stop]))
    arrays = ("tokens", "turn_ids", "rollout_logprobs", "policy_versions")
    return [([getattr(t, name).tobytes() for name in arrays], t.info, t.segment) for t in trajectories]
