"""What the engine suites share: a small policy folder, its exact log-probs, requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.toy_repair import tokenizer
from harness.chat import Chat
from harness.protocols import GenerateRequest
from trainer.model import Policy, random_policy
from trainer.weights import export, write_file

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
MAX_LEN = 40_000
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")


def write_policy(folder: Path, seed: int) -> Path:
    """A tiny dense policy with the toy tokenizer."""
    tokenizer.write(folder)
    size = tokenizer.build_tokenizer().get_vocab_size()
    fields = {
        "model_type": "qwen3",
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    policy = random_policy(fields, seed)
    policy.model.config.to_json_file(folder / "config.json")
    write_file(dict(export(policy.model)), folder / "model.safetensors")
    return folder


def logprobs(policy: Policy, tokens: list[int]) -> torch.Tensor:
    """log p of tokens 1.. by one full forward."""
    with torch.no_grad():
        n = len(tokens)
        return policy(torch.tensor(tokens, dtype=torch.int32), torch.arange(n), [0, n], torch.arange(1, n))[0]


class World:
    """An engine and the loop in which its connections live."""

    def __init__(self, runner: asyncio.Runner, engine: Any, chat: Chat) -> None:
        self.runner, self.engine, self.chat = runner, engine, chat

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for it, but not for ever."""
        return self.runner.run(asyncio.wait_for(work, WAIT_S))


def request(prompt: list[int], n: int, *, seed: int | None = 0, stop: tuple[int, ...] = (), **more: Any) -> GenerateRequest:
    return GenerateRequest(prompt, n, stop, seed=seed, **more)
