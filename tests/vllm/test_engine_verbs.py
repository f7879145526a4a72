"""`sao engine` and `sao doctor --engine` with a real server, and what the sampling probe finds when that samples otherwise.

One server for all of it. It is killed once.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.chat import Chat
from harness.engines.probe import probe_sampling
from harness.engines.vllm import VllmEngine
from harness.errors import EngineError
from tests.contracts.engine_support import TOLERANCE, apart, logprobs, request
from tests.e2e.support import all_gone, command, sao
from tests.vllm.support import PYTHON, until
from trainer.model import Policy
from trainer.weights import sha256

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2_400),
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make setup-vllm"),
]
START_S = 1_200.0
MAX_LEN = 1_024
PROMPT = list(range(5, 45))
NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
"""Else vLLM takes an end token that the toy policy does not have, and dies of masking it (`min_tokens`)."""


def write_config(folder: Path, model: Path) -> Path:
    plugins = {"environment": "toy_repair", "sandbox": "memory", "agent": "tool_loop"}
    path = folder / "c.toml"
    path.write_text(
        f'run_dir = "{folder / "runs"}"\n'
        + "".join(f'[{kind}]\nid = "{name}"\n' for kind, name in plugins.items())
        + f'[model]\npath = "{model}"\n'
        + f"[limits]\nmax_context = {MAX_LEN}\n"
        + '[trainer]\ndtype = "float32"\n'
        + f'[engine]\nid = "vllm"\nstart_s = {START_S}\n'
        + '[engine.vllm.server]\nextra = ["--middleware", "planted_routes.Sampler"]\n'
        + f'environment = {{ PYTHONPATH = "{Path(__file__).parent}" }}\n'
    )
    return path


class Verb:
    """A running `sao engine`."""

    def __init__(self, config: Path) -> None:
        self.config, self.said = config, config.parent / "stderr"
        with self.said.open("w") as errors:
            self.process = subprocess.Popen(command("engine", str(config)), stdout=subprocess.PIPE, stderr=errors)
        self._text = b""

    def line(self) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_S
        while b"\n" not in self._text:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 4_096) if ready else b""
            assert more, self.said.read_text()
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()

    def ready(self) -> tuple[str, int]:
        """URL and process id of the server that is ready next."""
        said = json.loads(self.line())
        return said["url"], said["pid"]


def group(leader: int) -> list[int]:
    """All processes of a server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


class World:
    """The verb, the server that it keeps, and the policies that the tests publish to it."""

    def __init__(self, verb: Verb, models: list[Path], policies: list[Policy]) -> None:
        self.verb, self.models, self.policies = verb, models, policies
        self.url, self.pid = verb.ready()
        self.hint = verb.line()

    def use(self, work: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
        """Run it with a client that cannot restart the server."""

        async def main() -> Any:
            engine = VllmEngine([self.url])
            try:
                return await asyncio.wait_for(work(engine), START_S)
            finally:
                await engine.close()

        return asyncio.run(main())

    async def trainer(self, texts: list[list[int]]) -> list[list[float]]:
        """Of the policy that the server was started with."""
        return [logprobs(self.policies[0], text).tolist() for text in texts]

    async def probe(self, engine: VllmEngine, trainer: Any = None, **planted: Any) -> dict[str, Any]:
        """With sampling parameters that the server puts over those it is asked for."""
        chat = Chat(self.models[0], ["<|im_end|>"])
        await engine.replicas[0]._text("POST", "/plant", planted)
        try:
            return await probe_sampling(
                engine,
                trainer or self.trainer,
                [PROMPT, PROMPT[7:]],
                version=0,
                stop=chat.stop_ids,
                max_context=MAX_LEN,
                dtypes=("float32", "float32"),
            )
        finally:
            await engine.replicas[0]._text("POST", "/plant", {})


@pytest.fixture(scope="module")
def world(models: list[Path], policies: list[Policy], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "only for tests")
        folder = tmp_path_factory.mktemp("verbs")
        shutil.copytree(models[0], folder / "model")
        (folder / "model/tokenizer_config.json").write_text(json.dumps(NAMES))
        verb = Verb(write_config(folder, folder / "model"))
        try:
            yield World(verb, models, policies)
        finally:
            if verb.process.poll() is None:
                verb.process.kill()  # the guard ends the server
                verb.process.wait(timeout=60.0)


def test_the_doctor_finds_nothing(world: World) -> None:
    assert world.hint == f'a run uses them with: engine.id=vllm engine.url="{world.url}"'
    done = sao("doctor", "--engine", str(world.verb.config), f"engine.url={world.url}", timeout_s=START_S)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in said] == [
        *("ok   start", "ok   routes", "ok   canary", "ok   sampling", "ok   abort", "ok   update"),
    ]
    assert "vLLM 0.32.0 (proven)" in said[1]


