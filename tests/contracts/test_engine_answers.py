"""What the client makes of answers that must not be trained: incomplete, inexact or not an answer at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from harness.engines.http import HttpEngine, _generation
from harness.errors import EngineError
from harness.protocols import Generation
from tests.contracts.engine_support import request

pytestmark = pytest.mark.timeout(180)

# --- answers that must not be trained --------------------------------------------------------------------------------


def choice(**changes: Any) -> dict[str, Any]:
    good = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in (5, 6, 7)]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }
    return {"choices": [good | changes]}


def content(*logprobs: Any) -> dict[str, Any]:
    return {"content": [{"token_id": 5, "logprob": p} for p in logprobs]}


def span(version: Any, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_a_whole_answer_is_read() -> None:
    assert _generation(choice()) == Generation([5, 6, 7], [-0.5] * 3, [3, 3, 4], "stop")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"error": {"message": "EngineDeadError", "code": 500}},
        choice(token_ids=None),
        choice(token_ids=[]),
        choice(token_ids=[5, 6]),
        choice(token_ids=[5, 6, 7, 8]),
        choice(token_ids=[], logprobs={"content": []}, weight_versions=[]),
        choice(logprobs=None),
        choice(logprobs={"content": None}),
        choice(logprobs=content(-0.5, -0.5)),
        choice(logprobs=content(-0.5, None, -0.5)),
        choice(logprobs={"content": [{}, {}, {}]}),
        choice(logprobs=content(-0.5, float("nan"), -0.5)),
        choice(logprobs=content(-0.5, float("-inf"), -0.5)),
        choice(logprobs=content(-0.5, 0.5, -0.5)),
        choice(finish_reason=None),
        choice(finish_reason="abort"),
        choice(finish_reason="error"),
        choice(weight_versions=None),
        choice(weight_versions=[]),
        choice(weight_versions=[span("3", 0, 2)]),
        choice(weight_versions=[span("3", 0, 1), span("4", 2, 3)]),
        choice(weight_versions=[span("3", 0, 2), span("4", 1, 3)]),
        choice(weight_versions=[span("3", 1, 3)]),
        choice(weight_versions=[span("3", 0, 4)]),
        choice(weight_versions=[span("3", 0, 5), span("3", 5, 3)]),
        choice(weight_versions=[span("default", 0, 3)]),
        choice(weight_versions=[span("-1", 0, 3)]),
        choice(weight_versions=[{"version": "3"}]),
    ],
    ids=lambda answer: str(answer)[-90:],
)
def test_an_incomplete_answer_is_an_engine_error(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        _generation(answer)


async def _canned(answer: Any, ask: Callable[[HttpEngine], Awaitable[Any]]) -> Any:
    """What the client makes of a server that answers this."""

    async def handle(_: web.Request) -> web.StreamResponse:
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{route:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = HttpEngine(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", request_s=10.0)  # type: ignore[union-attr]
    try:
        return await ask(engine)
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"prompt_logprobs": None},
        {"prompt_logprobs": [None]},
        {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, None]},
        {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}]},
        {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": None}}]},
        {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": float("nan")}}]},
        {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {}}]},
    ],
    ids=str,
)
def test_an_incomplete_score_is_an_engine_error(answer: Any) -> None:
    """The probe after a publish compares it; a NaN that compares as false must not pass for a match."""
    with pytest.raises(EngineError):
        asyncio.run(_canned(answer, lambda engine: engine.score([1, 2, 3])))


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_what_is_not_an_answer_is_an_engine_error(status: int) -> None:
    with pytest.raises(EngineError):
        asyncio.run(_canned(web.Response(status=status, text="<html>"), lambda engine: engine.generate(request([1], 1))))


def test_nobody_there_is_an_engine_error() -> None:
    async def story() -> None:
        engine = HttpEngine("http://127.0.0.1:9", request_s=10.0)
        with pytest.raises(EngineError) as caught:
            await engine.generate(request([1], 1))
        assert "127.0.0.1:9" in caught.value.hint
        await engine.close()
        await engine.close()

    asyncio.run(story())
