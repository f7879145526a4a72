"""One suite for inference engines: the embedded engine as a real process over HTTP, real vLLM servers behind the client of many
replicas, and the scripted engine where it can take part.

Where the engines differ by design, the test says how.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from harness.chat import Chat
from harness.engines.scripted import ScriptedEngine
from harness.engines.vllm import VllmEngine
from harness.errors import EngineError
from harness.protocols import Generation, SamplingContract
from tests.contracts.engine_support import (
    MAX_LEN,
    TOLERANCE,
    EmbeddedWorld,
    ScriptedWorld,
    Served,
    VllmWorld,
    World,
    apart,
    distributions,
    launch,
    load,
    logprobs,
    request,
    started,
)
from trainer.model import Policy
from trainer.weights import read_file, sha256, write_file

pytestmark = pytest.mark.timeout(1_500)  # the first of vLLM's starts its servers


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def embedded(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWorld]:
    """The engine process; every test leaves it running, whatever weights it has."""
    with asyncio.Runner() as runner:
        engine = runner.run(launch(models[0], tmp_path_factory.mktemp("logs") / "engine.log"))
        yield EmbeddedWorld(runner, engine, Chat(models[0], ["<|im_end|>"]))
        runner.run(engine.close())


@pytest.fixture(scope="module")
def vllm(models: list[Path], request: pytest.FixtureRequest) -> Iterator[VllmWorld]:
    """A client of the fleet's servers that cannot start them again."""
    fleet = request.getfixturevalue("fleet")
    engine = VllmEngine([server.process.url for server in fleet.servers], fleet.version)
    yield VllmWorld(fleet.runner, engine, Chat(models[0], ["<|im_end|>"]))
    fleet.runner.run(engine.close())


@pytest.fixture(scope="module")
def scripted(models: list[Path]) -> Iterator[ScriptedWorld]:
    chat = Chat(models[0], ["<|im_end|>"])
    with asyncio.Runner() as runner:
        yield ScriptedWorld(runner, ScriptedEngine(chat, lambda text, rng: f"read_code {rng.randrange(10**6)}", 3), chat)


ENGINES = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=[*ENGINES, "scripted"])
def world(request: pytest.FixtureRequest, models: list[Path]) -> World:
    """Any engine, with the first policy as version 10."""
    made: World = request.getfixturevalue(request.param)
    made.run(made.update(models[0], 10))
    return made


@pytest.fixture(params=ENGINES)
def served(request: pytest.FixtureRequest, models: list[Path]) -> Served:
    """An engine with weights behind HTTP, with the first policy as version 10."""
    made: Served = request.getfixturevalue(request.param)
    made.run(made.update(models[0], 10))
    return made


# --- every engine ----------------------------------------------------------------------------------------------------


def test_every_token_has_a_logprob_and_a_version(world: World, models: list[Path]) -> None:
    world.run(world.update(models[0], 11))
    prompt = world.chat.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    answer: Generation = world.run(world.engine.generate(request(prompt, 400, stop=world.chat.stop_ids, request_id="a/0")))
    assert 0 < len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) <= 400
    assert set(answer.versions) == {11}
    assert all(p <= 0.0 for p in answer.logprobs)
    ended = answer.token_ids[-1] in world.chat.stop_ids
    assert answer.finish_reason == ("stop" if ended else "length")
    assert not any(t in world.chat.stop_ids for t in answer.token_ids[:-1])


def test_a_stop_token_ends_the_answer_and_is_its_last(served: Served) -> None:
    """Any of them; no other token does, whatever the model's own files say."""
    prompt = served.chat.encode("<|im_start|>user\nstop")
    whole = served.run(served.engine.generate(request(prompt, 40, seed=2, request_id="whole/0")))
    at = next(i for i in range(12, 40) if whole.token_ids[i] not in whole.token_ids[:i])
    cut = served.run(served.engine.generate(request(prompt, 40, seed=2, stop=(whole.token_ids[at], 0), request_id="cut/0")))
    assert whole.finish_reason == "length" and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: at + 1]


def test_a_short_allowance_is_a_length(world: World) -> None:
    prompt = world.chat.encode("<|im_start|>user\n")
    answer = world.run(world.engine.generate(request(prompt, 2, stop=(world.chat.tokenizer.get_vocab_size() - 1,))))
    assert len(answer.token_ids) == 2 and answer.finish_reason == "length"


def test_the_same_request_gives_the_same_answer(world: World) -> None:
    """Its seed does it. The same seed gives other tokens in another engine: each draws in its own way."""
    prompt = world.chat.encode("<|im_start|>user\nagain")
    a, b = (world.run(world.engine.generate(request(prompt, 30, seed=4, request_id="r/1"))) for _ in range(2))
    other = world.run(world.engine.generate(request(prompt, 30, seed=5, request_id="r/2")))
    assert a.token_ids == b.token_ids != other.token_ids