def test_without_the_key_nothing_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY")

    async def work(engine: VllmEngine) -> None:
        for route in ("/pause?mode=keep&clear_cache=false", "/update_weights", "/inference/v1/generate", "/resume", "/sleep"):
            with pytest.raises(EngineError, match="401.*VLLM_API_KEY"):
                await engine.replicas[0]._text("POST", route, {})
        assert await engine.replicas[0].healthy()

    world.use(work)


def test_the_probe_passes_an_engine_that_does_as_it_is_told(world: World) -> None:
    facts = world.use(world.probe)
    assert facts["max_abs"] < TOLERANCE and facts["tokens"] > 192


@pytest.mark.parametrize(
    "planted",
    [
        {"temperature": 0.9},
        {"temperature": 1.05},
        {"top_p": 0.95},
        {"top_k": 20},
        {"min_tokens": 40},
        {"presence_penalty": 0.1},
        {"logit_bias": {"17": 1.0}},
    ],
    ids=str,
)
def test_the_probe_finds_another_sampler(world: World, planted: dict[str, Any]) -> None:
    async def work(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="disagree") as caught:
            await world.probe(engine, **planted)
        assert "sampler" in caught.value.hint and "--generation-config" in caught.value.hint

    world.use(work)


def test_the_probe_finds_other_weights(world: World) -> None:
    async def trainer(texts: list[list[int]]) -> list[list[float]]:
        return [logprobs(world.policies[1], text).tolist() for text in texts]

    async def work(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="disagree") as caught:
            await world.probe(engine, trainer)
        assert "model.path" in caught.value.hint

    world.use(work)


def test_a_killed_server_comes_back_with_the_policy_that_was_published(world: World) -> None:
    """It is started again by somebody else, at its old address, with its old weights; the client sees to the rest."""

    async def work(engine: VllmEngine) -> None:
        path = world.models[1] / "model.safetensors"
        await engine.update_weights(path, 1, sha256(path))
        flying = request(PROMPT, MAX_LEN - len(PROMPT), request_id="flying/0")
        flight = asyncio.create_task(engine.generate(flying))
        await until(lambda: any(len(stream.ids) > 10 for stream in engine.replicas[0]._streams))
        os.kill(world.pid, signal.SIGKILL)
        asked = [request([*PROMPT, n], 48, seed=n, request_id=f"after-{n}/0") for n in range(4)]
        made = await asyncio.gather(flight, *map(engine.generate, asked))
        for wanted, got in zip([flying, *asked], made, strict=True):
            assert set(got.versions) == {1} and len(got.token_ids) == wanted.max_tokens
            assert apart(world.policies[1], wanted.token_ids, got.token_ids, got.logprobs).max() < TOLERANCE
        assert engine.lost > 0

    world.use(work)
    url, pid = world.verb.ready()
    assert url == world.url and pid != world.pid
    assert all_gone([world.pid]) == []
    world.pid = pid


def test_sigterm_ends_it_and_every_process(world: World) -> None:
    pids = group(world.pid)
    assert len(pids) >= 4, "the server, its engine, its worker, the guard"
    world.verb.process.send_signal(signal.SIGTERM)
    assert world.verb.process.wait(timeout=120.0) == 0, world.verb.said.read_text()
    assert all_gone(pids) == []
