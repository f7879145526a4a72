"""What the tests of `sao eval` share: an evaluation in this process, against a scripted endpoint or one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web

from evals.evaluate import Plan, evaluate, prepare, store, stored
from evals.models import find_model
from evals.result import Result
from evals.scripted_endpoint import Mode, ScriptedEndpoint
from evals.suites import load_suite
from harness.config import Config
from harness.configfile import overrides
from harness.registry import environment
from harness.rundir import RunDir

SUITES = ["corridor", "sums", "toy_repair", "tir_synthetic"]
"""Those that need neither network nor Docker."""


class Faulty(ScriptedEndpoint):
    """A scripted endpoint that answers HTTP 503 to the requests that `fails`; counts episodes begun and remembers seeds."""

    fails: Callable[[dict[str, Any]], bool] = staticmethod(lambda body: False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds: list[int] = []

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seeds.append(body["seed"])
        if self.fails(body):
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        return await super()._post(request)


def prepared(word: str, url: str, folder: Path, *words: str, runs: int = 1, problems: int | None = 8) -> tuple[Config, Plan]:
    """An evaluation of whatever is at `url`, which is asked once per reply."""
    quick = ["endpoint.attempts=1", "endpoint.longest_wait_s=0.0", "rollout.concurrency=4", f"run_dir={folder}"]
    return prepare(load_suite(word), find_model(f"{url}#m"), [*quick, *words], runs, problems)


def served(word: str, words: tuple[str, ...], mode: Mode) -> Faulty:
    """An endpoint that knows the tasks of a suite."""
    table = load_suite(word).layers["environment"] | overrides(list(words)).get("environment", {})
    return Faulty(environment(table), mode)


def play(
    word: str,
    folder: Path,
    *words: str,
    mode: Mode = "perfect",
    fails: Callable[[dict[str, Any]], bool] = lambda body: False,
    runs: int = 1,
    problems: int | None = 8,
) -> tuple[Result, RunDir, list[int]]:
    """A new evaluation; its result, its folder, and the seeds of all requests."""

    async def main() -> tuple[Result, RunDir, list[int]]:
        async with AsyncExitStack() as stack:
            endpoint = await stack.enter_async_context(served(word, words, mode))
            endpoint.fails = fails  # type: ignore[method-assign]
            config, plan = prepared(word, endpoint.url, folder, *words, runs=runs, problems=problems)
            run = RunDir.create(config, f"eval-{plan.suite}")
            store(run, plan)
            return await evaluate(run, config, plan), run, endpoint.seeds

    return asyncio.run(main())


def resumed(word: str, run: RunDir, *words: str, mode: Mode = "perfect") -> tuple[Result, list[int]]:
    """The same folder again, with an endpoint at another address that answers everything; and the seeds that it was asked."""

    async def main() -> tuple[Result, list[int]]:
        async with served(word, words, mode) as endpoint:
            plan = stored(run.path)
            assert plan.endpoint is not None
            plan.endpoint["url"] = endpoint.url
            folder, config = RunDir.resume(run.path, model=False)
            return await evaluate(folder, config, plan), endpoint.seeds

    return asyncio.run(main())
