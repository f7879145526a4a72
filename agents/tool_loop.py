"""The smallest agent: call the model, run the native tools it asks for, until one says the task is done.

Where a task has no tools, the first reply is its answer and ends the episode. Where it has tools and takes answers
(`LiveTask.on_reply`), a reply that calls none is one; where it does not, such a reply is nudged.

A call that is not JSON, names no tool or does not match the tool's schema is answered with an error the model can read; it
counts as a turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.protocols import ANSWER, ChatSession, LiveTask, Message, Sandbox, Tool, ToolCall, ToolResult
from harness.task import Limits, Task, Termination

JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class ToolLoopConfig(BaseModel):
    """Options of the tool loop."""

    model_config = ConfigDict(extra="forbid")
    nudge: str = "error: call a tool"
    """What a turn without a tool call is answered."""


class ToolLoop:
    """See the module docstring."""

    Config = ToolLoopConfig

    def __init__(self, config: ToolLoopConfig) -> None:
        self.config = config

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """Play one episode with the environment's tools."""
        messages: list[Message] = list(task.messages)
        schemas = [tool.schema() for tool in live.tools]
        for _ in range(limits.max_turns):
            reply = await session.complete(messages, schemas)
            on_reply = getattr(live, "on_reply", None)
            if not schemas and on_reply is None:
                await sandbox.write(ANSWER, reply.content.encode())
                return Termination.FINISHED
            messages.append(reply.message())
            if not reply.tool_calls:
                answered = ToolResult(self.config.nudge) if on_reply is None else await on_reply(reply.content)
                if answered.done:
                    return Termination.FINISHED
                messages.append({"role": "user", "content": answered.content})
            for call in reply.tool_calls:
                result = await run_tool(live.tools, call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content})
                if result.done:
                    return Termination.FINISHED
        return Termination.MAX_TURNS


async def run_tool(tools: Sequence[Tool], call: ToolCall) -> ToolResult:
    """Run one call, or say what is wrong with it."""
    tool = next((t for t in tools if t.name == call.name), None)
    if tool is None:
        return ToolResult(f"error: no tool {call.name!r}; there are: {', '.join(t.name for t in tools)}")
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return ToolResult("error: the arguments are not JSON")
    wrong = mismatch(arguments, tool.parameters)
    return ToolResult(f"error: {wrong}") if wrong else await tool.call(arguments)


def mismatch(arguments: Any, schema: dict[str, Any]) -> str | None:
    """The first way in which arguments miss a flat JSON schema (required, types, additionalProperties), or None."""
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"`{name}` is missing"
    for name, value in arguments.items():
        if name not in properties:
            if schema.get("additionalProperties", True):
                continue
            return f"`{name}` is not an argument"
        kind = properties[name].get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if all(k in JSON_TYPES for k in kinds) and not any(_is_of(value, k) for k in kinds):
            return f"`{name}` is not of type {' or '.join(kinds)}"
    return None


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
