"""The token session: masks by hand, echoes that change nothing, forks, limits, failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from harness.chat import Chat
from harness.errors import EngineError, EpisodeEnd
from harness.protocols import Message, SamplingContract
from harness.session import sampling_hash
from harness.task import Termination
from harness.trajectory import Trajectory
from tests.support import USER, PlayedEngine, Raw, session_of, tool_call

TOOLS = [{"type": "function", "function": {"name": "edit", "description": "", "parameters": {}}}]


def tool(text: str, call_id: str = "call_0_0") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def rendered(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASK = "<|im_start|>assistant\n"


def only(trajectories: tuple[Trajectory, ...]) -> Trajectory:
    assert len(trajectories) == 1
    return trajectories[0]


def test_masks_of_a_scripted_conversation(chat: Chat) -> None:
    """T-MASK: thinking, a tool call, tool output, a turn without stop token whose stop the harness adds, a final answer."""
    stop = chat.stop_ids[0]
    first = [*chat.encode("<think>look</think>" + tool_call("read_code", "{}")), stop]
    second = chat.encode("hm")  # the engine stopped without a stop token
    third = [*chat.encode("fixed"), stop]
    engine = PlayedEngine(
        chat,
        [
            Raw(first, logprobs=[-1.0] * len(first), versions=[0] * (len(first) - 1) + [1]),
            Raw(second, logprobs=[-2.0] * len(second), versions=[1] * len(second)),
            Raw(third, logprobs=[-3.0] * len(third), versions=[2] * len(third)),
        ],
    )
    session = session_of(chat, engine)

    async def play() -> None:
        messages: list[Message] = [USER]
        reply = await session.complete(messages, TOOLS)
        assert [c.name for c in reply.tool_calls] == ["read_code"]
        messages += [reply.message(), tool("def f")]
        reply = await session.complete(messages, TOOLS)
        assert reply.content == "hm"
        messages += [reply.message(), {"role": "user", "content": "go on"}]
        assert (await session.complete(messages, TOOLS)).content == "fixed"

    asyncio.run(play())
    pieces: list[tuple[list[int], int, float, list[int]]] = [
        (chat.encode(rendered("system", "tools: edit") + rendered("user", "hi") + ASK), -1, np.nan, []),
        (first, 0, -1.0, [0] * (len(first) - 1) + [1]),
        (chat.encode("\n" + rendered("tool", "def f") + ASK), -1, np.nan, []),
        (second, 1, -2.0, [1] * len(second)),
        ([stop], -1, np.nan, []),  # not sampled, so not trained
        (chat.encode("\n" + rendered("user", "go on") + ASK), -1, np.nan, []),
        (third, 2, -3.0, [2] * len(third)),
    ]
    t = only(session.trajectories("t", {}))
    assert t.tokens.tolist() == [x for ids, *_ in pieces for x in ids]
    assert t.turn_ids.tolist() == [turn for ids, turn, *_ in pieces for _ in ids]
    np.testing.assert_array_equal(t.rollout_logprobs, [lp for ids, _, lp, _ in pieces for _ in ids])
    assert t.policy_versions.tolist() == [v for ids, _, _, vs in pieces for v in (vs or [-1] * len(ids))]
    assert [s.kind[0] for s in t.spans] == list("oaoaoa")
    assert t.tokens[t.spans[2].start - 1] == stop, "the sampled stop token belongs to the action"


def reserialised(message: Message) -> Message:
    """The echo of an agent that parsed and re-wrote everything."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=2, sort_keys=True)
        function = {"arguments": arguments, "name": call["function"]["name"]}
        calls.append({"function": function, "type": "function", "id": call["id"], "index": 0})
    return {"tool_calls": calls, "role": "assistant", "content": "  " + message["content"].upper(), "refusal": None}


def test_an_echo_written_differently_changes_nothing(chat: Chat) -> None:
    def play(echo: Any) -> Trajectory:
        engine = PlayedEngine(chat, ["sure " + tool_call("edit", '{ "want":3,"use": "a" }'), "done"])
        session = session_of(chat, engine)

        async def run() -> None:
            reply = await session.complete([USER], TOOLS)
            await session.complete([USER, echo(reply.message()), tool("edited")], TOOLS)

        asyncio.run(run())
        return only(session.trajectories("t", {}))

    plain, other = play(lambda message: message), play(reserialised)
    assert plain.tokens.tolist() == other.tokens.tolist()
    assert plain.turn_ids.tolist() == other.turn_ids.tolist()
    assert plain.n_turns == 2


