"""Both engines, tokens/s: the embedded one against Hugging Face `generate`, and our vLLM client against vLLM's own. Two lines.

Embedded: the engine's process over HTTP, as a run starts it, against `generate` with its default cache on the same weights, at
batches of 8 and 32 prompts of 128 tokens, 64 new ones, sampled, with their log-probs on both sides. One thread each. Time is
CPU time: that of the engine's process and of its client together, against that of `generate`. The log-probs of both must agree.

vLLM: `VllmEngine` against the benchmark function behind `vllm bench serve` (openai backend, `/v1/completions`, token ids,
ignore_eos), on the same server with the same load, log-probs on both sides; `ratio_without` is against theirs without them.
Both stream; our client asks for eight tokens per event, theirs takes the server's default of one.

Sides in turns, in short rounds; a ratio is the median of the rounds' ratios.

    python -m benchmarks engine          the second line needs `make setup-vllm`
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine_support import MOE, NEW, PROMPT, VLLM, prompts, require_vllm, vllm_engine, write_policy
from harness import processes
from harness.engines.embedded import EmbeddedEngine
from harness.engines.vllm_launch import NAME
from harness.protocols import GenerateRequest, Generation, InferenceEngine

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart-warm"
BATCHES, ROUNDS = (8, 32), 9
CONCURRENCY, REQUESTS, VLLM_ROUNDS = 32, 128, 7
START_S, ROUND_S = 300.0, 600.0
AGREE = 1e-4
"""Nats."""


def main() -> None:
    """Print the JSON lines."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        moe = write_policy(folder / "moe", MOE, seed=0)
        print(json.dumps(embedded({"quickstart": QUICKSTART, "moe": moe}, folder)), flush=True)
        require_vllm("engine")
        print(json.dumps(asyncio.run(through_vllm(moe, folder))))


# --- the embedded engine ---


def embedded(models: dict[str, Path], folder: Path) -> dict[str, Any]:
    """The JSON line of these model folders; its headline is the case with the smallest ratio."""
    cases = {
        f"{name}_{batch}": case
        for name, model in models.items()
        for batch, case in asyncio.run(against_generate(model, folder / "engine.log")).items()
    }
    worst = min(cases.values(), key=lambda case: float(case["ratio"]))
    line = {"bench": "engine", "engine": "embedded", "value": worst["value"], "unit": "tokens/s", "ratio": worst["ratio"]}
    line |= {"against": "Hugging Face generate, same log-probs", "cases": cases, "clock": "CPU time, 1 thread each"}
    return line | {"load": round(os.getloadavg()[0], 1)}


async def against_generate(model: Path, log: Path) -> dict[int, dict[str, float]]:
    """For each batch size, tokens/s of both and their ratio."""
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine = await EmbeddedEngine.launch(
        model, log, slots=max(BATCHES), max_len=PROMPT + NEW, version=0, threads=1, seed=0, start_s=START_S
    )
    try:
        return {batch: await rounds(engine, other, batch) for batch in BATCHES}
    finally:
        await engine.close()


async def rounds(engine: EmbeddedEngine, other: Any, batch: int) -> dict[str, float]:
    """Both sides in turns; the first round warms up."""
    rng, ours, theirs, wall = random.Random(0), [], [], []
    for _ in range(1 + ROUNDS):
        ids = prompts(rng, batch, other.config.vocab_size)
        start, cpu = time.monotonic(), cpu_s(engine.pid) + time.process_time()
        answers = await all_at_once(engine, ids)
        middle, ours_s = time.monotonic(), cpu_s(engine.pid) + time.process_time() - cpu
        cpu = time.process_time()
        generate(other, ids)
        ours.append(ours_s)
        theirs.append(time.process_time() - cpu)
        wall.append((time.monotonic() - middle) / (middle - start))
    check(other, ids[0] + answers[0].token_ids, answers[0].logprobs)
    tokens = batch * NEW
    ratio = statistics.median(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))
    case = {"value": round(tokens / statistics.median(ours[1:])), "against": round(tokens / statistics.median(theirs[1:]))}
    return case | {"ratio": round(ratio, 2), "wall_ratio": round(statistics.median(wall[1:]), 2)}


