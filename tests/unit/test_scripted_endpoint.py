"""The endpoint that plays a solver: perfect play is always right, random play exactly where it is predicted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agents.tool_loop import ToolLoop, ToolLoopConfig
from evals.heldout import evaluate
from evals.scripted_endpoint import CHANCE, GIVES_UP, ScriptedEndpoint, lucky, main, said
from harness.endpoint import Endpoint, EndpointConfig
from harness.endpoint_session import EndpointSession
from harness.engines.scripted import in_turn
from harness.episode import Episode, Stage
from harness.errors import ConfigError
from harness.ledger import Ledger, Slot
from harness.registry import environment, plugin_config
from harness.rollout import collect
from harness.task import Limits, Termination
from tests.support import FnEnvironment

ROOT = Path(__file__).parents[2]
TASKS = 12
SEED = 40
LIMITS = Limits(max_turns=8, wall_s=60.0)


def played(
    tmp_path: Path, table: dict[str, Any], mode: Any, *, seed: int | None = SEED, sandbox: str = "memory"
) -> list[Episode]:
    """Held-out tasks from the first on, evaluated as a run does it; what the ledger says of them is as it should be."""

    async def go() -> list[Episode]:
        made = environment(table)
        provider, options = plugin_config("sandbox", {"id": sandbox})
        sandboxes = provider(options, f"test-{os.getpid()}")
        async with (
            ScriptedEndpoint(environment(table), mode) as scripted,
            Endpoint(EndpointConfig(url=scripted.url, model=mode), 4) as endpoint,
        ):
            session = partial(EndpointSession, endpoint, LIMITS)
            stage = Stage(made, ToolLoop(ToolLoopConfig()), sandboxes, LIMITS, session)
            tasks = made.tasks("heldout")
            chosen = [(Slot(i, i), tasks[i]) for i in range(TASKS)]
            options = {"version": 0, "concurrency": 4, "attempts": 1, "seed": seed, "keep": False}
            try:
                return await collect(stage, chosen, ledger, "eval", **options)
            finally:
                await sandboxes.close()

    ledger = Ledger(tmp_path)
    episodes = asyncio.run(go())
    assert ledger.counts("eval") == {"evaluated": TASKS}
    rows = ledger._db.execute("SELECT id, turns, tokens, action_tokens, segments FROM episodes").fetchall()
    used = {e.id: e.used for e in episodes}
    for name, turns, tokens, action_tokens, segments in rows:
        assert (turns, tokens, action_tokens) == (used[name].turns, used[name].tokens, used[name].action_tokens)
        assert turns > 0 and tokens > action_tokens > 0 and segments == 0
    ledger.close()
    return episodes


CASES = [
    ({"id": "toy_repair"}, "memory"),
    ({"id": "sums", "levels": [1, 2, 3, 4, 5]}, "memory"),
    ({"id": "python_tir", "levels": [1, 2, 3]}, "process"),
]


@pytest.mark.parametrize(("table", "sandbox"), CASES, ids=lambda case: case["id"] if isinstance(case, dict) else "")
def test_perfect_play_gets_every_reward(tmp_path: Path, table: dict[str, Any], sandbox: str) -> None:
    episodes = played(tmp_path, table, "perfect", sandbox=sandbox, seed=None)
    assert [(e.reward, e.termination) for e in episodes] == [(1.0, Termination.FINISHED)] * TASKS


@pytest.mark.parametrize(("table", "sandbox"), CASES, ids=lambda case: case["id"] if isinstance(case, dict) else "")
def test_random_play_gets_exactly_the_predicted_ones(tmp_path: Path, table: dict[str, Any], sandbox: str) -> None:
    expected = [float(lucky(SEED + 1_000 * i)) for i in range(TASKS)]
    assert 0 < sum(expected) < TASKS
    episodes = played(tmp_path, table, "random", sandbox=sandbox)
    assert [e.reward for e in episodes] == expected
    assert evaluate(episodes)["success"] == sum(expected) / TASKS


def test_a_mixture_is_told_apart_by_its_openings(tmp_path: Path) -> None:
    parts = [{"id": "toy_repair", "heldout_tasks": 6}, {"id": "sums"}]
    episodes = played(tmp_path, {"id": "mixture", "parts": parts}, "perfect")
    assert {e.task_id.partition("/")[0] for e in episodes} == {"toy_repair", "sums"}
    assert [e.reward for e in episodes] == [1.0] * TASKS


def test_as_many_seeds_are_lucky_as_is_said() -> None:
    assert sum(map(lucky, range(10_000))) / 10_000 == pytest.approx(CHANCE, abs=0.02)


def test_a_script_with_a_memory_is_led_to_its_turn() -> None:
    """It is asked anew for every request: turns before are played again."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    turns: list[int] = []
    for expected in ("a", "b", ""):
        turns.append(len(messages))
        assert said(in_turn("a", "b"), messages, turns) == expected
        messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": "and"}]


