"""What the engine benchmarks share: policies with random weights, prompts, and a real vLLM server with our client."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from environments.toy_repair import tokenizer
from harness.engines.vllm import VllmEngine
from harness.engines.vllm_launch import described, launch
from trainer.model import random_policy
from trainer.weights import export, write_file

VLLM = Path(sys.prefix) / "vllm" / "bin" / "python"
PROMPT, NEW = 128, 64
"""Tokens of every prompt and of every answer."""

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1_024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
"""1.8 million parameters; vLLM on CPUs takes no smaller heads."""
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1_024,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M's shape: 538 MB in fp32."""


def write_policy(folder: Path, fields: dict[str, Any], seed: int) -> Path:
    """A model folder with random fp32 weights; its tokenizer knows some of the words."""
    tokenizer.write(folder)
    policy = random_policy(fields, seed)
    policy.model.config.to_json_file(folder / "config.json")
    write_file(dict(export(policy.model)), folder / "model.safetensors")
    return folder


def prompts(rng: random.Random, count: int, words: int) -> list[list[int]]:
    """Random token ids below `words`, [count, PROMPT]."""
    return [[rng.randrange(words) for _ in range(PROMPT)] for _ in range(count)]


def require_vllm(bench: str) -> None:
    """End with what is missing and how to get it."""
    if not VLLM.is_file():
        sys.exit(f"error: {bench}: vLLM is not installed\nhint: make setup-vllm")


@asynccontextmanager
async def vllm_engine(model: Path, log: Path, **fields: Any) -> AsyncIterator[VllmEngine]:
    """Our client with one real server of the policy in `model`, in fp32. `fields`: more of `VllmServer`."""
    description = described({"model": model, "max_model_len": 1_024, "start_s": 1_200.0, **fields})
    server = await launch(description, log)
    try:
        engine = VllmEngine([server])
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        await server.close()
