"""The gate before RL of tier A: does the warm policy choose among the candidates, each about as often, and write well enough?

Flows in: the running engine. Flows out: the probability of the three candidates as first words (exact, from scores), and the
share of sampled replies that would be rewarded if the chosen style were the preferred one. Without either, no phase can begin.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from environments.online_writing.symbols import CHOICES, judge
from harness.chat import Chat
from harness.errors import ConfigError
from harness.protocols import GenerateRequest, InferenceEngine
from harness.task import Task

PROMPTS = 24
SAMPLES = 192
CHOICE = (0.2, 0.5)
"""Bounds of the mean probability of each candidate."""
SUCCESS = (0.55, 0.95)
"""Bounds of the share of good replies: enough to be reinforced, and something left to learn."""
MAX_TOKENS = 24


async def writing_gate(engine: InferenceEngine, chat: Chat, tasks: Sequence[Task]) -> dict[str, Any]:
    """The two numbers. Raises `ConfigError` naming the gate if one is out of its bounds."""
    step = max(1, len(tasks) // PROMPTS)
    chosen = [tasks[i] for i in range(0, len(tasks), step)][:PROMPTS]
    probability = await choice_probabilities(engine, chat, chosen)
    lowest, highest = min(probability.values()), max(probability.values())
    if lowest < CHOICE[0] or highest > CHOICE[1]:
        raise ConfigError(
            f"gate `chooses`: the warm policy takes a candidate with probability {lowest:.2f} to {highest:.2f}, not within "
            f"{CHOICE[0]} to {CHOICE[1]}",
            hint="take another seed, or longer SFT",
        )
    success = await success_rate(engine, chat, chosen)
    if not SUCCESS[0] <= success <= SUCCESS[1]:
        raise ConfigError(
            f"gate `writes`: {success:.2f} of the warm policy's replies are good, not {SUCCESS[0]} to {SUCCESS[1]}",
            hint="take another seed, or longer SFT",
        )
    return {"gate": "chooses and writes", "lowest": lowest, "highest": highest, "success": success}


async def choice_probabilities(engine: InferenceEngine, chat: Chat, tasks: Sequence[Task]) -> dict[str, float]:
    """Mean probability that the reply begins with a candidate, over the tasks that offer it."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        opening = chat.opening(task.messages, ())
        for choice, style in CHOICES.items():
            if style in task.data["candidates"]:
                scores = await engine.score(opening + chat.encode(choice))
                found.setdefault(style, []).append(math.exp(scores[-1]))
    return {style: sum(values) / len(values) for style, values in found.items()}


async def success_rate(engine: InferenceEngine, chat: Chat, tasks: Sequence[Task]) -> float:
    """Share of sampled replies that are good in the style that they choose."""

    async def good(number: int) -> bool:
        task = tasks[number % len(tasks)]
        answer = await engine.generate(
            GenerateRequest(
                token_ids=chat.opening(task.messages, ()),
                max_tokens=MAX_TOKENS,
                stop_token_ids=chat.stop_ids,
                seed=number,
                request_id=f"gate/{number}",
            )
        )
        verdict = judge(chat.text_of(answer.token_ids), task.data["topic"], "academic")
        return answer.finish_reason == "stop" and verdict.quality and verdict.written is not None

    return sum(await asyncio.gather(*(good(number) for number in range(SAMPLES)))) / SAMPLES