# --- the protocol ----------------------------------------------------------------------------------------------------


def asked(bodies: Sequence[Any], mode: Any = "perfect") -> list[tuple[int, Any]]:
    """(status, answer) for each body; None asks for the models."""

    async def go() -> list[tuple[int, Any]]:
        made = environment({"id": "sums", "heldout_tasks": 30})
        found = []
        async with ScriptedEndpoint(made, mode) as scripted, aiohttp.ClientSession() as client:
            for body in bodies:
                way = client.get(f"{scripted.url}/models") if body is None else None
                async with way or client.post(f"{scripted.url}/chat/completions", json=body) as response:
                    text = response.content_type == "text/event-stream"
                    found.append((response.status, await (response.text() if text else response.json())))
        return found

    return asyncio.run(go())


OPENING = list(environment({"id": "sums"}).tasks("heldout")[3].messages)


def test_it_speaks_openai() -> None:
    (_, models), (_, whole), (_, streamed) = asked([None, {"messages": OPENING}, {"messages": OPENING, "stream": True}])
    assert models["data"]
    choice, usage = whole["choices"][0], whole["usage"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].isdigit()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert streamed.endswith("data: [DONE]\n\n")


def test_the_same_request_gets_the_same_bytes() -> None:
    first, second = asked([{"messages": OPENING, "seed": 1}] * 2, "random")
    assert first == second


def test_chance_goes_by_the_seed_of_the_first_turn() -> None:
    unlucky = next(seed for seed in range(99) if not lucky(seed) and lucky(seed + 1))
    later = [*OPENING, {"role": "assistant", "content": GIVES_UP}, {"role": "user", "content": "go on"}]
    found = asked([{"messages": OPENING, "seed": unlucky}, {"messages": later, "seed": unlucky + 1}], "random")
    assert [answer["choices"][0]["message"]["content"] for _, answer in found] == [GIVES_UP] * 2


@pytest.mark.parametrize(
    ("body", "mode", "message"),
    [
        ({"messages": [{"role": "user", "content": "another"}]}, "perfect", "no task of this split opens like this"),
        ({"messages": []}, "perfect", "messages"),
        ({"messages": OPENING}, "random", "`seed`, which is missing"),
        ([1], "perfect", "not a JSON object"),
    ],
)
def test_what_cannot_be_answered_is_said(body: Any, mode: str, message: str) -> None:
    ((status, answer),) = asked([body], mode)
    assert status == 400 and message in answer["error"]["message"]


def test_without_a_solver_there_is_nothing_to_play() -> None:
    with pytest.raises(ConfigError, match="no `solver`"):
        ScriptedEndpoint(FnEnvironment())


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_its_url_and_serves_there() -> None:
    command = [sys.executable, "-m", "evals.scripted_endpoint", "sums", "--mode", "random", "heldout_tasks=5", "levels=[2]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()

            async def models() -> int:
                async with aiohttp.ClientSession() as client, client.get(f"{url}/models") as response:
                    return response.status

            assert asyncio.run(models()) == 200
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sumz"], "sumz"),
        (["sums", "levles=[1]"], "levles"),
        (["sums", "levels"], "key=value"),
        (["swe"], "environment.dataset"),
        (["sums", "--port", "99999"], "port 99999"),
    ],
)
def test_one_clear_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "hint: " in error and "Traceback" not in error
