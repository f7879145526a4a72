"""The unmodified OpenHands agent: its conversation loop in a worker process, its tools in the sandbox, its model the session.

Flows in: a task, a sandbox, a token session. Flows out: how the episode ended. The worker knows openhands-sdk and
openhands-tools, this side knows sandboxes and tokens; between them go chat messages, commands and files (`openhands_worker`).

    worker:   conversation loop ─▶ SessionLLM ─▶ complete ─┐        terminal, file editor ─▶ terminal, look, read, write
    here:                                  session ◀───────┘                                 sandbox ◀──┘
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shlex
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

import agents
from agents.terminal import Terminal
from agents.workers import Crew
from harness.errors import EnvironmentFault, SandboxError
from harness.protocols import ChatSession, LiveTask, Message, Sandbox
from harness.task import Limits, Task, Termination

log = logging.getLogger("sao")

LOOK_S = 60.0
ENDS = {"finished": Termination.FINISHED, "stuck": Termination.FINISHED, "max_turns": Termination.MAX_TURNS}

# Only the package `agents` is shown to the worker's interpreter: it may be of another environment than ours.
_BOOT = (
    "import sys, types, runpy; package = types.ModuleType('agents'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['agents'] = package; runpy.run_module('agents.openhands_worker', run_name='__main__', alter_sys=True)"
)
_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or litellm asks the network at import
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LOG_LEVEL": "ERROR",
    "ALLOW_SHORT_CONTEXT_WINDOWS": "true",  # the session, not the SDK, knows the limit
}


class OpenHandsConfig(BaseModel):
    """Options of the OpenHands agent. No condenser, no skills, native tool calls, no streaming: that is fixed."""

    model_config = ConfigDict(extra="forbid")
    workers: int = Field(1, ge=1)
    """Processes for conversation loops; one serves many episodes and takes about 300 MB. About one per core."""
    python: str | None = None
    """Interpreter that has openhands-sdk and openhands-tools; None: the environment that `make setup-agents` made, else
    the running one."""
    system_prompt: str | None = None
    """Replaces OpenHands' own (15,000 characters), for tiny models."""
    stuck_detection: bool = True
    """End an episode that repeats itself, as OpenHands does; it is judged as it stands."""
    no_change_s: float = Field(30.0, gt=0)
    """Seconds without output after which a command without a timeout is left running and the model is asked."""


class OpenHands:
    """See the module docstring."""

    Config = OpenHandsConfig

    def __init__(self, config: OpenHandsConfig) -> None:
        self.config = config
        self._crew: Crew | None = None

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """Play one episode; a session that was restored continues where it stood."""
        if self._crew is None:
            folder = str(Path(agents.__file__).parent)
            self._crew = Crew([interpreter(self.config.python), "-c", _BOOT, folder], _ENV, self.config.workers)
        worker = await self._crew.worker()
        where = await sandbox.exec("pwd", timeout_s=LOOK_S)
        if where.exit_code != 0:
            raise SandboxError(f"the sandbox does not say where it is: {where.output.strip()}")
        hands = Hands(sandbox, session, self.config.no_change_s)
        start = {
            "prompt": "\n\n".join(str(message["content"]) for message in task.messages),
            "folder": where.output.strip(),
            "state": None if session.folder is None else str(session.folder / "agent"),
            "max_turns": limits.max_turns,
            "max_context": limits.max_context,
            "max_tokens_per_turn": limits.max_tokens_per_turn,
            "system_prompt": self.config.system_prompt,
            "stuck_detection": self.config.stuck_detection,
        }
        try:
            ending = await worker.play(session.episode_id, start, hands.answer)
        finally:
            await hands.close()
        for fact, n in ending["counts"].items():
            session.count(fact, n)
        if ending["end"] == "error":
            if not hands.asked:
                raise EnvironmentFault(f"OpenHands failed before its first model call: {ending['detail']}")
            # Model and sandbox did not fail, so what the policy said made OpenHands fail: it is judged as it stands.
            log.warning("episode %s: OpenHands failed: %s", session.episode_id, ending["detail"])
            session.count("openhands_failed")
        elif ending["end"] == "stuck":
            session.count("openhands_stuck")
        return ENDS.get(ending["end"], Termination.FINISHED)

    async def close(self) -> None:
        """End the workers."""
        if self._crew is not None:
            await self._crew.close()


def interpreter(given: str | None) -> str:
    """The Python that has OpenHands."""
    own = Path(sys.prefix) / "agents" / "bin" / "python"
    return given or (str(own) if own.is_file() else sys.executable)


