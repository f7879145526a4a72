"""One suite for inference engines: the embedded engine as a real process over HTTP, and the scripted one where it can take
part.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from harness.chat import Chat
from harness.engines.embedded import EmbeddedEngine
from harness.engines.http import HttpEngine
from harness.engines.scripted import ScriptedEngine
from harness.errors import EngineError
from harness.protocols import Generation, SamplingContract
from tests.contracts.engine_support import MAX_LEN, ROOT, WAIT_S, World, logprobs, needs_proc, request, write_policy
from trainer.model import Policy, build_policy
from trainer.weights import read_file, write_file

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four policies of one shape."""
    return [write_policy(tmp_path_factory.mktemp(f"policy-{i}"), seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def policies(models: list[Path]) -> list[Policy]:
    return [build_policy(m) for m in models]


async def launch(model: Path, log: Path, **changes: Any) -> EmbeddedEngine:
    options = {"slots": 4, "max_len": MAX_LEN, "version": 7, "threads": 1, "seed": 0, "start_s": 120.0}
    return await EmbeddedEngine.launch(model, log, **(options | changes))


@pytest.fixture(scope="module")
def embedded(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The engine process; every test leaves it running, whatever weights it has."""
    with asyncio.Runner() as runner:
        engine = runner.run(launch(models[0], tmp_path_factory.mktemp("logs") / "engine.log"))
        yield World(runner, engine, Chat(models[0], ["<|im_end|>"]))
        runner.run(engine.close())


@pytest.fixture(scope="module")
def scripted(models: list[Path]) -> Iterator[World]:
    chat = Chat(models[0], ["<|im_end|>"])
    with asyncio.Runner() as runner:
        yield World(runner, ScriptedEngine(chat, lambda text, rng: f"read_code {rng.randrange(10**6)}", 3), chat)


@pytest.fixture(params=["embedded", "scripted"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


# --- every engine ----------------------------------------------------------------------------------------------------


def test_every_token_has_a_logprob_and_a_version(world: World, models: list[Path]) -> None:
    world.run(world.engine.update_weights(models[0] / "model.safetensors", 11))
    prompt = world.chat.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    answer: Generation = world.run(world.engine.generate(request(prompt, 400, stop=world.chat.stop_ids, request_id="a/0")))
    assert 0 < len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) <= 400
    assert set(answer.versions) == {11}
    assert all(p <= 0.0 for p in answer.logprobs)
    ended = answer.token_ids[-1] in world.chat.stop_ids
    assert answer.finish_reason == ("stop" if ended else "length")
    assert not any(t in world.chat.stop_ids for t in answer.token_ids[:-1])


def test_a_short_allowance_is_a_length(world: World) -> None:
    prompt = world.chat.encode("<|im_start|>user\n")
    answer = world.run(world.engine.generate(request(prompt, 2, stop=(world.chat.tokenizer.get_vocab_size() - 1,))))
    assert len(answer.token_ids) == 2 and answer.finish_reason == "length"


def test_the_same_request_gives_the_same_answer(world: World) -> None:
    prompt = world.chat.encode("<|im_start|>user\nagain")
    a, b = (world.run(world.engine.generate(request(prompt, 30, seed=4, request_id="r/1"))) for _ in range(2))
    other = world.run(world.engine.generate(request(prompt, 30, seed=5, request_id="r/2")))
    assert a.token_ids == b.token_ids != other.token_ids


def test_score_has_one_number_per_token_but_the_first(world: World) -> None:
    tokens = world.chat.encode("<|im_start|>user\nscore me<|im_end|>")
    scores = world.run(world.engine.score(tokens))
    assert len(scores) == len(tokens) - 1 and all(s <= 0.0 for s in scores)


# --- exactness and updates in flight ---------------------------------------------------------------------------------


def test_answers_and_scores_are_those_of_the_weights(embedded: World, models: list[Path], policies: list[Policy]) -> None:
    engine, rng = embedded.engine, random.Random(0)
    for i, policy in enumerate(policies):
        embedded.run(engine.update_weights(models[i] / "model.safetensors", 20 + i))
        prompts = [[rng.randrange(250) for _ in range(n)] for n in (1, 9, 60, 130, 2, 7)]

        async def all_at_once(prompts: list[list[int]] = prompts) -> list[Generation]:
            return await asyncio.gather(*(engine.generate(request(p, 25, seed=n)) for n, p in enumerate(prompts)))

        for prompt, answer in zip(prompts, embedded.run(all_at_once()), strict=True):
            expected = logprobs(policy, prompt + answer.token_ids)
            got = torch.tensor(answer.logprobs)
            torch.testing.assert_close(got, expected[len(prompt) - 1 :], atol=1e-4, rtol=0)
            scores = torch.tensor(embedded.run(engine.score(prompt + answer.token_ids)))
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
            assert set(answer.versions) == {20 + i}


async def started(engine: HttpEngine, n: int) -> None:
    """Until n requests run."""
    while (await engine.metrics())["running"] < n:
        pass


def test_requests_in_flight_go_on_across_updates(embedded: World, models: list[Path], policies: list[Policy]) -> None:
    engine = embedded.engine

    async def story() -> list[Generation]:
        await engine.update_weights(models[0] / "model.safetensors", 30)
        tasks = [asyncio.create_task(engine.generate(request([i, 5], 700, seed=i))) for i in range(6)]
        await started(engine, 4)
        for version in (31, 32, 33):
            await engine.update_weights(models[version - 30] / "model.safetensors", version)
        assert (await engine.metrics())["running"] == 4
        return await asyncio.gather(*tasks)

    answers = embedded.run(story())
    for i, answer in enumerate(answers):
        assert len(answer.token_ids) == len(answer.versions) == 700 and answer.finish_reason == "length"
        assert all(b >= a for a, b in pairwise(answer.versions)), "never back to an older version"
        assert answer.versions[-1] == 33
        first = answer.versions.count(answer.versions[0])
        if answer.versions[0] == 30:
            expected = logprobs(policies[0], [i, 5, *answer.token_ids])[1:]
            torch.testing.assert_close(torch.tensor(answer.logprobs)[:first], expected[:first], atol=1e-4, rtol=0)
    assert [a.versions[0] for a in answers].count(30) >= 4, "four were running"
    assert all(set(a.versions) == {33} for a in answers if a.versions[0] != 30), "the waiting ones start on the last"


def test_pause_holds_until_resume(embedded: World, models: list[Path]) -> None:
    """Not one token is sampled in between: a request sent while paused sees only what was loaded before the resume."""
    engine = embedded.engine

    async def story() -> tuple[Generation, Generation, int]:
        await engine.update_weights(models[0] / "model.safetensors", 40)
        running = asyncio.create_task(engine.generate(request([1, 2], 20_000)))
        await started(engine, 1)
        await engine._call("POST", "/pause")
        assert (await engine._call("GET", "/health"))["paused"] is True
        queued = asyncio.create_task(engine.generate(request([3, 4], 5)))
        while (await engine.metrics())["waiting"] < 1:
            pass
        before = await engine.metrics()
        for _ in range(50):
            assert (await engine.metrics())["busy_s"] == before["busy_s"], "it computes nothing"
        await load(engine, models[1], 41)
        assert not queued.done() and not running.done()
        await engine._call("POST", "/resume")
        answer = await queued
        running.cancel()
        await asyncio.wait({running})
        return answer

    assert set(embedded.run(story()).versions) == {41}


async def load(engine: HttpEngine, model: Path, version: int) -> None:
    """The three calls of an update, without pause and resume."""
    await engine._call("POST", "/start_weight_update")
    await engine._call("POST", "/update_weights", {"update_info": {"path": str(model / "model.safetensors")}})
    await engine._call("POST", "/finish_weight_update", {"weight_version": str(version)})


def test_a_failed_update_keeps_the_engine_paused(
    embedded: World, models: list[Path], policies: list[Policy], tmp_path: Path
) -> None:
    """Bad path, wrong digest, half a file, a missing tensor, a foreign shape; then a whole retry recovers all."""
    engine = embedded.engine
    good = models[2] / "model.safetensors"
    tensors = read_file(good)
    write_file({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, tmp_path / "lacks.safetensors")
    write_file(tensors | {"model.norm.weight": torch.ones(8)}, tmp_path / "shape.safetensors")
    (tmp_path / "half.safetensors").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    bad: list[tuple[Path, str | None]] = [
        (tmp_path / "none.safetensors", None),
        (tmp_path / "none.safetensors", "0" * 64),
        (good, "0" * 64),
        (tmp_path / "half.safetensors", None),
        (tmp_path / "lacks.safetensors", None),
        (tmp_path / "shape.safetensors", None),
        (tmp_path, None),
    ]

    async def story() -> Generation:
        await engine.update_weights(models[0] / "model.safetensors", 50)
        first = await engine.generate(request([1, 2, 3], 12, seed=1))
        for path, digest in bad:
            with pytest.raises(EngineError):
                await engine.update_weights(path, 51, digest)
            with pytest.raises(EngineError, match="409"):
                await engine._call("POST", "/resume")
            assert (await engine._call("GET", "/health"))["paused"] is True
        waits = asyncio.create_task(engine.generate(request([*[1, 2, 3], *first.token_ids], 12)))
        while (await engine.metrics())["waiting"] < 1:
            pass
        await engine.update_weights(good, 52)
        return await waits, first

    answer, first = embedded.run(story())
    assert set(first.versions) == {50} and set(answer.versions) == {52}
    expected = logprobs(policies[2], [1, 2, 3, *first.token_ids, *answer.token_ids])[-12:]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_control_calls_out_of_order_are_refused(embedded: World, models: list[Path]) -> None:
    engine = embedded.engine
    info = {"update_info": {"path": str(models[3] / "model.safetensors")}}

    async def refused(route: str, body: dict[str, Any] | None = None) -> None:
        with pytest.raises(EngineError, match="409"):
            await engine._call("POST", route, body)

    async def story() -> None:
        await refused("/start_weight_update")
        await refused("/update_weights", info)
        await refused("/finish_weight_update", {"weight_version": "60"})
        await engine._call("POST", "/pause")
        await refused("/update_weights", info)
        await engine._call("POST", "/start_weight_update")
        await refused("/resume")
        with pytest.raises(EngineError):
            await engine._call("POST", "/finish_weight_update", {"weight_version": "60"})
        await refused("/resume")
        await load(engine, models[3], 61)
        await engine._call("POST", "/resume")
        assert (await engine.generate(request([1], 2))).versions == [61, 61]

    embedded.run(story())


# --- refusals --------------------------------------------------------------------------------------------------------

PARAMS = {"max_tokens": 3, "temperature": 1.0}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        {},
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2], "sampling_params": None},
        {"token_ids": [1, 2], "sampling_params": [1]},
        {"token_ids": [1, 2], "sampling_params": {}},
        {"token_ids": [], "sampling_params": PARAMS},
        {"token_ids": None, "sampling_params": PARAMS},
        {"token_ids": ["x"], "sampling_params": PARAMS},
        {"token_ids": [-1], "sampling_params": PARAMS},
        {"token_ids": [10**6], "sampling_params": PARAMS},
        {"token_ids": [10**30], "sampling_params": PARAMS},
        {"token_ids": [1] * MAX_LEN, "sampling_params": PARAMS},
        {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": 0}},
        {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": MAX_LEN}},
        {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": "many"}},
        {"token_ids": [1], "sampling_params": PARAMS | {"temperature": -1.0}},
        {"token_ids": [1], "sampling_params": PARAMS | {"temperature": float("nan")}},
        {"token_ids": [1], "sampling_params": PARAMS | {"top_p": 0.95}},
        {"token_ids": [1], "sampling_params": PARAMS | {"top_k": 20}},
        {"token_ids": [1], "sampling_params": PARAMS | {"min_p": 0.05}},
        {"token_ids": [1], "sampling_params": PARAMS | {"repetition_penalty": 1.1}},
        {"token_ids": [1], "sampling_params": PARAMS | {"stop": ["</tool_call>"]}},
        {"token_ids": [1], "sampling_params": PARAMS | {"stop_token_ids": ["x"]}},
        {"token_ids": [1], "sampling_params": PARAMS | {"seed": [1]}},
        {"token_ids": [], "sampling_params": PARAMS | {"prompt_logprobs": 0}},
        {"token_ids": [10**6], "sampling_params": PARAMS | {"prompt_logprobs": 0}},
    ],
    ids=lambda body: str(body)[:70],
)
def test_a_bad_request_is_a_400_and_the_engine_lives(embedded: World, body: Any) -> None:
    async def story() -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{embedded.engine.url}/inference/v1/generate", data=data) as response,
        ):
            status, text = response.status, await response.text()
        assert (await embedded.engine.generate(request([1, 2], 3))).finish_reason == "length"
        return status, text

    status, text = embedded.run(story())
    assert status == 400 and json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "sampling", [SamplingContract(top_p=0.9), SamplingContract(top_k=50), SamplingContract(temperature=-1)]
)
def test_a_contract_that_cannot_be_honoured_is_an_engine_error(embedded: World, sampling: SamplingContract) -> None:
    with pytest.raises(EngineError, match="400"):
        embedded.run(embedded.engine.generate(request([1, 2], 3, sampling=sampling)))


def test_a_client_that_goes_away_frees_its_slot(embedded: World) -> None:
    """Running and waiting requests alike; neither is computed to its end."""
    engine = embedded.engine

    async def story() -> None:
        tasks = [asyncio.create_task(engine.generate(request([i], 30_000))) for i in range(6)]
        while (load := await engine.metrics())["running"] + load["waiting"] < 6:
            pass
        assert (load["running"], load["waiting"]) == (4, 2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with asyncio.timeout(10.0):
            while (load := await engine.metrics())["running"] + load["waiting"]:
                pass
        assert len((await engine.generate(request([1], 5))).token_ids) == 5

    embedded.run(story())


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_start_that_fails_says_why(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    with pytest.raises(EngineError, match="did not start") as caught:
        asyncio.run(asyncio.wait_for(launch(tmp_path, tmp_path / "engine.log"), WAIT_S))
    assert "model.safetensors" in str(caught.value) and "engine.log" in caught.value.hint


def test_the_process_ends_with_its_pipe_even_while_busy(models: list[Path], tmp_path: Path) -> None:
    async def story() -> int:
        engine = await launch(models[0], tmp_path / "engine.log")
        lost = asyncio.create_task(engine.generate(request([1], 30_000)))
        await started(engine, 1)
        assert engine._process.stdin is not None
        engine._process.stdin.close()
        with pytest.raises(EngineError):
            await lost
        code = await asyncio.wait_for(engine._process.wait(), 20.0)
        await engine.close()
        return code

    assert asyncio.run(asyncio.wait_for(story(), WAIT_S)) == 0
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


ORPHAN = """
import asyncio, os, sys
from pathlib import Path
from tests.contracts.test_engines import launch, request, started

async def main():
    engine = await launch(Path(sys.argv[1]), Path(sys.argv[2]))
    busy = asyncio.create_task(engine.generate(request([1], 30_000)))
    await started(engine, 1)
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@needs_proc
def test_the_engine_does_not_outlive_a_killed_parent(models: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(models[0]), str(tmp_path / "engine.log")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, "the engine lives on"


def alive(pid: int) -> bool:
    """A process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


CRASH = """
from trainer.engine import core, server

def boom(self):
    raise RuntimeError("the step broke")

core.EngineCore.step = boom
server.main()
"""


def test_a_crashed_engine_ends_and_says_why(models: list[Path]) -> None:
    """Also while the pipe from its parent is open; requests in flight fail at once."""
    command = [sys.executable, "-c", CRASH, str(models[0]), "--max-len", "64"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **pipes)  # type: ignore[call-overload]
    port = json.loads(process.stdout.readline())["port"]

    async def story() -> None:
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        with pytest.raises(EngineError):
            await engine.generate(request([1], 5))
        await engine.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
    try:
        assert process.wait(30) != 0
        assert "the step broke" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_killed_engine_is_an_engine_error(models: list[Path], tmp_path: Path) -> None:
    async def story() -> None:
        engine = await launch(models[0], tmp_path / "engine.log")
        lost = asyncio.create_task(engine.generate(request([1], 30_000)))
        await started(engine, 1)
        engine._process.kill()
        with pytest.raises(EngineError):
            await lost
        with pytest.raises(EngineError):
            await engine.score([1, 2])
        await engine.close()
        assert engine._process.returncode == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
