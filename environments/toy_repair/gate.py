"""The gate before RL: does the warm policy read the numbers at all? Format and success rate cannot tell; this can.

Flows in: the running engine. Flows out: the probability that the policy restates the wanted number and gives the right name
in its edit, on tasks whose right name is not the first shown one (where the demonstrator's habit is wrong). RL sharpens this
skill; it does not invent it.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from typing import Any

from environments.toy_repair.expert import call
from harness.chat import Chat
from harness.errors import ConfigError
from harness.protocols import InferenceEngine, Tool, ToolResult
from harness.task import Task

TASKS = 64
THRESHOLD = 0.12
"""An uninformed policy gives about 0.06; one that learned from the demonstrator about its share of right edits."""


async def skill_gate(engine: InferenceEngine, chat: Chat, tasks: Sequence[Task]) -> dict[str, Any]:
    """Mean probability of the right edit. Raises `ConfigError` naming the gate if it is below the threshold."""
    chosen = [t for t in (tasks[i] for i in range(min(len(tasks), 8 * TASKS))) if not _habit_is_right(t)][:TASKS]
    probability = 0.0
    for task in chosen:
        prompt, answer = prompt_before_number(chat, task)
        tokens = prompt + answer
        scores = await engine.score(tokens)
        probability += math.exp(sum(scores[len(prompt) - 1 :])) / len(chosen)
    if probability < THRESHOLD:
        raise ConfigError(
            f"gate `reads the numbers`: the warm policy makes the right edit with probability {probability:.3f}, "
            f"not {THRESHOLD}: it lacks the skill that RL is to sharpen",
            hint="take another seed, or longer SFT",
        )
    return {"gate": "reads the numbers", "probability": probability, "threshold": THRESHOLD}


def _habit_is_right(task: Task) -> bool:
    return bool(task.data["wanted"] == next(n for n in task.data["names"] if n != task.data["planted"]))


def prompt_before_number(chat: Chat, task: Task) -> tuple[list[int], list[int]]:
    """(tokens up to the number of the first edit, tokens of the right number and name)."""
    args, want = ast.literal_eval(task.data["files"]["tests/cases.txt"])[0]
    report = {"want": want, "got": args[task.data["planted"]], **args, "ok": False}
    tools = [_named(name) for name in ("run_tests", "read_code", "edit", "finish")]
    opening = chat.opening(task.messages, tools)
    look = chat.encode(call("run_tests")) + [chat.stop_ids[0]]
    seen = [{"role": "tool", "tool_call_id": "call_0_0", "content": json.dumps(report)}]
    before, answer, rest = call("edit", want=want, use=task.data["wanted"]).partition(f": {want}, ")
    answer += rest.partition("}")[0]
    prompt = opening + look + chat.continuation(task.messages, seen, tools) + chat.encode(before)
    return prompt, chat.encode(answer)


def _named(name: str) -> dict[str, Any]:
    async def nothing(_: dict[str, Any]) -> ToolResult:
        return ToolResult("")

    return Tool(name, "", {"type": "object"}, nothing).schema()