def test_a_repeated_request_is_answered_once(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one", "two"])
    session = session_of(chat, engine)

    async def run() -> None:
        first = await session.complete([USER])
        assert await session.complete([dict(USER)]) is first
        more = [USER, first.message(), tool("x")]
        both = await asyncio.gather(session.complete(more), session.complete([dict(m) for m in more]))
        assert both[0] is both[1]

    asyncio.run(run())
    assert (len(engine.requests), session.turns) == (2, 2)
    assert only(session.trajectories("t", {})).n_turns == 2


def test_rewritten_history_forks_and_nothing_of_it_is_trained_twice(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one", "two", "three"])
    session = session_of(chat, engine)

    async def run() -> None:
        first = await session.complete([USER])
        second = await session.complete([USER, first.message(), tool("a long output")])
        condensed = [{"role": "user", "content": "summary"}, second.message(), tool("b")]
        await session.complete(condensed)

    asyncio.run(run())
    old, new = session.trajectories("t", {"x": 1})
    assert (old.segment, new.segment) == (0, 1)
    assert (old.n_turns, new.n_turns) == (2, 1)
    spans = new.spans
    assert [s.kind for s in spans] == ["observation", "action"]
    assert (
        chat.decode(new.tokens[spans[0].start : spans[0].stop].tolist())
        == rendered("user", "summary") + rendered("assistant", "two") + rendered("tool", "b") + ASK
    )
    assert old.info["x"] == new.info["x"] == 1


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda messages: [{"role": "user", "content": "hi!"}, *messages[1:]],
        lambda messages: [messages[0], {"role": "user", "content": "instead of the echo"}, messages[2]],
        lambda messages: [messages[0], {**messages[1], "tool_calls": []}, messages[2]],
        lambda messages: [
            messages[0],
            {**messages[1], "tool_calls": [{"id": "other", "function": {"name": "edit", "arguments": "{}"}}]},
            messages[2],
        ],
        lambda messages: messages[1:],
    ],
)
def test_what_does_not_extend_the_past_forks(chat: Chat, rewrite: Any) -> None:
    session = session_of(chat, PlayedEngine(chat, [tool_call("edit", "{}"), "two"]))

    async def run() -> None:
        reply = await session.complete([USER])
        await session.complete(rewrite([USER, reply.message(), tool("x")]))

    asyncio.run(run())
    assert [t.n_turns for t in session.trajectories("t", {})] == [1, 1]


def test_other_tools_fork(chat: Chat) -> None:
    """The tools stand at the head of the prompt: with others the tokens seen are not a prefix any more."""
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]))

    async def run() -> None:
        reply = await session.complete([USER], TOOLS)
        await session.complete([USER, reply.message(), tool("x")], ())

    asyncio.run(run())
    assert len(session.trajectories("t", {})) == 2


def test_history_rewritten_in_place_is_noticed(chat: Chat) -> None:
    """An agent that changes a nested value of a message it has already sent has rewritten history."""
    parts: list[dict[str, str]] = [{"type": "text", "text": "hi"}]
    opening: Message = {"role": "user", "content": parts}
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]))

    async def run() -> None:
        reply = await session.complete([opening])
        parts[0]["text"] = "something else"
        await session.complete([opening, reply.message(), tool("x")])

    asyncio.run(run())
    assert len(session.trajectories("t", {})) == 2


def test_an_output_that_contains_the_marker_of_the_template_is_kept_whole(chat: Chat) -> None:
    """A tool may print anything, also the harness's own marker: not a byte of it may be lost."""
    engine = PlayedEngine(chat, ["one", "two", "three"])
    session = session_of(chat, engine)
    nasty = "before ␞answer␞ after"

    async def run() -> None:
        messages: list[Message] = [USER]
        for text in (nasty, "plain"):
            reply = await session.complete(messages)
            messages += [reply.message(), tool(text)]
        await session.complete(messages)

    asyncio.run(run())
    assert chat.decode(engine.requests[1].token_ids).endswith("\n" + rendered("tool", nasty) + ASK)
    assert chat.decode(engine.requests[2].token_ids).endswith(
        rendered("tool", nasty) + ASK + "two<|im_end|>\n" + rendered("tool", "plain") + ASK
    )


