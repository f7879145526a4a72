"""What the token session costs per turn, late in a conversation: CPU milliseconds with its journal, on an instant engine.

A turn brings 2 kB of tool output, 300 of them about 128 thousand tokens, of a byte-pair tokenizer trained on such text. The
ratio is the cost at turn 300 over that at turn 5 (1 is flat), against the same with the whole history rendered each turn. Each
is the mean of some turns around, each turn at its best of several conversations. What grows is the copy of the token list for
the engine. The proof that short renderings are exact (at continuations 2, 4, 8, ..) lies outside both windows; the mean over
all turns contains it.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from environments.toy_repair.expert import call
from environments.toy_repair.tokenizer import SPECIAL, TEMPLATE
from harness.chat import Chat
from harness.engines.scripted import ScriptedEngine
from harness.parsers import hermes
from harness.protocols import GenerateRequest, Generation, Message
from harness.session import TokenSession
from harness.task import Limits

TURNS, CONVERSATIONS = 310, 5
EARLY, LATE = slice(5, 8), slice(290, 310)
LIMITS = Limits(max_turns=10_000, max_context=10_000_000)
TOOLS = [{"type": "function", "function": {"name": "edit", "description": "", "parameters": {"type": "object"}}}]


class Instant(ScriptedEngine):
    """Says the same each time without reading the prompt."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """One call."""
        ids = [*self.chat.encode(call("edit")), self.chat.stop_ids[0]]
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


def main() -> None:
    """Print the JSON line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        chat = Chat(folder, ["<|im_end|>"])

        def cost(whole: bool) -> np.ndarray:
            played = [asyncio.run(_play(chat, folder / f"{whole}{i}", whole)) for i in range(CONVERSATIONS + 1)]
            return np.min(played[1:], axis=0) * 1e3

        ours, full = cost(whole=False), cost(whole=True)
    early, late, full_early, full_late = (float(x[window].mean()) for x in (ours, full) for window in (EARLY, LATE))
    line = {"bench": "session_turn", "value": round(late, 3), "unit": "ms CPU per turn at turn 300"}
    against = (
        f"turn 5, {early:.3f} ms (mean of all turns {ours.mean():.3f} ms); "
        f"rendering the whole history: {full_late:.3f} ms at turn 300, {full_late / full_early:.1f} times its turn 5"
    )
    print(json.dumps(line | {"ratio": round(late / early, 2), "against": against}))


async def _play(chat: Chat, folder: Path, whole: bool) -> list[float]:
    """CPU seconds of each turn of one conversation."""
    session = TokenSession(chat, Instant(chat, lambda text, rng: ""), hermes, LIMITS, "bench", folder=folder)
    rng = random.Random(0)
    messages: list[Message] = [
        {"role": "system", "content": "You are a careful agent. " * 300},
        {"role": "user", "content": "repair it"},
    ]
    spent = []
    for _ in range(TURNS):
        start = time.process_time()
        reply = await session.complete(messages, TOOLS)
        spent.append(time.process_time() - start)
        session._segments[0].full = whole
        messages += [reply.message(), {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": _output(rng)}]
    (trajectory,) = session.trajectories("t", {})
    assert trajectory.n_turns == TURNS and 100_000 < len(trajectory) < 160_000
    return spent


def _output(rng: random.Random) -> str:
    """About 2 kB of what a command prints."""
    words = ("parser", "session", "value", "index", "config", "table", "reader", "result", "raise", "return", "assert")
    return "\n".join(f"{n}: {' '.join(rng.choices(words, k=6))}" for n in range(45))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([call("edit") + _output(random.Random(i)) for i in range(50)], trainer)
    return tokenizer
