"""Any command-line agent as it is: it runs in the sandbox, and its model is the episode's gateway.

Flows in: a command, a task, a token session. Flows out: how the episode ended. The command finds the task's text in SAO_TASK
and the model in OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY for that shape); any model name
will do. Sampling settings that it asks for are ignored: they are the run's.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from agents.relay import run_with_gateway
from harness.errors import EnvironmentFault
from harness.gateway import Endpoint, Gateway
from harness.protocols import ChatSession, LiveTask, Sandbox
from harness.task import Limits, Task, Termination

log = logging.getLogger("sao")

GRACE_S = 10.0
"""How long a command may go on when its episode is over (its model answers nothing but that)."""


class CommandConfig(BaseModel):
    """Options of a command-line agent."""

    model_config = ConfigDict(extra="forbid")
    command: str
    """Shell command, run once per episode in the sandbox's working folder, for example `mini -y -t "$SAO_TASK"`."""
    env: dict[str, str] = {}
    """More environment variables of the command."""


class CommandAgent:
    """See the module docstring."""

    Config = CommandConfig

    def __init__(self, config: CommandConfig) -> None:
        self.config = config
        self._gateway: Gateway | None = None
        self._starting = asyncio.Lock()

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """Run the command once; what it leaves in the sandbox is judged."""
        async with self._starting:
            if self._gateway is None:
                self._gateway = Gateway()
                await self._gateway.start()
        async with self._gateway.open(session) as endpoint:
            env = {
                **self.config.env,
                "SAO_TASK": "\n\n".join(str(message["content"]) for message in task.messages),
                **_variables(endpoint),
            }
            port = urlsplit(endpoint.url).port
            assert port is not None
            command = asyncio.create_task(run_with_gateway(sandbox, self.config.command, env, port))
            over = asyncio.create_task(endpoint.ended.wait())
            try:
                await asyncio.wait((command, over), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((command,), timeout=GRACE_S)
                if endpoint.termination is not None and not command.done():
                    return endpoint.termination
                code, printed = await command
            finally:
                over.cancel()
                command.cancel()
                await asyncio.gather(over, command, return_exceptions=True)
        if endpoint.termination is not None:
            return endpoint.termination
        if endpoint.fault is not None:
            raise endpoint.fault
        if endpoint.calls == 0:
            raise EnvironmentFault(f"the agent's command made no model call (exit code {code}): {printed[-2000:].strip()}")
        if code != 0:  # the model answered, so what it said made the command fail: it is judged as it stands
            log.warning("episode %s: the agent's command ended with code %d: %s", session.episode_id, code, printed[-500:])
            session.count("command_failed")
        return Termination.FINISHED

    async def close(self) -> None:
        """End the gateway."""
        if self._gateway is not None:
            await self._gateway.close()


def _variables(endpoint: Endpoint) -> dict[str, str]:
    """Where the model is, as the usual libraries look for it; inside a sandbox the relay's address replaces ours."""
    inside = endpoint.url.replace(urlsplit(endpoint.url).netloc, "{gateway}")
    return {
        "OPENAI_BASE_URL": inside,
        "OPENAI_API_BASE": inside,
        "OPENAI_API_KEY": endpoint.secret,
        "ANTHROPIC_BASE_URL": inside.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.secret,
    }