def test_bytes_that_are_no_character_stay_as_sampled(chat: Chat) -> None:
    half = chat.encode("é")[:1]
    engine = PlayedEngine(chat, [Raw([*chat.encode("x"), *half, chat.stop_ids[0]]), "two"])
    session = session_of(chat, engine)

    async def run() -> None:
        reply = await session.complete([USER])
        assert reply.content == "x\ufffd"
        await session.complete([USER, reply.message(), tool("naïve ✓ 🙂")])

    asyncio.run(run())
    opening = engine.requests[0].token_ids
    sampled = engine.generations[0].token_ids
    assert engine.requests[1].token_ids[: len(opening) + len(sampled)] == opening + sampled
    assert chat.decode(engine.requests[1].token_ids).endswith(rendered("tool", "naïve ✓ 🙂") + ASK)


def test_a_half_surrogate_from_the_agent_is_replaced_not_fatal(chat: Chat) -> None:
    """JSON bodies of agents that cut strings in UTF-16 contain them; the tokenizer cannot take them."""
    engine = PlayedEngine(chat, ["one"])
    asyncio.run(session_of(chat, engine).complete([{"role": "user", "content": "cut \ud83d"}]))
    assert chat.decode(engine.requests[0].token_ids) == rendered("user", "cut ?") + ASK


# --- limits ----------------------------------------------------------------------------------------------------------


def ended(session: Any, messages: list[Message]) -> Termination:
    with pytest.raises(EpisodeEnd) as end:
        asyncio.run(session.complete(messages))
    return end.value.termination


def test_a_turn_that_is_too_long_ends_the_episode_and_is_recorded(chat: Chat) -> None:
    engine = PlayedEngine(chat, [Raw([5, 6, 7], "length")])
    session = session_of(chat, engine, max_tokens_per_turn=3)
    assert ended(session, [USER]) == Termination.MAX_TOKENS_PER_TURN
    assert engine.requests[0].max_tokens == 3
    t = only(session.trajectories("t", {}))
    assert t.tokens[t.loss_mask].tolist() == [5, 6, 7]
    assert session.turns == 1


def test_asked_again_after_a_cut_turn_the_end_is_the_same(chat: Chat) -> None:
    """A client that retries must not be told that the cut turn was an answer."""
    session = session_of(chat, PlayedEngine(chat, [Raw([5], "length"), "no"]), max_tokens_per_turn=1)
    assert ended(session, [USER]) == Termination.MAX_TOKENS_PER_TURN
    assert ended(session, [USER]) == Termination.MAX_TOKENS_PER_TURN
    assert only(session.trajectories("t", {})).n_actions == 1


def test_a_turn_cut_by_the_context_ends_with_max_context(chat: Chat) -> None:
    prompt = len(chat.encode(rendered("user", "hi") + ASK))
    engine = PlayedEngine(chat, [Raw([5, 6], "length")])
    session = session_of(chat, engine, max_context=prompt + 2, max_tokens_per_turn=100)
    assert ended(session, [USER]) == Termination.MAX_CONTEXT
    assert engine.requests[0].max_tokens == 2
    assert len(only(session.trajectories("t", {}))) == prompt + 2


def test_a_turn_that_fills_the_context_exactly_and_stops_is_fine_the_next_one_ends(chat: Chat) -> None:
    prompt = len(chat.encode(rendered("user", "hi") + ASK))
    engine = PlayedEngine(chat, [Raw([5, chat.stop_ids[0]])])
    session = session_of(chat, engine, max_context=prompt + 2)
    reply = asyncio.run(session.complete([USER]))
    before = only(session.trajectories("t", {})).tokens.tolist()
    assert ended(session, [USER, reply.message(), tool("x")]) == Termination.MAX_CONTEXT
    after = only(session.trajectories("t", {})).tokens.tolist()
    assert before == after, "what the engine never saw is not recorded"
    assert len(engine.requests) == 1


def test_a_prompt_without_room_is_never_sent(chat: Chat) -> None:
    engine = PlayedEngine(chat, [])
    session = session_of(chat, engine, max_context=3)
    assert ended(session, [USER]) == Termination.MAX_CONTEXT
    assert session.trajectories("t", {}) == ()


