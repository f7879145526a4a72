"""The sampling contract over HTTP: every setting is sent, what cannot be honoured is refused, what was used comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from harness.chat import Chat
from harness.engines.http import HttpEngine
from harness.errors import EngineError, EpisodeEnd
from harness.protocols import SamplingContract
from tests.contracts.engine_support import request, write_policy
from tests.support import USER, session_of
from trainer.engine.core import EngineCore
from trainer.engine.server import Server
from trainer.model import build_policy

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_policy(tmp_path_factory.mktemp("policy"), seed=0)


async def served(app: web.Application, ask: Callable[[HttpEngine], Awaitable[Any]]) -> Any:
    """What a client of this server gets."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = HttpEngine(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", request_s=60.0)  # type: ignore[union-attr]
    try:
        return await ask(engine)
    finally:
        await engine.close()
        await runner.cleanup()


def embedded(model: Path, ask: Callable[[HttpEngine], Awaitable[Any]]) -> Any:
    """The embedded engine's server in this process."""

    async def story() -> Any:
        server = Server(EngineCore(build_policy(model).model, 2, 2_000), 0)
        steps = asyncio.create_task(server.loop())
        try:
            return await served(server.app(), ask)
        finally:
            steps.cancel()

    return asyncio.run(story())


@pytest.mark.parametrize("sampling", [SamplingContract(), SamplingContract(temperature=0.7), SamplingContract(temperature=0)])
def test_the_embedded_engine_says_what_it_used(model: Path, sampling: SamplingContract) -> None:
    generation = embedded(model, lambda engine: engine.generate(request([1, 2], 3, sampling=sampling)))
    assert generation.sampling == sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
    ],
)
def test_the_embedded_engine_refuses_what_it_does_not_do(model: Path, name: str, value: float) -> None:
    asked = replace(SamplingContract(), **{name: value})
    with pytest.raises(EngineError, match=f"HTTP 400.*{name}={value}"):
        embedded(model, lambda engine: engine.generate(request([1, 2], 3, sampling=asked)))


def test_a_session_on_the_embedded_engine_is_confirmed(model: Path) -> None:
    async def ask(engine: HttpEngine) -> Any:
        session = session_of(Chat(model, ["<|im_end|>"]), engine, seed=1, max_tokens_per_turn=1)
        with contextlib.suppress(EpisodeEnd):  # one token is hardly a stop token
            await session.complete([USER])
        return session.trajectories("t", {})[0].info["sampling_used"]

    assert embedded(model, ask) == {**asdict(SamplingContract()), "seed": 1, "confirmed": True}


def canned(used: Any, sent: list[Any]) -> web.Application:
    """A server that answers one token and says that it used this."""

    async def handle(http: web.Request) -> web.Response:
        sent.append((await http.json())["sampling_params"])
        spans = [{"version": "0", "start": 0, "end": 1}]
        content = {"content": [{"logprob": -0.5}]}
        choice = {"token_ids": [5], "logprobs": content, "finish_reason": "stop", "weight_versions": spans}
        return web.json_response({"choices": [choice]} | ({} if used == "nothing" else {"sampling": used}))

    app = web.Application()
    app.router.add_post("/inference/v1/generate", handle)
    return app


def test_every_setting_is_sent_under_its_usual_name() -> None:
    contract = SamplingContract(0.1, 0.2, 3, 0.4, 0.5, 0.6, 0.7)
    sent: list[Any] = []
    app = canned("nothing", sent)
    generation = asyncio.run(served(app, lambda engine: engine.generate(request([1], 1, sampling=contract))))
    assert generation.sampling is None
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    assert [sent[0][name] for name in names] == [0.1, 0.2, 3, 0.4, 0.5, 0.6, 0.7]


PLAIN = asdict(SamplingContract())


@pytest.mark.parametrize(
    "used",
    [
        {},
        [],
        "all",
        1,
        {name: value for name, value in PLAIN.items() if name != "min_p"},
        PLAIN | {"typical_p": 0.5},
        PLAIN | {"top_p": None},
        PLAIN | {"top_p": "1.0"},
        PLAIN | {"top_p": True},
    ],
    ids=lambda used: str(used)[-40:],
)
def test_an_unclear_word_on_sampling_is_an_engine_error(used: Any) -> None:
    with pytest.raises(EngineError, match="incomplete"):
        asyncio.run(served(canned(used, []), lambda engine: engine.generate(request([1], 1))))


@pytest.mark.parametrize("used", ["nothing", None])
def test_an_engine_that_says_nothing_confirms_nothing(used: Any) -> None:
    generation = asyncio.run(served(canned(used, []), lambda engine: engine.generate(request([1], 1))))
    assert generation.sampling is None


def test_an_engine_that_samples_otherwise_is_found_out(chat: Chat) -> None:
    async def ask(engine: HttpEngine) -> None:
        await session_of(chat, engine).complete([USER])

    with pytest.raises(EngineError, match=r"temperature=0\.6 instead of 1\.0"):
        asyncio.run(served(canned(PLAIN | {"temperature": 0.6}, []), ask))
