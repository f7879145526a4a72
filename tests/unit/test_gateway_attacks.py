"""The gateway against slow, dead, greedy and hostile clients, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import aiohttp
import pytest

from harness.chat import Chat
from harness.errors import EngineError, InvariantError
from harness.gateway import BODY_LIMIT, Endpoint, Gateway, endpoint, server
from harness.gateway.shape import DEPTH
from harness.protocols import GenerateRequest, Generation
from tests.support import USER, PlayedEngine, session_of
from tests.unit.gateway_support import BODIES, HeldEngine, connect, head, post, serve, status_of

HI = json.dumps({"messages": [USER]}).encode()


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", BODIES)
def test_an_episode_that_is_not_there_looks_like_a_wrong_key(chat: Chat, route: str) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            nowhere = Endpoint(end.url.replace(end.url.split("/")[3], "0" * 16), end.secret)
            answers = [await post(client, at, BODIES[route], route=route, key="x") for at in (end, nowhere)]
            answers.append(await post(client, nowhere, BODIES[route], route=route))
            assert answers[0][0] == 401
            assert answers[0] == answers[1] == answers[2]

    serve(test)


def test_one_connection_serves_two_episodes_by_their_secrets(chat: Chat) -> None:
    """Kept alive and pipelined: both requests are written before the first answer is read."""
    mine, other = session_of(chat, PlayedEngine(chat, ["mine"]), "a"), session_of(chat, PlayedEngine(chat, ["other"]), "b")

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(mine) as a, gateway.open(other) as b:
            reader, writer = await connect(a)
            length = f"Content-Length: {len(HI)}"
            stolen = head(a, length).replace(a.secret.encode(), b.secret.encode())
            writer.write(head(a, length) + HI + head(b, length) + HI + stolen + HI)
            for expected, said in ((200, b'"mine"'), (200, b'"other"'), (401, b"wrong key")):
                answer = await reader.readuntil(b"\r\n\r\n")
                size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(size)
                assert int(answer.split(b" ", 2)[1]) == expected
                assert said in body
            writer.close()

    serve(test)
    assert (mine.turns, other.turns) == (1, 1)


def test_secrets_and_bodies_are_never_logged(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets: list[str] = []

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        engine = PlayedEngine(chat, ["x", EngineError("no replica")])
        async with gateway.open(session_of(chat, engine, "episode-7")) as end:
            secrets.append(end.secret)
            private = {"role": "user", "content": "private words"}
            for body in ({"messages": [private]}, {"messages": [private, private]}, {"messages": "private words"}):
                await post(client, end, body)
            assert (await post(client, end, {"messages": [private]}, key=end.secret + "x"))[0] == 401

    serve(test)
    assert "episode-7: a model call failed: no replica" in caplog.text
    assert secrets[0] not in caplog.text
    assert "private" not in caplog.text


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_not_read(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            reader, writer = await connect(end)
            writer.write(head(end, f"Content-Length: {10**12}"))
            assert await status_of(reader) == 413
            await reader.read()
            assert reader.at_eof(), "and the connection is closed"
            writer.close()

    serve(test)


def test_a_body_without_end_is_cut_at_the_limit(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            reader, writer = await connect(end)
            writer.write(head(end, "Transfer-Encoding: chunked"))
            answer = asyncio.create_task(status_of(reader))
            chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
            sent = 0
            while not answer.done() and sent < 50 * BODY_LIMIT:
                try:
                    writer.write(chunk)
                    await writer.drain()
                except ConnectionError:
                    break
                sent += len(chunk)
            assert await answer == 413
            writer.close()

    serve(test)


def test_a_small_body_that_unpacks_to_a_large_one(chat: Chat) -> None:
    bomb = gzip.compress(b" " * (4 * BODY_LIMIT))
    assert len(bomb) < BODY_LIMIT / 100

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            status, _ = await post(client, end, data=bomb, headers={"Content-Encoding": "gzip"})
            assert status == 413

    serve(test)


def test_a_client_that_stalls_in_its_body(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, ["x"]))) as end:
            reader, writer = await connect(end)
            writer.write(head(end, "Content-Length: 100") + b"{")
            assert await status_of(reader) == 408
            await reader.read()
            writer.close()
            monkeypatch.undo()
            assert (await post(client, end, {"messages": [USER]}))[0] == 200

    serve(test)


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("Transfer-Encoding: chunked", b"xyz\r\n"),
        ("Content-Encoding: gzip\r\nContent-Length: 4", b"nope"),
        ("Content-Encoding: nonsense\r\nContent-Length: 2", b"{}"),
        ("Content-Length: -1", b"{}"),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}"),
    ],
)
def test_a_body_that_is_packed_wrongly(chat: Chat, caplog: pytest.LogCaptureFixture, line: str, body: bytes) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, PlayedEngine(chat, []))) as end:
            reader, writer = await connect(end)
            writer.write(head(end, line) + body)
            assert await status_of(reader) == 400
            writer.close()

    serve(test)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


DEEP = b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1) + b"]}"
NOT_A_BODY = {
    "nothing": b"",
    "half": b'{"messages": [',
    "no text": b"\xff\xfe\x00",
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "deep": DEEP,
    "nan": b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": NaN}]}',
    "long number": b'{"messages": ' + b"9" * 10_000 + b"}",
    "a list": b"[]",
    "null": b"null",
}


@pytest.mark.parametrize("raw", NOT_A_BODY.values(), ids=NOT_A_BODY)
@pytest.mark.parametrize("route", BODIES)
def test_what_is_no_body(chat: Chat, route: str, raw: bytes) -> None:
    session = session_of(chat, PlayedEngine(chat, []))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            status, answer = await post(client, end, data=raw, route=route)
            assert status == 400
            assert answer["error"]["message"].startswith("bad request: the body is")

    serve(test)


def test_a_large_body_is_taken(chat: Chat) -> None:
    """Over the size from which it is read off the event loop."""
    text = "word " * 300_000
    session = session_of(chat, PlayedEngine(chat, ["x"]), max_context=10**7)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            assert (await post(client, end, {"messages": [{"role": "user", "content": text}]}))[0] == 200

    serve(test)
    (t,) = session.trajectories("t", {})
    assert text in chat.decode(t.tokens.tolist())


# --- clients that go, and episodes that end --------------------------------------------------------------------------


def test_a_client_that_leaves_finds_its_reply_when_it_asks_again(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    engine = HeldEngine(chat, ["hello"])
    session = session_of(chat, engine)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            _, writer = await connect(end)
            writer.write(head(end, f"Content-Length: {len(HI)}") + HI)
            await engine.started.acquire()
            writer.transport.abort()
            again = asyncio.create_task(post(client, end, {"messages": [USER]}))
            engine.go.set()
            status, answer = await again
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")

    serve(test)
    assert engine.calls == session.turns == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_leaves_in_its_body(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(chat, PlayedEngine(chat, ["hello"]))

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            for _ in range(5):
                _, writer = await connect(end)
                writer.write(head(end, "Content-Length: 100") + b"{")
                await writer.drain()
                writer.transport.abort()
            assert (await post(client, end, {"messages": [USER]}))[0] == 200

    serve(test)
    assert session.turns == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_duplicates_at_the_same_time_are_one_engine_call(chat: Chat) -> None:
    engine = HeldEngine(chat, ["hello"])
    session = session_of(chat, engine)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            asked = [asyncio.create_task(post(client, end, {"messages": [USER]})) for _ in range(8)]
            await engine.started.acquire()
            engine.go.set()
            answers = await asyncio.gather(*asked)
            assert {(s, a["choices"][0]["message"]["content"]) for s, a in answers} == {(200, "hello")}
            assert end.calls == 8

    serve(test)
    assert engine.calls == session.turns == 1


def test_closing_an_episode_ends_its_calls_and_records_nothing_more(chat: Chat) -> None:
    engine = HeldEngine(chat, ["late"] * 3)
    session = session_of(chat, engine)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            asked = [asyncio.create_task(post(client, end, {"messages": [USER]})) for _ in range(3)]
            reader, writer = await connect(end)
            writer.write(head(end, f"Content-Length: {len(HI)}", "Expect: 100-continue"))
            assert await status_of(reader) == 100, "it waits for the body"
            await engine.started.acquire()
        assert session.turns == 0
        engine.go.set()
        for status, answer in await asyncio.gather(*asked):
            assert status in (401, 410), "410 where it was running, 401 where it had not come in"
            assert "episode" in answer["error"]["message"]
        writer.write(HI)
        assert await status_of(reader) == 410, "nor one whose body comes late"
        writer.close()
        assert engine.calls == 1

    serve(test)
    assert session.turns == 0
    assert session.trajectories("t", {}) == ()


def test_a_gateway_that_stops_leaves_nothing_to_be_recorded(chat: Chat) -> None:
    engine = HeldEngine(chat, ["late"])
    session = session_of(chat, engine)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session) as end:
            asked = asyncio.create_task(post(client, end, {"messages": [USER]}))
            await engine.started.acquire()
            await gateway.close()
            with pytest.raises(aiohttp.ClientError):
                await asked
        engine.go.set()

    serve(test)
    assert session.turns == 0


def test_other_episodes_go_on_when_one_is_closed(chat: Chat) -> None:
    engine = HeldEngine(chat, ["hello"])

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with gateway.open(session_of(chat, engine, "stays")) as stays:
            asked = asyncio.create_task(post(client, stays, {"messages": [USER]}))
            await engine.started.acquire()
            async with gateway.open(session_of(chat, HeldEngine(chat, []), "goes")):
                pass
            engine.go.set()
            assert (await asked)[0] == 200

    serve(test)


class DeafSession:
    """A session whose model call does not end when it is cancelled."""

    episode_id, folder = "deaf", None

    def __init__(self) -> None:
        self.started, self.go = asyncio.Event(), asyncio.Event()

    def count(self, fact: str, n: int = 1) -> None:
        raise AssertionError(fact)

    async def complete(self, messages: Any, tools: Any = ()) -> Any:
        self.started.set()
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        raise EngineError("too late")


def test_a_call_that_does_not_end_makes_the_episode_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CLOSE_S", 0.1)

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        session = DeafSession()
        asked: list[asyncio.Task[Any]] = []

        async def episode() -> None:
            async with gateway.open(session) as end:
                asked.append(asyncio.create_task(post(client, end, {"messages": [USER]})))
                await session.started.wait()

        with pytest.raises(EngineError, match="1 model calls did not end"):
            await episode()
        session.go.set()
        assert (await asked[0])[0] == 503

    serve(test)


def test_a_bug_of_the_session_is_raised_where_the_episode_is(chat: Chat) -> None:
    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async def episode() -> None:
            engine = PlayedEngine(chat, [InvariantError("tokens do not match"), "x"])
            async with gateway.open(session_of(chat, engine)) as end:
                status, answer = await post(client, end, {"messages": [USER]})
                assert (status, answer["error"]["code"]) == (500, "internal")
                assert (await post(client, end, {"messages": [USER]}))[0] == 200

        with pytest.raises(InvariantError, match="tokens do not match"):
            await episode()

    serve(test)


def test_more_requests_than_an_episode_may_have(chat: Chat) -> None:
    engine = HeldEngine(chat, ["hello"])

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        async with (
            gateway.open(session_of(chat, engine)) as end,
            gateway.open(session_of(chat, PlayedEngine(chat, ["other"]), "other")) as other,
        ):
            asked = [asyncio.create_task(post(client, end, {"messages": [USER]})) for _ in range(server.IN_FLIGHT + 1)]
            done, asked_still = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result()[0] for task in done] == [429]
            assert (await post(client, other, {"messages": [USER]}))[0] == 200, "another episode's are not counted"
            engine.go.set()
            assert {(await task)[0] for task in asked_still} == {200}
            assert (await post(client, end, {"messages": [USER]}))[0] == 200, "those that are answered are not counted"

    serve(test)


# --- many ------------------------------------------------------------------------------------------------------------


class EchoEngine(PlayedEngine):
    """Says its own name; every third turn comes after others had their chance."""

    def __init__(self, chat: Chat, name: str, turns: int) -> None:
        super().__init__(chat, [f"{name} says {turn}" for turn in range(turns)])

    async def generate(self, request: GenerateRequest) -> Generation:
        for _ in range(20 if len(self.requests) % 3 == 0 else 0):
            await asyncio.sleep(0)
        return await super().generate(request)


def test_16_episodes_of_20_calls_never_see_each_other(chat: Chat) -> None:
    """In all three shapes, over shared connections; every fourth call is asked twice at once."""
    episodes, calls = 16, 20
    names = [f"<{i:02}>" for i in range(episodes)]
    sessions = [session_of(chat, EchoEngine(chat, name, calls), name) for name in names]

    async def agent(client: aiohttp.ClientSession, gateway: Gateway, i: int) -> None:
        route = list(BODIES)[i % 3]
        async with gateway.open(sessions[i]) as end:
            history: list[dict[str, Any]] = []
            for turn in range(calls):
                history.append({"role": "user", "content": f"{names[i]} asks {turn}"})
                body = {"max_tokens": 5, "input" if route == "responses" else "messages": history}
                times = 2 if turn % 4 == 0 else 1
                answers = await asyncio.gather(*(post(client, end, body, route=route) for _ in range(times)))
                assert [status for status, _ in answers] == [200] * times
                assert all(f"{names[i]} says {turn}" in json.dumps(answer) for _, answer in answers)
                history.append({"role": "assistant", "content": f"{names[i]} says {turn}"})
            assert end.calls == calls + calls // 4

    async def test(client: aiohttp.ClientSession, gateway: Gateway) -> None:
        await asyncio.gather(*(agent(client, gateway, i) for i in range(episodes)))

    serve(test)
    for name, session in zip(names, sessions, strict=True):
        (t,) = session.trajectories("t", {})
        text = chat.decode(t.tokens.tolist())
        assert t.n_turns == calls
        assert text.count(f"{name} asks") == text.count(f"{name} says") == calls
        assert not [other for other in names if other != name and other in text]