async def all_at_once(engine: InferenceEngine, ids: list[list[int]]) -> list[Generation]:
    """One answer of `NEW` tokens per prompt."""
    answers = await asyncio.gather(*(engine.generate(GenerateRequest(prompt, NEW, ())) for prompt in ids))
    assert all(len(answer.token_ids) == NEW for answer in answers)
    return answers


def generate(model: Any, ids: list[list[int]]) -> Tensor:
    """Log-probs of the tokens that Hugging Face samples, [B, NEW]."""
    batch = torch.tensor(ids)
    out = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs: Tensor = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    assert logprobs.shape == (len(ids), NEW)
    return logprobs


def check(model: Any, tokens: list[int], logprobs: list[float]) -> None:
    """The engine's log-probs are those of Hugging Face's full forward."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        scores = model(input_ids=ids[None], use_cache=False).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    difference = float((scores.gather(1, ids[PROMPT:, None])[:, 0] - torch.tensor(logprobs)).abs().max())
    assert difference < AGREE, f"the log-probs differ by {difference} nats"


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- vLLM ---


async def through_vllm(model: Path, folder: Path) -> dict[str, Any]:
    """The JSON line of our client against vLLM's own."""
    rng = random.Random(0)
    ours, theirs, plain = [], [], []
    async with vllm_engine(model, folder / "vllm.log", max_num_seqs=CONCURRENCY) as engine:
        client = await Client.start(folder / "client.log")
        try:
            for _ in range(1 + VLLM_ROUNDS):
                ours.append(await our_round(engine, prompts(rng, REQUESTS, MOE["vocab_size"])))
                for rates, logprobs in ((theirs, 0), (plain, None)):
                    job = {"url": engine.replicas[0].url, "model": NAME, "new": NEW, "concurrency": CONCURRENCY}
                    job |= {"prompts": prompts(rng, REQUESTS, MOE["vocab_size"]), "logprobs": logprobs}
                    rates.append(await client.run(job))
        finally:
            await client.close()

    def ratio(rates: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(ours[1:], rates[1:], strict=True)), 3)

    line = {"bench": "engine", "engine": "vllm", "value": round(statistics.median(ours[1:])), "unit": "tokens/s"}
    line |= {"ratio": ratio(theirs), "against": "vllm bench serve, openai backend, token ids, log-probs"}
    line |= {"against_value": round(statistics.median(theirs[1:])), "ratio_without": ratio(plain), "concurrency": CONCURRENCY}
    return line | {"requests": REQUESTS, "load": round(os.getloadavg()[0], 1)}


async def our_round(engine: InferenceEngine, ids: list[list[int]]) -> float:
    """Tokens/s through our client, `CONCURRENCY` requests at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int, prompt: list[int]) -> int:
        async with gate:
            return len((await engine.generate(GenerateRequest(prompt, NEW, (), request_id=f"{number}"))).token_ids)

    start = time.monotonic()
    tokens = sum(await asyncio.gather(*map(one, range(len(ids)), ids)))
    assert tokens == REQUESTS * NEW
    return tokens / (time.monotonic() - start)


class Client:
    """vLLM's benchmark client as a process that stays, so that its start is in no round."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    @classmethod
    async def start(cls, log: Path) -> Client:
        """Start it in vLLM's interpreter."""
        script = Path(__file__).with_name("_vllm_client.py")
        env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return cls(await processes.start([str(VLLM), str(script)], log, env, stdout=asyncio.subprocess.PIPE), log)

    async def run(self, job: dict[str, Any]) -> float:
        """Tokens/s of one run."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        async with asyncio.timeout(ROUND_S):
            answer = await self._process.stdout.readline()
        assert answer, f"vLLM's client has ended:\n{processes.tail(self._log)}"
        result = json.loads(answer)
        assert result["tokens"] == REQUESTS * NEW, result
        return float(result["tokens_s"])

    async def close(self) -> None:
        """End it."""
        await processes.end(self._process, 5.0)
