"""One training step on trajectories of mixed lengths: ours, packed, against Hugging Face's, padded to the longest.

Ours: packed attention and log-probs of action tokens only. Theirs: the same class and weights with attention "sdpa", an
attention mask, full logits and the model's own cross-entropy on the same action tokens. Both do forward, backward and AdamW, in
turns, in process CPU time on one thread; the best of three steps counts. The losses of all steps must agree to 1e-4: the first
says that both compute the same, the later ones that the gradients did too.

    python -m benchmarks packed_step
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.trajectory import Trajectory, TrajectoryBuilder
from trainer.batch import Packed, pack
from trainer.model import Policy, random_policy

TRAJECTORIES, SHORTEST, LONGEST, STEPS = 16, 32, 1024, 3
ACTION_RUN, OBSERVATION_RUN = 24, 72
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16_384,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
"""The wide initialisation spreads the log-probs, so that a loss of other tokens would be seen."""


def main() -> None:
    """Print one JSON line."""
    torch.set_num_threads(1)
    packed = pack(trajectories())
    policy = random_policy(FIELDS, seed=0)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FIELDS), attn_implementation="sdpa", dtype=torch.float32)  # type: ignore[no-untyped-call]
    other.load_state_dict(policy.model.state_dict())
    padded = pad(packed)

    sides: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (policy, lambda: packed_loss(policy, packed)),
        (other, lambda: other(**padded, use_cache=False).loss),
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model, _ in sides]
    best, losses, difference = [float("inf")] * 2, [0.0] * 2, 0.0
    for _ in range(STEPS):
        for i, (_, loss_of) in enumerate(sides):
            start = time.process_time()
            optimizers[i].zero_grad()
            loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[i].step()
            best[i] = min(best[i], time.process_time() - start)
            losses[i] = loss.item()
        difference = max(difference, abs(losses[0] / losses[1] - 1))
        assert difference < 1e-4, f"two different losses: {losses}"
    ours, theirs = best
    tokens = len(packed.tokens)
    line = {"bench": "packed_step", "value": round(tokens / ours), "unit": "tokens/s", "ratio": round(theirs / ours, 2)}
    line |= {"against": "Hugging Face, padded, sdpa, full logits", "against_value": round(tokens / theirs)}
    line |= {"tokens": tokens, "padded_tokens": padded["input_ids"].numel(), "action_tokens": int(packed.mask.sum())}
    line |= {"parameters": sum(p.numel() for p in policy.parameters()), "loss_difference": difference}
    print(json.dumps(line | {"clock": "process CPU time, 1 thread"}))


def trajectories(seed: int = 0) -> list[Trajectory]:
    """Random tokens in turns, a quarter of them actions; lognormal lengths, the longest at the limit."""
    rng = random.Random(seed)
    made = []
    for i in range(TRAJECTORIES):
        left = LONGEST if i == 0 else min(LONGEST, max(SHORTEST, round(rng.lognormvariate(5.5, 0.8))))
        builder = TrajectoryBuilder()
        while left:
            observed = min(left - 1, rng.randint(1, 2 * OBSERVATION_RUN))
            acted = min(left - observed, rng.randint(1, 2 * ACTION_RUN))
            ids = [rng.randrange(FIELDS["vocab_size"]) for _ in range(observed + acted)]
            builder.observe(ids[:observed])
            builder.act(ids[observed:], [-1.0] * acted, [0] * acted)
            left -= observed + acted
        made.append(builder.build(f"{i}", "task", reward=1.0, info={"termination": "finished", "sampling": ""}))
    return made


def packed_loss(policy: Policy, packed: Packed) -> Tensor:
    """Mean cross-entropy of the action tokens."""
    logprobs: Tensor = policy(packed.tokens, packed.positions, packed.cu_seqlens, packed.where)[0]
    return -logprobs.mean()


def pad(packed: Packed) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels`, [B, longest], padded on the right."""
    lengths = packed.boundaries.diff().tolist()

    def rows(x: Tensor, padding: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(torch.split(x.long(), lengths)), batch_first=True, padding_value=padding)

    labels = torch.where(packed.mask, packed.tokens.long(), -100)
    ones = torch.ones_like(packed.tokens)
    return {"input_ids": rows(packed.tokens, 0), "attention_mask": rows(ones, 0), "labels": rows(labels, -100)}
