"""A model behind an endpoint: a real server on this machine answers. What the endpoint fails at is never reward 0."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError
from tenacity import Future, RetryCallState

from harness.completions import reply_of, seconds, sendable
from harness.endpoint import KEY, Endpoint, EndpointConfig, Unanswered
from harness.endpoint_session import EndpointSession
from harness.errors import ConfigError, EngineError, EpisodeEnd, SandboxError
from harness.protocols import ToolCall
from harness.task import Limits, Termination, Usage
from tests.support import USER
from tests.unit.endpoint_support import (
    FULL,
    HANGS,
    TOOL,
    acts,
    answer,
    ended,
    longer,
    once,
    refusal,
    talk,
)

SECRET = "only-for-tests-2718"


# --- what is asked and what comes back -------------------------------------------------------------------------------


def test_a_request_has_the_settings_and_each_turn_its_seed() -> None:
    limits = Limits(max_tokens_per_turn=77)
    _, server, session = talk([answer()], lambda s: longer(s, 2), limits=limits, seed=5, temperature=0.5, top_p=0.9)
    first, second = server.requests
    settings = {"model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 77}
    assert first == {**settings, "messages": [USER], "seed": 5}, "no empty list of tools"
    assert second == {**settings, "messages": [USER, {"role": "assistant", "content": "hello"}, USER], "seed": 6}
    assert session.turns == 2


def test_without_a_seed_none_is_sent_and_extra_fields_come_and_go() -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    _, server, _ = talk([answer()], lambda s: s.complete([USER], [TOOL]), extra=extra)
    (body,) = server.requests
    assert body["tools"] == [TOOL]
    assert body["max_completion_tokens"] == 9 and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"seed", "max_tokens"} & set(body)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_carried(name: str) -> None:
    reply, _, _ = talk([answer("42", **{name: "let me see"})], once)
    assert (reply.content, reply.reasoning, reply.finish_reason) == ("42", "let me see", "stop")
    assert reply.message()["reasoning_content"] == "let me see"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', '{"a": 1}'), ("{broken", "{broken"), ("", ""), (None, "{}"), ({"a": 1}, '{"a": 1}')],
)
def test_arguments_are_passed_on_as_they_were_written(arguments: Any, expected: str) -> None:
    reply, _, _ = talk([acts(arguments)], once)
    assert reply.tool_calls == (ToolCall("c1", "act", expected),)


def test_a_call_without_an_id_is_named_by_its_turn() -> None:
    made = acts()
    del made["choices"][0]["message"]["tool_calls"][0]["id"]
    assert reply_of(json.dumps(made), 3).tool_calls[0].id == "call_3_0"


def test_half_a_character_is_no_text() -> None:
    assert reply_of(json.dumps(answer("x\ud83d")), 0).content == "x?"


def test_broken_arguments_of_earlier_turns_go_out_as_an_object() -> None:
    """vLLM reads them, and would refuse every later request of the episode."""
    broken = reply_of(json.dumps(acts("{broken")), 0).message()
    sound = reply_of(json.dumps(acts('{"a": 1}')), 0).message()
    assert sendable(broken)["tool_calls"][0]["function"] == {"name": "act", "arguments": '{"": "{broken"}'}
    assert broken["tool_calls"][0]["function"]["arguments"] == "{broken", "the agent's own is as it was"
    assert sendable(sound) == sound and sendable(USER) == USER


def test_the_last_request_repeated_gets_the_same_reply() -> None:
    async def twice(session: EndpointSession) -> tuple[Any, Any]:
        return await session.complete([USER], [TOOL]), await session.complete([USER], [TOOL])

    (first, second), server, session = talk([answer("a"), answer("b")], twice)
    assert first == second
    assert len(server.requests) == session.turns == 1


def test_it_keeps_nothing_to_be_resumed_from() -> None:
    session = EndpointSession(Endpoint(EndpointConfig(url="http://x/v1", model="m"), 1), Limits(), "e7")
    assert (session.episode_id, session.folder, session.turns, session.ended) == ("e7", None, 0, None)
    assert session.trajectories("t", {}) == () and session.usage == Usage(0, 0, 0)
    session.count("seen", 2)
    assert session.facts == {"seen": 2}
    with pytest.raises(SandboxError, match="e7"):
        session.restore()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_max_turns() -> None:
    end, server, _ = talk([answer()], ended(lambda s: longer(s, 9)), limits=Limits(max_turns=3))
    assert (end, len(server.requests)) == (Termination.MAX_TURNS, 3)


def test_a_reply_that_is_cut_ends_the_episode_and_counts() -> None:
    end, _, session = talk([answer(said=8, finish="length")], ended(once), limits=Limits(max_tokens_per_turn=8))
    assert end == Termination.MAX_TOKENS_PER_TURN
    assert session.usage == Usage(turns=1, tokens=18, action_tokens=8)


def test_a_cut_reply_repeated_is_cut_again() -> None:
    async def twice(session: EndpointSession) -> None:
        with pytest.raises(EpisodeEnd):
            await once(session)
        await once(session)

    end, server, _ = talk([answer(finish="length")], ended(twice))
    assert (end, len(server.requests)) == (Termination.MAX_TOKENS_PER_TURN, 1)


@pytest.mark.parametrize(("total", "finish", "fits"), [(20, "stop", True), (21, "stop", False), (20, "length", False)])
def test_max_context_goes_by_the_endpoint_s_count(total: int, finish: str, fits: bool) -> None:
    limits, script = Limits(max_context=20), [answer(prompt=10, said=total - 10, finish=finish)]
    if fits:
        assert talk(script, once, limits=limits)[0].content == "hello"
    else:
        assert talk(script, ended(once), limits=limits)[0] == Termination.MAX_CONTEXT


def test_only_what_is_left_of_the_context_is_asked_for() -> None:
    script = [answer(prompt=60, said=30), answer(prompt=92, said=8)]
    end, server, _ = talk(script, ended(lambda s: longer(s, 3)), limits=Limits(max_context=100, max_tokens_per_turn=50))
    assert end == Termination.MAX_CONTEXT
    assert [body["max_tokens"] for body in server.requests] == [50, 10], "and the third has no room: it is not asked"


def test_another_conversation_has_all_the_room() -> None:
    async def fork(session: EndpointSession) -> None:
        await session.complete([USER])
        await session.complete([{"role": "user", "content": "summary"}])

    _, server, session = talk([answer(prompt=60, said=30)], fork, limits=Limits(max_context=100, max_tokens_per_turn=50))
    assert [body["max_tokens"] for body in server.requests] == [50, 50]
    assert session.usage == Usage(turns=2, tokens=90, action_tokens=60)


@pytest.mark.parametrize("number", range(len(FULL)))
def test_a_prompt_that_is_too_long_for_the_endpoint_ends_the_episode(number: int) -> None:
    limits = Limits(max_tokens_per_turn=4)
    end, server, session = talk([FULL[number]], ended(once), limits=limits)
    assert (end, session.turns) == (Termination.MAX_CONTEXT, 0)
    assert [body["max_tokens"] for body in server.requests] == [4, 2, 1]


def test_a_request_that_might_become_too_long_is_asked_again_for_less() -> None:
    """vLLM refuses a prompt that fits if the most that may follow does not: no reason to end the episode."""

    def serve(finish: str) -> Callable[[dict[str, Any]], Any]:
        return lambda body: FULL[0] if body["max_tokens"] > 3 else answer(said=2, finish=finish)

    reply, server, session = talk([serve("stop")], once, limits=Limits(max_tokens_per_turn=8))
    assert (reply.content, session.turns, len(server.requests)) == ("hello", 1, 3)
    end, _, _ = talk([serve("length")], ended(once), limits=Limits(max_tokens_per_turn=8))
    assert end == Termination.MAX_CONTEXT, "what cut it was the context"


def test_usage_is_the_last_conversation_and_all_that_was_said() -> None:
    thought = answer(prompt=30, said=4)
    thought["usage"]["total_tokens"] = 41  # thoughts that `completion_tokens` leaves out
    _, _, session = talk([answer(prompt=10, said=5), thought], lambda s: longer(s, 2))
    assert session.usage == Usage(turns=2, tokens=41, action_tokens=16)


def test_an_endpoint_that_counts_nothing_is_said_so_once(caplog: pytest.LogCaptureFixture) -> None:
    silent = answer()
    del silent["usage"]
    _, _, session = talk([silent], lambda s: longer(s, 3))
    assert session.usage == Usage(turns=3, tokens=0, action_tokens=0)
    assert len([r for r in caplog.records if "counts no tokens" in r.message]) == 1


# --- failures --------------------------------------------------------------------------------------------------------

PASSING: list[Any] = [
    *(refusal(status) for status in (408, 409, 429, 500, 502, 503, 529)),
    web.Response(text="<html>"),
    web.Response(text=json.dumps(answer())[:40]),
    web.Response(text="[" * 5_000),
    web.Response(body=b"\xff\xfe\x00"),
    {},
    {"choices": []},
    {"choices": None},
    {"choices": [{}]},
    {"choices": [{"message": None}]},
    {"error": {"message": "upstream"}},
    [1],
    answer(7),
    answer(["parts"]),
    answer(tool_calls=[7]),
    answer(tool_calls=7),
    answer(tool_calls=[{"id": "c"}]),
    answer(tool_calls=[{"id": "c", "function": {"name": 7, "arguments": "{}"}}]),
    answer(tool_calls=[{"id": "c", "function": {"name": "act", "arguments": 7}}]),
    answer(tool_calls=[{"id": 7, "function": {"name": "act", "arguments": "{}"}}]),
    answer(reasoning_content=["x"]),
    {**answer(), "usage": {"prompt_tokens": "many"}},
]


@pytest.mark.parametrize("number", range(len(PASSING)))
def test_what_may_pass_is_asked_again_and_in_the_end_an_engine_error(number: int) -> None:
    reply, server, session = talk([PASSING[number], PASSING[number], answer()], once)
    assert (reply.content, len(server.requests), session.turns) == ("hello", 3, 1)

    async def lost(session: EndpointSession) -> EngineError:
        with pytest.raises(EngineError, match="no reply in 3 attempts") as caught:
            await once(session)
        return caught.value

    error, server, session = talk([PASSING[number]], lost)
    assert (len(server.requests), session.turns) == (3, 0)
    assert "'m'" in error.hint


def test_a_timeout_is_asked_again() -> None:
    reply, server, _ = talk([HANGS, answer()], once, timeout_s=0.3)
    assert (reply.content, len(server.requests)) == ("hello", 2)


@pytest.mark.parametrize(
    "url", ["http://:/v1", "http:///v1", "http://", "http://a:b/v1", "ftp://host/v1", "http://user@host/v1"]
)
def test_an_address_of_nobody(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        EndpointConfig(url=url, model="m")


def test_addresses() -> None:
    for url in ("http://localhost/v1", "https://example.org", "http://10.0.0.1:8000/v1/", "http://[::1]:8000/v1"):
        assert EndpointConfig(url=url, model="m").url == url


def test_the_first_repetition_is_said_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    talk([PASSING[0], PASSING[0], answer()], once)
    assert [record.message.endswith("; asking again") for record in caplog.records if record.name == "sao"] == [True]


def test_nobody_there() -> None:
    async def main() -> None:
        async with Endpoint(
            EndpointConfig(url="http://127.0.0.1:9/v1", model="m", attempts=2, longest_wait_s=0), 1
        ) as endpoint:
            await once(EndpointSession(endpoint, Limits(), "e"))

    with pytest.raises(EngineError, match=r"127.0.0.1:9/v1 gave no reply in 2 attempts"):
        asyncio.run(main())


def test_no_attempt_begins_when_the_episode_s_time_is_over() -> None:
    """Or the clock would end the episode, and what the endpoint failed at would be scored."""

    async def lost(session: EndpointSession) -> None:
        with pytest.raises(EngineError, match="in 1 attempts"):
            await once(session)

    _, server, _ = talk([refusal(503)], lost, limits=Limits(wall_s=0.0))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "hint"), [(400, "model"), (401, KEY), (403, KEY), (404, "model"), (422, "model"), (308, "URL")]
)
def test_another_refusal_is_the_user_s_to_correct(status: int, hint: str) -> None:
    async def refused(session: EndpointSession) -> ConfigError:
        with pytest.raises(ConfigError, match=f"HTTP {status}: there is no model m") as caught:
            await once(session)
        return caught.value

    error, server, _ = talk([refusal(status, "there is no model m", Location="http://127.0.0.1:9/")], refused)
    assert hint in error.hint and len(server.requests) == 1


def test_how_long_to_wait_is_the_endpoint_s_word_within_a_limit() -> None:
    def wait(after: float, longest: float) -> float:
        endpoint = Endpoint(EndpointConfig(url="http://x", model="m", longest_wait_s=longest), 1)
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.outcome = Future(1)
        state.outcome.set_exception(Unanswered("HTTP 429", after))
        return endpoint._wait(state)

    assert wait(20.0, 60.0) == 20.0
    assert wait(900.0, 60.0) == 60.0
    assert 0.0 <= wait(0.0, 60.0) <= 1.0


def test_a_time_to_wait_is_in_seconds_or_a_date() -> None:
    assert seconds("7") == 7.0 and seconds("0.5") == 0.5
    assert 50 < seconds(format_datetime(datetime.now(UTC) + timedelta(seconds=60))) <= 60
    assert seconds("") == seconds("soon") == 0.0


def test_the_endpoint_s_word_reaches_the_wait() -> None:
    found = Endpoint(EndpointConfig(url="http://x", model="m"), 1)._refusal(429, "slow down", "33")
    assert isinstance(found, Unanswered) and found.after_s == 33.0


@pytest.mark.parametrize(
    "bad", [{"url": "localhost:8000"}, {"url": "http://me:pw@x/v1"}, {"model": ""}, {"top_p": 0}, {"x": 1}]
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EndpointConfig(**{"url": "http://x/v1", "model": "m"} | bad)


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 401, 500])
def test_the_key_is_sent_and_said_nowhere(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY, SECRET)
    said: list[str] = []

    async def ask(session: EndpointSession) -> None:
        try:
            said.append(repr(await once(session)))
        except (ConfigError, EngineError) as error:
            said.extend([str(error), error.hint, repr(error.__cause__), repr(vars(error))])

    script = [answer()] if status == 200 else [refusal(status, f"Incorrect API key provided: {SECRET}")]
    _, server, session = talk(script, ask)
    assert set(server.keys) == {f"Bearer {SECRET}"}
    assert said and SECRET not in "".join(said) + caplog.text + repr(session._endpoint.config)
    monkeypatch.delenv(KEY)
    _, server, _ = talk([answer()], once)
    assert server.keys == [None]