def test_score_has_one_number_per_token_but_the_first(world: World) -> None:
    tokens = world.chat.encode("<|im_start|>user\nscore me<|im_end|>")
    scores = world.run(world.engine.score(tokens))
    assert len(scores) == len(tokens) - 1 and all(s <= 0.0 for s in scores)


# --- exactness and updates in flight ---------------------------------------------------------------------------------


def test_answers_and_scores_are_those_of_the_weights(served: Served, models: list[Path], policies: list[Policy]) -> None:
    engine, rng = served.engine, random.Random(0)
    for i, policy in enumerate(policies):
        served.run(served.update(models[i], 20 + i))
        prompts = [[rng.randrange(250) for _ in range(n)] for n in (1, 9, 60, 130, 2, 7)]

        async def all_at_once(prompts: list[list[int]] = prompts) -> list[Generation]:
            return await asyncio.gather(*(engine.generate(request(p, 25, seed=n)) for n, p in enumerate(prompts)))

        for prompt, answer in zip(prompts, served.run(all_at_once()), strict=True):
            assert apart(policy, prompt, answer.token_ids, answer.logprobs).max() < TOLERANCE
            scores = torch.tensor(served.run(engine.score(prompt + answer.token_ids)))
            torch.testing.assert_close(scores, logprobs(policy, prompt + answer.token_ids), atol=TOLERANCE, rtol=0)
            assert set(answer.versions) == {20 + i}


