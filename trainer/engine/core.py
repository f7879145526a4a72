"""Continuous batching: at every step each running sequence computes its next tokens, and those that are caught up sample one.

Flows in: requests of token ids, and new weights between steps. Flows out: sampled ids with their log-probs (temperature
applied, fp32) and the version of the weights that made their logits. Weights change only between steps, so a version
boundary is a token boundary. Running sequences keep their old keys and values (`keep_kv`); a finished sequence's cache is
reused only if all of it was computed under the current version. With `noise`, Gaussian noise of that standard deviation is
added to the logits before sampling and log-probs alike; scores of given tokens stay exact.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.engine.decoder import decoder
from trainer.engine.slots import KVSlots, Row
from trainer.weights import load_tensors

TOKENS_PER_STEP = 2_048


@dataclass(slots=True)
class Sequence:
    """One request: prompt and sampled tokens, and how many of them are in the cache."""

    tokens: list[int]
    max_tokens: int
    stop: frozenset[int]
    temperature: float
    rng: random.Random
    done: Callable[[Sequence], None]
    prompt: int = 0
    computed: int = 0
    slot: int = -1
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    aborted: bool = False

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


@dataclass(slots=True)
class Cached:
    """What a slot's cache holds: its tokens, and the version that computed all of them (None: several)."""

    tokens: list[int]
    version: int | None


class EngineCore:
    """One model, `slots` sequences at a time; others wait in order of arrival."""

    def __init__(self, model: Any, slots: int, max_len: int, version: int = 0, noise: float = 0.0) -> None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.model = model.eval()
        self._hidden = decoder(model)
        self.version = version
        self.max_len = max_len
        self.noise = noise
        self._kv = KVSlots(config.num_hidden_layers, slots, heads, dim, max_len)
        self._free = deque(Cached([], None) for _ in range(slots))
        self._free_slots = deque(range(slots))
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._slot_version: dict[int, int | None] = {}

    @property
    def busy(self) -> bool:
        """True while any sequence runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self._running), len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request. Raises `ValueError` if it cannot fit, asks for nothing or would break a step for all."""
        self._check(sequence.tokens)
        if sequence.max_tokens < 1:
            raise ValueError(f"max_tokens is {sequence.max_tokens}")
        if not 0.0 <= sequence.temperature < math.inf:
            raise ValueError(f"temperature is {sequence.temperature}")
        if len(sequence.tokens) + sequence.max_tokens > self.max_len:
            raise ValueError(f"{len(sequence.tokens)} prompt + {sequence.max_tokens} new tokens exceed {self.max_len}")
        self._waiting.append(sequence)

    def _check(self, tokens: list[int]) -> None:
        size = self.model.config.vocab_size
        if not tokens or not 0 <= min(tokens) <= max(tokens) < size:
            raise ValueError(f"a prompt needs token ids in [0, {size})")

    def set_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace all weights between steps."""
        for slot in self._slot_version:
            self._slot_version[slot] = None
        for cached in self._free:
            cached.version = None
        load_tensors(self.model, tensors)
        self.version = version

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """log p(token | before) of tokens 1.., nats. Raises `ValueError` for tokens that the model does not have."""
        self._check(tokens)
        ids = torch.tensor(tokens)
        hidden = self.model.model(
            input_ids=ids[None],
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
            cu_seqlens=[0, len(tokens)],
        ).last_hidden_state[0, :-1]
        logprobs = torch.log_softmax(self.model.lm_head(hidden).float(), -1)
        return [float(x) for x in logprobs.gather(1, ids[1:, None])[:, 0]]

    @torch.inference_mode()
    def step(self) -> None:
        """Compute one step for as many sequences as fit; finished ones leave through their `done`."""
        self._drop_aborted()
        self._admit()
        if not self._running:
            return
        rows, chosen = self._rows()
        ids = torch.tensor([t for s, r in zip(chosen, rows, strict=True) for t in s.tokens[r.start : r.start + r.count]])
        positions = self._kv.begin(rows)
        hidden = self._hidden(ids, positions, self._kv)
        last = torch.tensor([row.count for row in rows]).cumsum(0) - 1
        ready = []
        for number, (sequence, row) in enumerate(zip(chosen, rows, strict=True)):
            sequence.computed += row.count
            if sequence.computed == len(sequence.tokens):
                ready.append(number)
        if ready:
            logits = self.model.lm_head(hidden[last[ready]]).float()
            self._sample([chosen[i] for i in ready], logits)
        self._retire()

    def _rows(self) -> tuple[list[Row], list[Sequence]]:
        rows: list[Row] = []
        chosen: list[Sequence] = []
        room = TOKENS_PER_STEP
        for sequence in sorted(self._running, key=lambda s: len(s.tokens) - s.computed != 1):
            count = min(len(sequence.tokens) - sequence.computed, room)
            if count == 0:
                break
            rows.append(Row(sequence.slot, sequence.computed, count))
            chosen.append(sequence)
            room -= count
        order = sorted(range(len(rows)), key=lambda i: (rows[i].count != 1, rows[i].slot))
        return [rows[i] for i in order], [chosen[i] for i in order]

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> None:
        if self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        temperature = torch.tensor([s.temperature or 1.0 for s in sequences])
        logprobs = torch.log_softmax(logits / temperature[:, None], -1)
        draws = torch.tensor([s.rng.random() for s in sequences], dtype=torch.float64)
        cumulative = logprobs.double().exp().cumsum(-1)
        sampled = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
        sampled = sampled.clamp_(max=logits.shape[1] - 1)
        greedy = [s.temperature == 0.0 for s in sequences]
        tokens = torch.where(torch.tensor(greedy), logits.argmax(-1), sampled) if any(greedy) else sampled
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for sequence, token, logprob in zip(sequences, tokens.tolist(), chosen.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.stop:
                sequence.finish = "stop"
            elif len(sequence.logprobs) >= sequence.max_tokens:
                sequence.finish = "length"

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            best, reuse = 0, 0
            for index, cached in enumerate(self._free):
                if cached.version == self.version and (n := _common(cached.tokens, sequence.tokens)) > reuse:
                    best, reuse = index, n
            sequence.slot = self._free_slots[best]
            del self._free_slots[best], self._free[best]
            sequence.computed = min(reuse, len(sequence.tokens) - 1)
            self._slot_version[sequence.slot] = self.version
            self._running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        version = self._slot_version.pop(sequence.slot)
        self._free.append(Cached(sequence.tokens[: sequence.computed], version))

    def _retire(self) -> None:
        finished = [s for s in self._running if s.finish]
        self._running = [s for s in self._running if not s.finish]
        for sequence in finished:
            self._release(sequence)
            sequence.done(sequence)

    def _drop_aborted(self) -> None:
        self._waiting = deque(s for s in self._waiting if not s.aborted)
        for sequence in [s for s in self._running if s.aborted]:
            self._running.remove(sequence)
            self._release(sequence)


def _common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