def test_max_turns_counts_model_calls_over_all_segments(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two", "three"]), max_turns=2)
    asyncio.run(session.complete([USER]))
    asyncio.run(session.complete([{"role": "user", "content": "other"}]))
    assert ended(session, [{"role": "user", "content": "third"}]) == Termination.MAX_TURNS
    assert [t.n_turns for t in session.trajectories("t", {})] == [1, 1]


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_call_leaves_nothing_and_can_be_made_again(chat: Chat, at: int) -> None:
    turns: list[Any] = ["one", "two"]
    turns.insert(at, EngineError("gone"))
    engine = PlayedEngine(chat, turns)
    session = session_of(chat, engine)

    async def run() -> None:
        messages: list[Message] = [USER]
        for turn in range(2):
            if turn == at:
                before = [t.tokens.tolist() for t in session.trajectories("t", {})]
                with pytest.raises(EngineError):
                    await session.complete(messages)
                assert [t.tokens.tolist() for t in session.trajectories("t", {})] == before
                assert session.turns == turn
            reply = await session.complete(messages)
            messages += [reply.message(), tool("x")]

    asyncio.run(run())
    clean = session_of(chat, PlayedEngine(chat, ["one", "two"]))

    async def plain() -> None:
        first = await clean.complete([USER])
        await clean.complete([USER, first.message(), tool("x")])

    asyncio.run(plain())
    assert only(session.trajectories("t", {})).tokens.tolist() == only(clean.trajectories("t", {})).tokens.tolist()


def test_a_cancelled_call_leaves_nothing(chat: Chat) -> None:
    class Hanging(PlayedEngine):
        async def generate(self, request: Any) -> Any:
            if not self.turns:
                entered.set()
                await asyncio.Event().wait()
            return await super().generate(request)

    async def run() -> None:
        call = asyncio.create_task(session.complete([USER]))
        await entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert session.trajectories("t", {}) == ()
        engine.turns.append("one")
        assert (await session.complete([USER])).content == "one"

    entered = asyncio.Event()
    engine = Hanging(chat, [])
    session = session_of(chat, engine)
    asyncio.run(run())
    assert only(session.trajectories("t", {})).n_turns == 1


def test_a_segment_in_which_nothing_was_sampled_is_no_trajectory(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, [Raw([]), "said"]))
    asyncio.run(session.complete([USER]))
    asyncio.run(session.complete([{"role": "user", "content": "fork"}]))
    t = only(session.trajectories("t", {}))
    assert (t.segment, t.n_turns) == (0, 1), "segments are numbered without gaps: their files are"


# --- calls -----------------------------------------------------------------------------------------------------------


def test_several_calls_in_a_turn_have_ids_of_their_own(chat: Chat) -> None:
    text = "a" + tool_call("edit", '{"x": 1}') + "b" + tool_call("nope", '"raw"') + "<tool_call>{not json}</tool_call>c"
    session = session_of(chat, PlayedEngine(chat, [text, tool_call("edit", "{}")]))

    async def run() -> None:
        reply = await session.complete([USER])
        assert reply.content == "abc"
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [
            ("edit", '{"x": 1}'),
            ("nope", "raw"),
            ("malformed", "{not json}"),
        ]
        ids = [c.id for c in reply.tool_calls]
        more = [USER, reply.message(), *(tool(f"r{i}", i) for i in ids)]
        ids += [c.id for c in (await session.complete(more)).tool_calls]
        assert len(set(ids)) == 4

    asyncio.run(run())
    assert only(session.trajectories("t", {})).n_turns == 2


def test_seeds_and_request_ids_differ_from_turn_to_turn(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one", "two"])
    session = session_of(chat, engine, "ep", seed=7)

    async def run() -> None:
        reply = await session.complete([USER])
        await session.complete([USER, reply.message(), tool("x")])

    asyncio.run(run())
    assert [(r.seed, r.request_id) for r in engine.requests] == [(7, "ep/0"), (8, "ep/1")]
    assert all(r.stop_token_ids == chat.stop_ids for r in engine.requests)


def test_the_sampling_contract_is_sent_and_named(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["one"])
    session = session_of(chat, engine)
    asyncio.run(session.complete([USER]))
    assert engine.requests[0].sampling == SamplingContract(1.0, 1.0, -1)
    t = only(session.trajectories("t", {"sampling": "not this"}))
    assert t.info["sampling"] == sampling_hash(SamplingContract())
    names = {sampling_hash(SamplingContract(*c)) for c in [(1.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.9, -1), (1.0, 1.0, 20)]}
    assert len(names) == 4