class Hands:
    """What a worker may ask for in one episode."""

    def __init__(self, sandbox: Sandbox, session: ChatSession, no_change_s: float) -> None:
        self._sandbox, self._session = sandbox, session
        self._terminal = Terminal(sandbox, no_change_s=no_change_s)
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self.asked = 0
        """Model calls."""

    async def answer(self, method: str, arguments: dict[str, Any]) -> Any:
        """One of `complete`, `terminal`, `look`, `read`, `write`."""
        return await getattr(self, f"on_{method}")(**arguments)

    async def close(self) -> None:
        """End the terminal."""
        await self._terminal.close()

    async def on_complete(self, keep: int, new: list[Message], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        self.asked += 1
        self._messages = [*self._messages[:keep], *new]
        self._tools = self._tools if tools is None else tools
        reply = await self._session.complete(self._messages, self._tools)
        return {
            "message": reply.message(),
            "finish_reason": "tool_calls" if reply.tool_calls else reply.finish_reason,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
        }

    async def on_terminal(self, **arguments: Any) -> dict[str, Any]:
        return dataclasses.asdict(await self._terminal.run(**arguments))

    async def on_look(self, path: str) -> dict[str, Any]:
        """What is at a path: a `file`, a `folder` with what is in it, two levels deep, or `missing`, and why."""
        nonce = secrets.token_hex(16)
        at, parent = shlex.quote(path), shlex.quote(os.path.dirname(path))
        result = await self._sandbox.exec(_LOOK.format(nonce=nonce, at=at, parent=parent), timeout_s=LOOK_S)
        match result.output.partition(f"{nonce}\0")[2].partition(f"\0{nonce}")[0].split("\0"):
            case ["file", rights, size] if size.strip().isdecimal():
                return {"kind": "file", "may_read": "r" in rights, "may_write": "w" in rights, "size": int(size)}
            case ["folder", rights, hidden, *entries] if hidden.isdecimal():
                with contextlib.suppress(OSError):  # it is a folder; a sandbox that has an outside says if it is there
                    try:
                        await self._sandbox.read(path)
                    except ValueError as error:
                        return {"error": str(error)}
                # A long answer has a gap, where the editor cuts the list anyway.
                listed = [(entry[:1] == "d", entry[1:]) for entry in entries if not _GAP.search(entry)]
                return {"kind": "folder", "may_read": "r" in rights, "hidden": int(hidden), "entries": listed}
            case ["missing", parent_rights, why]:
                return {
                    "kind": "missing",
                    "parent": "d" in parent_rights,
                    "may_write": "w" in parent_rights,
                    "why": why,
                }
            case ["other"]:
                return {"error": f"{path} is neither a file nor a folder"}
        return {"error": f"the sandbox does not answer: {result.output[-500:].strip()}"}

    async def on_read(self, path: str) -> dict[str, str]:
        try:
            return {"data": base64.b64encode(await self._sandbox.read(path)).decode()}
        except (OSError, ValueError) as error:
            return {"error": str(error)}

    async def on_write(self, path: str, data: str) -> dict[str, str]:
        try:
            await self._sandbox.write(path, base64.b64decode(data))
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return {}


_GAP = re.compile(r"\n\[\.\.\. \d+ bytes left out \.\.\.\]\n")

# What commands have set must not matter, nor what they have left running and writes meanwhile: an answer stands between two
# `nonce`s and is written by one call.
_LOOK = """( {{ set +exufC; unset GLOBIGNORE; shopt -s nullglob; shopt -u failglob dotglob; }} 2>/dev/null
LC_ALL=C; at={at}; parent={parent}; may=; size=0; why=; said=()
if [[ -d $at ]]; then
    [[ -r $at ]] && builtin cd -- "$at" && may=r && {{ shopt -s dotglob; all=(*); shopt -u dotglob; seen=(*); }}
    said=(folder "$may" $((${{#all[@]}} - ${{#seen[@]}})))
    for a in "${{seen[@]}}"; do
        if [[ -d $a ]]; then
            said+=("d$a")
            for b in "$a"/*; do [[ -d $b ]] && said+=("d$b") || said+=("f$b"); done
        else said+=("f$a"); fi
    done
elif [[ -f $at ]]; then
    [[ -w $at ]] && may=w
    [[ -r $at ]] && size=$(builtin command -p wc -c < "$at") && may+=r || size=0
    said=(file "$may" "$size")
elif [[ -e $at ]]; then said=(other)
else
    [[ -d $parent ]] && may=d; [[ -w $parent ]] && may+=w
    why=$({{ : < "$at"; }} 2>&1)
    said=(missing "$may" "${{why##*: }}")
fi
builtin printf '%s\\0' {nonce} "${{said[@]}}" {nonce} )"""