def test_many_long_prompts_with_seeds_at_once(served: Served, models: list[Path], policies: list[Policy]) -> None:
    """More than one step reads. vLLM on CPUs dies where it has read but a part of a seeded request's prompt."""
    served.run(served.update(models[0], 30))
    rng = random.Random(1)
    prompts = [[rng.randrange(250) for _ in range(650 + n)] for n in range(12)]

    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(served.engine.generate(request(p, 9, seed=n)) for n, p in enumerate(prompts)))

    for prompt, answer in zip(prompts, served.run(all_at_once()), strict=True):
        assert apart(policies[0], prompt, answer.token_ids, answer.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_logprob_is_that_of_the_temperature(served: Served, policies: list[Policy], temperature: float) -> None:
    asked = request([7, 8, 9], 60, sampling=SamplingContract(temperature=temperature))
    answer = served.run(served.engine.generate(asked))
    assert apart(policies[0], [7, 8, 9], answer.token_ids, answer.logprobs, temperature).max() < TOLERANCE


def test_requests_in_flight_go_on_across_updates(served: Served, models: list[Path], policies: list[Policy]) -> None:
    """Their old keys and values are kept, so the trainer can compute only the first version's log-probs again."""
    engine, n = served.engine, 6
    at_once = min(n, served.slots)

    async def story() -> list[Generation]:
        await served.update(models[0], 30)
        async with served.slowly():
            tasks = [asyncio.create_task(engine.generate(request([i, 5], 700, seed=i, request_id=f"{i}/0"))) for i in range(n)]
            await started(engine, at_once)
            for version in (31, 32, 33):
                await served.update(models[version - 30], version)
            assert not any(task.done() for task in tasks)
        return await asyncio.gather(*tasks)

    answers = served.run(story())
    for i, answer in enumerate(answers):
        assert len(answer.token_ids) == len(answer.versions) == 700 and answer.finish_reason == "length"
        assert all(b >= a for a, b in pairwise(answer.versions)), "never back to an older version"
        assert answer.versions[-1] == 33
        first = answer.versions.count(30)
        assert apart(policies[0], [i, 5], answer.token_ids, answer.logprobs)[:first].lt(TOLERANCE).all()
    assert [a.versions[0] for a in answers].count(30) >= at_once, "so many were running"
    assert all(set(a.versions) == {33} for a in answers if a.versions[0] != 30), "the waiting ones start on the last"


def test_pause_holds_until_resume(served: Served, models: list[Path]) -> None:
    """Not one token is sampled in between: a request sent while paused sees only what was loaded before the resume."""
    engine = served.engine

    async def story() -> Generation:
        running = asyncio.create_task(engine.generate(request([1, 2], 20_000)))
        await started(engine, 1)
        async with served.pausing(models[1], 41):
            queued = asyncio.create_task(engine.generate(request([3, 4], 5)))
            while await served.waiting() < 1:
                await asyncio.sleep(0)
            before = await served.computed()
            for _ in range(50):
                assert await served.computed() == before, "it computes nothing"
            assert not queued.done() and not running.done()
        answer = await queued
        running.cancel()
        await asyncio.wait({running})
        return answer

    assert set(served.run(story()).versions) == {41}


def test_a_failed_update_keeps_the_engine_paused(
    served: Served, models: list[Path], policies: list[Policy], tmp_path: Path
) -> None:
    """Bad path, wrong digest, half a file, a missing tensor, a foreign shape; then a whole retry recovers all.

    A request that comes meanwhile waits in the embedded engine. The client of many replicas has taken all of them out, and says
    so at once: nobody knows whether a good update will ever come.
    """
    engine = served.engine
    good = models[2] / "model.safetensors"
    tensors = read_file(good)
    write_file({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, tmp_path / "lacks.safetensors")
    write_file(tensors | {"model.norm.weight": torch.ones(8)}, tmp_path / "shape.safetensors")
    (tmp_path / "half.safetensors").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    bad: list[tuple[Path, str | None]] = [
        (tmp_path / "none.safetensors", None),
        (tmp_path / "none.safetensors", "0" * 64),
        (good, "0" * 64),
        (tmp_path / "half.safetensors", sha256(tmp_path / "half.safetensors")),
        (tmp_path / "lacks.safetensors", sha256(tmp_path / "lacks.safetensors")),
        (tmp_path / "shape.safetensors", sha256(tmp_path / "shape.safetensors")),
        (tmp_path, None),
    ]

    async def story() -> tuple[Generation, Generation]:
        await served.update(models[0], 50)
        first = await engine.generate(request([1, 2, 3], 12, seed=1))
        before = await served.computed()
        for path, digest in bad:
            with pytest.raises(EngineError):
                await engine.update_weights(path, 51, digest)
            for server in served.servers:
                with pytest.raises(EngineError, match="409"):
                    await server._call("POST", "/resume")
        meanwhile = asyncio.create_task(engine.generate(request([*[1, 2, 3], *first.token_ids], 12)))
        if isinstance(served, VllmWorld):
            with pytest.raises(EngineError, match="no replica is left"):
                await meanwhile
            meanwhile = None
        else:
            while await served.waiting() < 1:
                await asyncio.sleep(0)
        assert await served.computed() == before, "nothing was computed by any of the bad ones"
        await served.update(models[2], 52)
        return await (meanwhile or engine.generate(request([*[1, 2, 3], *first.token_ids], 12))), first

    answer, first = served.run(story())
    assert set(first.versions) == {50} and set(answer.versions) == {52}
    assert apart(policies[2], [1, 2, 3, *first.token_ids], answer.token_ids, answer.logprobs).max() < TOLERANCE


def test_control_calls_out_of_order_are_refused(served: Served, models: list[Path]) -> None:
    """By each server itself, whoever calls."""
    path = models[3] / "model.safetensors"
    info = {"update_info": {"path": str(path), "sha256": sha256(path)}}

    async def story(server: Any) -> None:
        async def refused(route: str, body: dict[str, Any] | None = None) -> None:
            with pytest.raises(EngineError, match="409"):
                await server._call("POST", route, body)

        await refused("/start_weight_update")
        await refused("/update_weights", info)
        await refused("/finish_weight_update", {"weight_version": "60"})
        await server._call("POST", "/pause?mode=keep&clear_cache=false")
        await refused("/update_weights", info)
        await server._call("POST", "/start_weight_update")
        await refused("/resume")
        with pytest.raises(EngineError):
            await server._call("POST", "/finish_weight_update", {"weight_version": "60"})
        await refused("/resume")
        await load(server, models[3], 61)
        await server._call("POST", "/resume")

    for server in served.servers:
        served.run(story(server))
    served.run(served.update(models[3], 61))
    assert served.run(served.engine.generate(request([1], 2))).versions == [61, 61]


# --- refusals --------------------------------------------------------------------------------------------------------

PARAMS = {"max_tokens": 3, "temperature": 1.0}
NONSENSE = [
    b"{",
    b"[]",
    b"null",
    {},
    {"token_ids": [1, 2]},
    {"token_ids": [1, 2], "sampling_params": None},
    {"token_ids": [1, 2], "sampling_params": [1]},
    {"token_ids": [], "sampling_params": PARAMS},
    {"token_ids": None, "sampling_params": PARAMS},
    {"token_ids": ["x"], "sampling_params": PARAMS},
    {"token_ids": [-1], "sampling_params": PARAMS},
    {"token_ids": [10**6], "sampling_params": PARAMS},
    {"token_ids": [10**30], "sampling_params": PARAMS},
    {"token_ids": [1] * MAX_LEN, "sampling_params": PARAMS},
    {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": 0}},
    {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": "many"}},
    {"token_ids": [1], "sampling_params": PARAMS | {"temperature": -1.0}},
    {"token_ids": [1], "sampling_params": PARAMS | {"temperature": float("nan")}},
    {"token_ids": [1], "sampling_params": PARAMS | {"stop_token_ids": ["x"]}},
    {"token_ids": [1], "sampling_params": PARAMS | {"seed": [1]}},
    {"token_ids": [], "sampling_params": PARAMS | {"prompt_logprobs": 0}},
    {"token_ids": [10**6], "sampling_params": PARAMS | {"prompt_logprobs": 0}},
]
BEYOND = [
    {"token_ids": [1, 2], "sampling_params": {}},
    {"token_ids": [1], "sampling_params": PARAMS | {"max_tokens": MAX_LEN}},
    {"token_ids": [1], "sampling_params": PARAMS | {"top_p": 0.95}},
    {"token_ids": [1], "sampling_params": PARAMS | {"top_k": 20}},
    {"token_ids": [1], "sampling_params": PARAMS | {"min_p": 0.05}},
    {"token_ids": [1], "sampling_params": PARAMS | {"repetition_penalty": 1.1}},
    {"token_ids": [1], "sampling_params": PARAMS | {"stop": ["</tool_call>"]}},
]
"""vLLM does these: it penalises, truncates, stops at texts, and samples as much as fits."""


async def posted(served: Served, body: Any) -> tuple[int, str]:
    """Status and answer of the first server; the engine must live on."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{served.servers[0].url}/inference/v1/generate", data=data) as response,
    ):
        status, text = response.status, await response.text()
    assert (await served.engine.generate(request([1, 2], 3))).finish_reason == "length"
    return status, text


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: str(body)[:70])
def test_a_bad_request_is_a_400_and_the_engine_lives(served: Served, body: Any) -> None:
    status, text = served.run(posted(served, body))
    assert status == 400 and json.loads(text)["error"]["message"]


@pytest.mark.parametrize("body", BEYOND, ids=lambda body: str(body)[:70])
def test_what_the_embedded_engine_cannot_do_is_a_400(embedded: EmbeddedWorld, body: Any) -> None:
    status, text = embedded.run(posted(embedded, body))
    assert status == 400 and json.loads(text)["error"]["message"]


@pytest.mark.parametrize("sampling", [SamplingContract(top_p=0.9), SamplingContract(top_k=50)])
def test_the_embedded_engine_refuses_a_contract_that_it_cannot_honour(
    embedded: EmbeddedWorld, sampling: SamplingContract
) -> None:
    with pytest.raises(EngineError, match="400"):
        embedded.run(embedded.engine.generate(request([1, 2], 3, sampling=sampling)))


@pytest.mark.vllm
@pytest.mark.parametrize(
    "sampling",
    [SamplingContract(top_p=0.7), SamplingContract(top_k=3), SamplingContract(min_p=0.1)],
    ids=["top_p", "top_k", "min_p"],
)
def test_vllm_honours_it_and_its_logprobs_are_those_of_what_is_left(
    vllm: VllmWorld, models: list[Path], policies: list[Policy], sampling: SamplingContract
) -> None:
    """It does not repeat the sampling in its answer, so nothing is `confirmed`: that is for the trainer's comparison to do."""
    prompt = [3, 4, 5]
    vllm.run(vllm.update(models[0], 70))
    answer = vllm.run(vllm.engine.generate(request(prompt, 60, sampling=sampling)))
    assert answer.sampling is None
    every = distributions(policies[0], prompt + answer.token_ids)[len(prompt) - 1 : -1]
    for row, token, got in zip(every, answer.token_ids, answer.logprobs, strict=True):
        assert abs(kept(row.exp(), sampling)[token].log() - got) < TOLERANCE


def kept(p: torch.Tensor, sampling: SamplingContract) -> torch.Tensor:
    """What a truncation leaves of a distribution, made whole again."""
    ranked, order = p.sort(descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    keep &= ranked.cumsum(0) - ranked < sampling.top_p
    keep &= torch.arange(len(ranked)) < (sampling.top_k if sampling.top_k > 0 else len(ranked))
    keep &= ranked >= sampling.min_p * ranked[0]
    left = torch.zeros_like(p).index_put((order[keep],), ranked[keep])
    return left / left.sum()


def test_a_temperature_that_is_none_is_an_engine_error(served: Served) -> None:
    with pytest.raises(EngineError, match="400"):
        served.run(served.engine.generate(request([1, 2], 3, sampling=SamplingContract(temperature=-1))))


def test_a_client_that_goes_away_frees_its_slot(served: Served) -> None:
    """Running and waiting requests alike; neither is computed to its end."""
    engine = served.engine

    async def load() -> tuple[float, float]:
        return (await engine.metrics())["running"], await served.waiting()

    async def story() -> None:
        tasks = [asyncio.create_task(engine.generate(request([i], 30_000))) for i in range(6)]
        running = min(6, served.slots)
        while await load() != (running, 6 - running):
            assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        while await load() != (0, 0):
            await asyncio.sleep(0)
        assert len((await engine.generate(request([1], 5))).token_ids) == 5

    served.run(story())
