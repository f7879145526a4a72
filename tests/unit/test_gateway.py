"""The gateway over real HTTP: good calls, and one clear error for everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, ClassVar

import aiohttp
import pytest

from harness.chat import Chat
from harness.errors import ConfigError, EngineError
from harness.gateway import BODY_LIMIT, Endpoint, Gateway
from harness.parsers import hermes
from harness.protocols import SamplingContract
from harness.session import TokenSession
from harness.task import Limits, Termination
from tests.support import USER, PlayedEngine, Raw, session_of, tool_call
from tests.unit.gateway_support import BODIES, connect, head, post, serve


def test_a_good_call(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["hello", "x" + tool_call("edit", '{"a": 1}')]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            status, answer = await post(client, end, {"model": "m", "messages": [USER], "temperature": 0.1, "stream": False})
            assert status == 200
            assert (answer["object"], answer["model"]) == ("chat.completion", "m")
            (choice,) = answer["choices"]
            message = {"role": "assistant", "content": "hello"}
            assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            more = [USER, choice["message"], USER]
            status, answer = await post(client, end, {"messages": more})
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            function = {"name": "edit", "arguments": '{"a": 1}'}
            assert choice["message"]["tool_calls"] == [{"id": "call_1_0", "type": "function", "function": function}]

    serve(test)
    (t,) = session.trajectories("t", {})
    assert t.n_turns == 2, "the echo that went through JSON extends the same conversation"


def test_a_client_that_asks_again_gets_the_same_answer(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["hello"]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            answers = await asyncio.gather(*(post(client, end, {"messages": [USER]}) for _ in range(5)))
            assert {(s, a["choices"][0]["message"]["content"]) for s, a in answers} == {(200, "hello")}

    serve(test)
    assert session.turns == 1


def test_keys_and_episodes(chat: Chat) -> None:
    mine, other = (session_of(chat, PlayedEngine(chat, ["x"])) for _ in range(2))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(mine) as a, gateway.open(other) as b:
            assert a.url != b.url
            assert a.secret != b.secret
            for key in ("", "x", b.secret, a.secret[:-1], a.secret + "x", "\u00ff"):
                status, answer = await post(client, a, {"messages": [USER]}, key=key)
                assert status == 401, key
                assert "key" in answer["error"]["message"]
            nowhere = Endpoint(a.url.replace(a.url.split("/")[3], "0" * 16), a.secret)
            assert (await post(client, nowhere, {"messages": [USER]}))[0] == 401
            assert (await post(client, nowhere, {"messages": [USER]}, key=""))[0] == 401
        assert (await post(client, a, {"messages": [USER]}))[0] == 401, "gone when the episode is over"
        assert (mine.turns, other.turns) == (0, 0)

    serve(test)


def test_a_key_that_is_no_text(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            reader, writer = await connect(end)
            written = head(end, "Content-Length: 2", "Connection: close") + b"{}"
            writer.write(written.replace(end.secret.encode(), b"\xff\xfe"))
            answer = await reader.read()
            writer.close()
            assert answer.split(b" ", 2)[1] in (b"400", b"401")

    serve(test)


BAD: list[Any] = [
    None,
    5,
    [],
    "text",
    {},
    {"messages": None},
    {"messages": "hi"},
    {"messages": {"role": "user"}},
    {"messages": ["hi"]},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": 5, "content": "x"}]},
    {"messages": []},
    {"messages": [USER], "stream": "yes"},
    {"messages": [USER], "stream": True, "stream_options": 5},
    {"messages": [USER], "tools": 5},
    {"messages": [USER], "tools": "edit"},
    {"messages": [USER], "tools": ["edit"]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": 5}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["x"]}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, USER]},
]


@pytest.mark.parametrize("body", BAD, ids=repr)
@pytest.mark.parametrize("later", [False, True])
def test_a_bad_body_is_a_bad_request_and_records_nothing(chat: Chat, body: Any, later: bool) -> None:
    """As the first call, and as one after a good one (whose echo is then looked at)."""
    session = session_of(chat, PlayedEngine(chat, ["x", "unwanted"]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            if later:
                assert (await post(client, end, {"messages": [USER]}))[0] == 200
            status, answer = await (post(client, end, data="null") if body is None else post(client, end, body))
            assert status == 400, answer
            assert answer["error"]["message"]
        assert session.turns == later

    serve(test)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"messages": [', b"[" * 100_000])
def test_what_is_not_json_is_a_bad_request(chat: Chat, raw: bytes) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            status, answer = await post(client, end, data=raw)
            assert (status, answer["error"]["message"][:11]) == (400, "bad request")

    serve(test)


def test_a_body_that_is_too_large(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["x"]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            status, _ = await post(client, end, data=b" " * (BODY_LIMIT + 1))
            assert status == 413
            assert (await post(client, end, {"messages": [USER]}))[0] == 200, "the server lives on"

    serve(test)


def test_the_end_of_an_episode_and_a_lost_engine(chat: Chat) -> None:
    engine = PlayedEngine(chat, [EngineError("no replica"), "one", Raw([5], "length")])
    session = session_of(chat, engine, max_turns=2)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            status, answer = await post(client, end, {"messages": [USER]})
            assert (status, answer["error"]["message"]) == (503, "no replica")
            assert isinstance(end.fault, EngineError)
            status, answer = await post(client, end, {"messages": [USER]})
            assert status == 200, "after the engine came back"
            assert (end.calls, end.fault, end.ended.is_set()) == (1, None, False)
            more = [USER, answer["choices"][0]["message"], USER]
            for _ in range(2):
                status, answer = await post(client, end, {"messages": more})
                assert (status, answer["error"]["code"]) == (400, "episode_end")
            assert end.ended.is_set()
            assert end.termination is Termination.MAX_TOKENS_PER_TURN
            more = [*more, {"role": "assistant", "content": "?"}, USER]
            status, answer = await post(client, end, {"messages": more})
            assert (status, answer["error"]["code"]) == (400, "episode_end")
            assert end.calls == 1

    serve(test)
    assert session.turns == 2


def test_a_template_that_refuses_is_a_bad_request(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            status, answer = await post(client, end, {"messages": [{"role": "assistant", "tool_calls": [{}]}]})
            assert status == 400
            assert answer["error"]["message"]

    serve(test)


def test_half_a_surrogate_in_a_message(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, ["x"]))) as end:
            raw = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
            assert (await post(client, end, data=raw))[0] == 200

    serve(test)


def test_sessions_of_two_episodes_never_mix(chat: Chat) -> None:
    n = 8
    engines = [PlayedEngine(chat, [f"{i}.{turn}" for turn in range(4)]) for i in range(n)]
    sessions = [session_of(chat, engine, f"e{i}") for i, engine in enumerate(engines)]

    async def agent(client: aiohttp.ClientSession, gateway: Gateway, i: int) -> None:
        async with gateway.open(sessions[i]) as end:
            messages = [{"role": "user", "content": f"task {i}"}]
            for turn in range(4):
                status, answer = await post(client, end, {"messages": messages})
                assert status == 200
                reply = answer["choices"][0]["message"]
                assert reply["content"] == f"{i}.{turn}"
                messages += [reply, {"role": "user", "content": f"more {i}"}]

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        await asyncio.gather(*(agent(client, gateway, i) for i in range(n)))

    serve(test)
    for i, session in enumerate(sessions):
        (t,) = session.trajectories("t", {})
        text = chat.decode(t.tokens.tolist())
        assert t.n_turns == 4
        assert all(f"task {j}" not in text and f"more {j}" not in text for j in range(n) if j != i)


def test_a_port_in_use_is_the_user_s_to_correct() -> None:
    async def run(port: int) -> None:
        await Gateway().start(port)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            asyncio.run(run(port))
    assert caught.value.hint


def test_it_listens_on_loopback_only(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            assert end.url.startswith("http://127.0.0.1:")
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.2", int(end.url.split("/")[2].split(":")[1]))

    serve(test)


@pytest.mark.parametrize("route", BODIES)
def test_every_shape_over_http(chat: Chat, route: str) -> None:
    """Whole and streamed: the second is a repeated request, so that both hold the one reply."""
    session = session_of(chat, PlayedEngine(chat, ["hello"]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            assert end.anthropic_url + "/v1" == end.url
            status, answer = await post(client, end, BODIES[route], route=route, key="", headers={"x-api-key": end.secret})
            assert status == 200
            assert "hello" in json.dumps(answer)
            status, events = await post(client, end, {**BODIES[route], "stream": True}, route=route)
            assert status == 200
            assert '"hello"' in events
            assert all(part.startswith(("data: ", "event: ")) for part in events.split("\n\n") if part)
            assert end.calls == 2

    serve(test)
    assert session.turns == 1


@pytest.mark.parametrize("route", BODIES)
def test_errors_come_in_the_shape_of_the_client(chat: Chat, route: str) -> None:
    engine = PlayedEngine(chat, [EngineError("no replica"), Raw([5], "length")])

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, engine)) as end:
            found = {}
            for status, body, key in (
                (401, BODIES[route], "wrong"),
                (400, {"model": "m"}, None),
                (503, BODIES[route], None),
                (400, {**BODIES[route], "stream": True}, None),
            ):
                got, answer = await post(client, end, body, key=key, route=route)
                assert got == status
                assert answer["error"]["message"]
                assert (answer.get("type") == "error") == (route == "messages")
                found[answer["error"]["message"]] = answer["error"]
            assert {error["type"] for error in found.values()} == {
                "authentication_error",
                "invalid_request_error",
                "api_error" if route == "messages" else "server_error",
            }
            end_of_episode = found["the episode is over: max_tokens_per_turn"]
            assert route == "messages" or end_of_episode["code"] == "episode_end"

    serve(test)


def test_sampling_is_the_session_s_and_counted(chat: Chat) -> None:
    class Counting(TokenSession):
        facts: ClassVar[list[str]] = []

        def count(self, fact: str, n: int = 1) -> None:
            self.facts += [fact] * n

    engine = PlayedEngine(chat, ["x"] * 9)
    session = Counting(chat, engine, hermes, Limits(), "e")
    neutral = [{"temperature": 1, "top_p": 1.0, "seed": None, "presence_penalty": 0}, {"max_tokens": 5}, {"top_k": -1}]
    other = [{"temperature": 0}, {"top_p": 0.9}, {"seed": 1}, {"top_k": 20}, {"logit_bias": {"5": 1}}, {"min_p": 0.1}]

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            for i, more in enumerate([*neutral, *other]):
                body = {"messages": [{"role": "user", "content": f"{i}"}], **more}
                assert (await post(client, end, body))[0] == 200
                assert len(session.facts) == max(0, i + 1 - len(neutral)), more

    serve(test)
    assert set(session.facts) == {"ignored_sampling"}
    assert {request.sampling for request in engine.requests} == {SamplingContract()}


def test_models_and_routes_that_are_not_there(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            async with client.get(f"{end.url}/models", headers={"x-api-key": end.secret}) as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
            async with client.get(f"{end.url}/models") as response:
                assert response.status == 401
            for method, route in (("GET", "chat/completions"), ("POST", "embeddings"), ("POST", "messages/count_tokens")):
                async with client.request(method, f"{end.url}/{route}") as response:
                    assert response.status == 404
                    assert "/v1/chat/completions" in (await response.json())["error"]["message"]

    serve(test)
