"""The plug-in points: what an environment, an agent, a sandbox and an engine must offer. Read this after `trajectory.py`.

Every plug-in is a class with a nested pydantic `Config`, found by `harness.registry` under a name, an entry point or
`module:attr`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from harness.task import Limits, Score, Split, Task, Termination

FinishReason = Literal["stop", "length"]
Message = dict[str, Any]
"""One chat message in the OpenAI shape: role, content, optionally tool_calls or tool_call_id."""


# --- sandboxes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did: merged stdout and stderr (capped; head and tail kept, the gap marked) and its exit code."""

    output: str
    exit_code: int
    timed_out: bool = False
    killed_by: Literal["", "memory", "pids", "file_size", "disk"] = ""
    """The limit of the sandbox that the command ran into, where the sandbox can tell."""


class ByteStream(Protocol):
    """Standard input and output of a program in a sandbox."""

    async def read(self) -> bytes:
        """Some bytes, as soon as there are any; empty at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of it. Raises `ConnectionError` if nobody reads any more."""
        ...

    async def close(self) -> None:
        """End the program, as far as the sandbox can, and let go of the stream. Safe to call twice."""
        ...


class Sandbox(Protocol):
    """Where one episode's commands run. Relative paths start at its working folder. A lost one raises `SandboxError`."""

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run a shell command; state (cwd, variables) persists between calls. A timeout is a result, not an error."""
        ...

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises `FileNotFoundError`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def spawn(self, command: Sequence[str], *, tty: bool = False) -> ByteStream:
        """Start a program beside the shell, in the working folder; with `tty` as the leader of a pseudo-terminal's session.

        It ends with the sandbox at the latest. Raises `SandboxError` where a sandbox runs no programs.
        """
        ...

    async def fresh(self) -> Sandbox:
        """Another sandbox of the same task that nothing has touched: where to judge what this one produced.

        It is the caller's to close.
        """
        ...

    async def close(self) -> None:
        """Kill everything in it and remove every trace. Safe to call twice."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes; one per run. Everything it makes carries the run's label, so that `reap` finds it after a crash.

    A coroutine `adopt(task, name) -> Sandbox`, where there is one, takes over a living sandbox that an earlier process of the
    run has left; the attribute `name` of such sandboxes is what to ask for.
    """

    Config: type[BaseModel]

    async def start(self) -> None:
        """Check that sandboxes can be made here. Raises `ConfigError` with the next step if not."""
        ...

    async def acquire(self, task: Task) -> Sandbox:
        """A fresh, empty sandbox for one episode."""
        ...

    async def close(self) -> None:
        """Close every sandbox of this run."""
        ...

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        """Remove what a dead run (None: any dead run) left behind; the number of things removed."""
        ...


# --- environments and agents -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered; `done` ends the episode."""

    content: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A native tool: name, description and JSON schema as shown to the model, and the coroutine that does it."""

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[ToolResult]]

    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


ANSWER = "answer.txt"
"""The file of the sandbox into which an agent writes its reply to a task that offers no tools."""


class LiveTask(Protocol):
    """A task set up in a sandbox: its tools, and the verdict at the end.

    A coroutine `on_reply(text) -> ToolResult`, where there is one, takes a reply that calls no tool: unless it is done, its
    content is the next message to the model. Such an answer comes from the agent alone: nothing in the sandbox can change it.

    An attribute `score_s: float`, where there is one, is how long `score` may take, in seconds; else the episode's own limit.
    A coroutine `close`, where there is one, is called once at the end, whatever ended the episode, while the sandbox still
    lives: to let go of what the task holds outside the sandbox (a server, a database, a second sandbox).
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools for agents that have none of their own. Without any, and without `on_reply`, one reply ends the task."""
        ...

    async def score(self) -> Score:
        """Judge the sandbox's final state; asked once, whatever ended the episode (if the policy could cause it)."""
        ...


class Environment(Protocol):
    """Where tasks come from and how they are judged.

    A coroutine `rejoin(task, sandbox, state) -> LiveTask`, where there is one, takes up a task that an earlier process has
    begun in this sandbox; `state` is the JSON value that its live task's `state()` gave after `begin`.

    A coroutine `official(tasks, artifacts, folder) -> dict`, where there is one, asks the official judge of such tasks about
    what `score` has kept (`artifacts`: folders by task id); `sao eval` puts its verdicts beside ours.

    A method `solver(task) -> harness.engines.scripted.Script`, where there is one, solves a task: `sao check` plays it.
    """

    Config: type[BaseModel]

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split; may be a lazy sequence. The splits share no task.

        A sequence with an attribute `shares` (`harness.order.Share`) mixes several sources, which are drawn by weight.

        A sequence whose attribute `ordered` is true is a stream: RL and value pre-training draw it in its order, from its
        beginning, instead of shuffled. What a task asks for may then depend on when it comes.
        """
        ...

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """Put the task's files into a fresh sandbox."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is the raw JSON text, valid or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn, parsed from the sampled tokens."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    reasoning: str = ""
    """What was thought before the answer; no part of `content`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def message(self) -> Message:
        """The assistant message to append to the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class ChatSession(Protocol):
    """The model as an agent sees it; behind it every token is recorded."""

    @property
    def episode_id(self) -> str:
        """Unique within the run."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where an agent may keep its state until the episode ends, to be resumed from; None: nowhere."""
        ...

    def count(self, fact: str, n: int = 1) -> None:
        """Add to a counter that is stored with the episode's trajectories."""
        ...

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """One model call on the whole conversation so far. Raises `EpisodeEnd` at a limit, `EngineError` when lost."""
        ...


class Agent(Protocol):
    """Who acts: turns a task into model calls and commands until it is done or out of turns.

    A coroutine `close`, where there is one, is called at the end of the run.
    """

    Config: type[BaseModel]

    async def run(self, task: Task, live: LiveTask, sandbox: Sandbox, session: ChatSession, limits: Limits) -> Termination:
        """Play one episode and say why it ended. `EpisodeEnd` and `InfrastructureError` pass through."""
        ...


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingContract:
    """How tokens are sampled; the engine must honour it exactly (training: temperature 1, nothing cut, no penalty).

    The session alone sets it: whatever an agent's library asks for is ignored.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Token ids in."""

    token_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingContract = field(default_factory=SamplingContract)
    seed: int | None = None
    request_id: str = ""
    routed: int = 0
    """Tokens at the start whose routing is known already: `Generation.experts` begins behind them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Token ids out, each with the log-prob it was sampled with and the weight version that made its logits."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    sampling: SamplingContract | None = None
    """What the engine says it has used; None where it cannot say."""
    experts: npt.NDArray[np.integer[Any]] | None = None
    """[tokens, layers, experts per token]: where a mixture of experts sent the tokens from `GenerateRequest.routed` to the last
    but one (the last was never computed on); None where the engine does not tell."""


class InferenceEngine(Protocol):
    """Serves the policy (`docs/engine.md`). Weights change only between `pause` and `resume`, at a token boundary."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a continuation. Raises `EngineError`."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p(token | before) of tokens 1.. under the current weights, [L-1]; the probe after each publish."""
        ...

    async def update_weights(self, path: Path, version: int, sha256: str | None = None) -> None:
        """Pause, load `path` (checked against its sha256), label it `version`, resume; requests in flight go on.

        Raises `EngineError` and stays paused.
        """
        ...

    async def metrics(self) -> dict[str, float]:
        """How busy it is: `generated_tokens` since the start, and what else it can say. Raises `EngineError`."""
        ...

    async def close(self) -> None:
        """Stop serving and end the engine's process."""
        ...
