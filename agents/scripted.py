"""An agent without a mind, for tests: plays a fixed list of tool calls and ignores what the model says.

The model is still called before every step, so sessions, engines and limits behave as with a real agent.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from agents.tool_loop import run_tool
from harness.protocols import ChatSession, LiveTask, Message, Sandbox, ToolCall
from harness.task import Limits, Task, Termination


class ScriptedAgentConfig(BaseModel):
    """The calls to make: (tool name, JSON arguments)."""

    model_config = ConfigDict(extra="forbid")
    calls: list[tuple[str, str]]


class ScriptedAgent:
    """See the module docstring."""

    Config = ScriptedAgentConfig

    def __init__(self, config: ScriptedAgentConfig) -> None:
        self.config = config

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """Play the list; finished when a tool says so, out of turns otherwise."""
        messages: list[Message] = list(task.messages)
        for number, (name, arguments) in enumerate(self.config.calls[: limits.max_turns]):
            reply = await session.complete(messages, [tool.schema() for tool in live.tools])
            result = await run_tool(live.tools, ToolCall(f"scripted_{number}", name, arguments))
            messages += [reply.message(), {"role": "user", "content": result.content}]
            if result.done:
                return Termination.FINISHED
        return Termination.MAX_TURNS
