"""The gateway over real HTTP: good calls, and one clear error for everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from harness.chat import Chat
from harness.errors import ConfigError, EngineError
from harness.gateway import BODY_LIMIT, Endpoint, Gateway
from tests.support import USER, PlayedEngine, Raw, session_of, tool_call

Body = Callable[[aiohttp.ClientSession, Gateway], Awaitable[None]]


def serve(test: Body) -> None:
    async def run() -> None:
        gateway = Gateway()
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as client:
                await test(client, gateway)
        finally:
            await gateway.close()

    asyncio.run(run())


async def post(
    client: aiohttp.ClientSession, end: Endpoint, body: Any = None, *, key: str | None = None, **more: Any
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {end.secret if key is None else key}"}
    if body is not None:
        more["json"] = body
    async with client.post(f"{end.url}/chat/completions", headers=headers, **more) as response:
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


def test_a_good_call(chat: Chat) -> None:
    session = session_of(chat, PlayedEngine(chat, ["hello", "x" + tool_call("edit", '{"a": 1}')]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            status, answer = await post(client, end, {"model": "m", "messages": [USER], "temperature": 0.1, "stream": False})
            assert status == 200
            assert (answer["object"], answer["model"]) == ("chat.completion", "m")
            (choice,) = answer["choices"]
            assert choice == {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
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
            host, port = end.url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            path = "/" + end.url.split("/", 3)[3] + "/chat/completions"
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n".encode())
            writer.write(b"Authorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n{}")
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
    {"messages": [USER], "stream": True},
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
            status, answer = await post(client, end, {"messages": [USER]})
            assert status == 200, "after the engine came back"
            more = [USER, answer["choices"][0]["message"], USER]
            for _ in range(2):
                status, answer = await post(client, end, {"messages": more})
                assert (status, answer["error"]["code"]) == (400, "episode_end")
            more = [*more, {"role": "assistant", "content": "?"}, USER]
            status, answer = await post(client, end, {"messages": more})
            assert (status, answer["error"]["code"]) == (400, "episode_end")
            assert "max_turns" in answer["error"]["message"]

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

    serve(test)
