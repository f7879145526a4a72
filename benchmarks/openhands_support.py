"""What an OpenHands episode costs through our worker, and through the stock LLM class (litellm, HTTP) in front of our gateway.

Both sides play the same scripted conversation in turns, in one run: the product's own worker, tools and sandboxes, a session
with its journal, OpenHands' events on disk. Only the way from the agent to the session differs. Counted is the CPU time of the
worker and of this process, from the start of a sandbox to its end, less what the scripted engine takes (it answers from a
list, and its calls wait for nothing, so its thread's clock measures it); not what runs in the sandbox, nor the engine of the
containers, nor the worker's import, which is told apart.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import agents
from agents.openhands import _BOOT, _ENV, OpenHands, OpenHandsConfig, interpreter
from agents.workers import Crew, Worker
from environments.toy_repair.expert import call
from environments.toy_repair.tokenizer import SPECIAL, TEMPLATE
from harness.chat import Chat
from harness.errors import ConfigError
from harness.gateway import Endpoint, Gateway
from harness.parsers import hermes
from harness.protocols import GenerateRequest, Generation
from harness.sandboxes.docker import DockerSandboxes
from harness.sandboxes.docker_config import DockerConfig
from harness.sandboxes.process import ProcessConfig, ProcessSandboxes
from harness.session import TokenSession
from harness.task import Limits, Task, Termination

ROOT = Path(__file__).parents[1]
IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-test:bookworm")
LIMITS = Limits(max_turns=400, max_context=1_000_000)
TASK = Task("bench", ({"role": "user", "content": "The table in table.py has wrong rows. Find and repair them."},))
WARM_UP = 5
TOLD = {"forks", "agent_errors", "nudges", "openhands_failed", "openhands_stuck"}
"""Facts of an episode that was not what the script says."""
QUOTED = (
    "quoted, not measured here: agent-server in each container (openhands-agent-server 1.58.2), 11 CPU-s of start-up and "
    "290-326 MB per container"
)


class Answers:
    """An engine that says one text after another; `spent` is its CPU time, `asked` when it was asked."""

    def __init__(self, chat: Chat, said: list[str]) -> None:
        start = time.thread_time()
        self._ids = [[*chat.encode(text), chat.stop_ids[0]] for text in reversed(said)]
        self.spent = time.thread_time() - start
        self.asked: list[float] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        """The next text."""
        start = time.thread_time()
        self.asked.append(time.perf_counter())
        ids = self._ids.pop()
        generation = Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop")
        self.spent += time.thread_time() - start
        return generation


@dataclass
class Cost:
    """Of some episodes: CPU seconds of each, milliseconds of each turn, bytes by which the worker grew over all of them."""

    worker_s: list[float] = field(default_factory=list)
    harness_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    turn_ms: list[float] = field(default_factory=list)
    grown: int = 0

    @property
    def cpu_s(self) -> float:
        """Mean of an episode."""
        return statistics.mean(self.worker_s) + statistics.mean(self.harness_s)

    def text(self) -> str:
        """For people."""
        parts = f"worker {statistics.mean(self.worker_s):.3f}, harness {statistics.mean(self.harness_s):.3f}"
        return f"{self.cpu_s:.3f} CPU-s ({parts}), {statistics.median(self.turn_ms):.1f} ms per turn"


class Side:
    """One way to play: its agent, its worker, what its episodes have cost."""

    def __init__(self, crew: Crew, gateway: Gateway | None = None) -> None:
        self.agent = OpenHands(OpenHandsConfig())
        self.agent._crew = self.crew = crew
        self.gateway = gateway
        self.pid, self.import_s, self.fresh = 0, 0.0, 0
        self.cost = Cost()

    async def start(self) -> None:
        """Start the worker and note what its import took."""
        self.pid = (await self.crew.worker()).pid
        self.import_s, self.fresh = cpu_seconds(self.pid), resident(self.pid)

    async def play(self, chat: Chat, sandboxes: Any, folder: Path, turns: int) -> list[int]:
        """One episode, added to the cost; its tokens."""
        before, harness, worker = resident(self.pid), time.process_time(), cpu_seconds(self.pid)
        sandbox = await sandboxes.acquire(TASK)
        where = (await sandbox.exec("pwd", timeout_s=60)).output.strip()
        engine = Answers(chat, script(where, turns))
        session = TokenSession(chat, engine, hermes, LIMITS, folder.name, folder=folder)  # type: ignore[arg-type]
        end = await self._run(sandbox, session)
        await sandbox.close()
        self.cost.worker_s.append(cpu_seconds(self.pid) - worker)
        self.cost.harness_s.append(time.process_time() - harness - engine.spent)
        self.cost.engine_s.append(engine.spent)
        self.cost.grown += resident(self.pid) - before
        self.cost.turn_ms += [(b - a) * 1e3 for a, b in zip(engine.asked, engine.asked[1:], strict=False)]
        (trajectory,) = session.trajectories(TASK.id, {})
        facts = trajectory.info["facts"]
        assert (end, session.turns, trajectory.n_turns) == (Termination.FINISHED, turns, turns), (end, session.turns)
        assert TOLD.isdisjoint(facts), facts
        return list(trajectory.tokens.tolist())

    async def _run(self, sandbox: Any, session: TokenSession) -> Termination:
        if self.gateway is None:
            return await self.agent.run(TASK, None, sandbox, session, LIMITS)  # type: ignore[arg-type]
        async with self.gateway.open(session) as endpoint:
            assert isinstance(self.crew, HttpCrew)
            self.crew.endpoint = endpoint
            end = await self.agent.run(TASK, None, sandbox, session, LIMITS)  # type: ignore[arg-type]
            assert endpoint.calls == session.turns, "every model call came over HTTP, once"
            return end


class HttpCrew(Crew):
    """Workers with the stock LLM class; an episode is told the endpoint that is set."""

    endpoint: Endpoint | None = None

    async def worker(self) -> Any:
        """One that adds the endpoint to what it is told."""
        worker = await super().worker()
        return worker if self.endpoint is None else _Telling(worker, self.endpoint)


class _Telling:
    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        self._worker, self._endpoint = worker, endpoint

    async def play(self, episode: str, start: dict[str, Any], answer: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
        address = {"base_url": self._endpoint.url, "api_key": self._endpoint.secret}
        return await self._worker.play(episode, {**start, **address}, answer)


async def measure(name: str, turns: int, episodes: int) -> dict[str, Any]:
    """The line of a benchmark: a warm-up episode on each side, then `episodes` of `turns` on each, in turns."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chat = tokens_of(folder / "model")
        kind, sandboxes = await stack.enter_async_context(_sandboxes())
        gateway = Gateway()
        await gateway.start()
        stack.push_async_callback(gateway.close)
        python = interpreter(None)
        ours = Side(Crew([python, "-c", _BOOT, str(Path(agents.__file__).parent)], _ENV, 1))
        env = {**_ENV, "PYTHONPATH": str(ROOT)}
        stock = Side(HttpCrew([python, "-m", "benchmarks._openhands_stock"], env, 1), gateway)
        for side in (ours, stock):
            stack.push_async_callback(side.agent.close)
            await side.start()
            await side.play(chat, sandboxes, folder / f"{side.pid}-warm", WARM_UP)
            side.cost = Cost()
        for i in range(episodes):
            a, b = [await side.play(chat, sandboxes, folder / f"{side.pid}-{i}", turns) for side in (ours, stock)]
            # Folders of processes have numbers, which may differ in length.
            same = a == b if kind == "docker" else abs(len(a) - len(b)) < 0.01 * len(a)
            assert same, f"not the same conversation: {len(a)} and {len(b)} tokens"
        return _line(name, turns, kind, len(a), ours, stock)


def _line(name: str, turns: int, kind: str, tokens: int, ours: Side, stock: Side) -> dict[str, Any]:
    cost, other, mb = ours.cost, stock.cost, 2**20
    line = {"bench": name, "value": round(cost.cpu_s, 3), "unit": f"CPU-s per {turns}-turn episode, worker and harness"}
    line |= {"ratio": round(other.cpu_s / cost.cpu_s, 2), "sandbox": kind, "episodes": len(cost.worker_s), "tokens": tokens}
    line |= {"worker_s": round(statistics.mean(cost.worker_s), 3), "harness_s": round(statistics.mean(cost.harness_s), 3)}
    line |= {
        "engine_s_left_out": round(statistics.mean(cost.engine_s), 4),
        "turn_p50_ms": round(statistics.median(cost.turn_ms), 1),
    }
    line |= {"worker_import_s": round(ours.import_s, 1), "worker_fresh_mb": ours.fresh // mb}
    line |= {"worker_mb": resident(ours.pid) // mb, "grown_mb_per_episode": round(cost.grown / len(cost.worker_s) / mb, 2)}
    line |= {"harness_mb_both_sides": resident(os.getpid()) // mb}
    against = (
        f"stock openhands.sdk.LLM, litellm and HTTP to our gateway: {other.text()}, import {stock.import_s:.1f} CPU-s, "
        f"worker {stock.fresh // mb} MB fresh, {resident(stock.pid) // mb} MB at the end, "
        f"grown {other.grown / len(other.worker_s) / mb:.2f} MB per episode; {QUOTED}"
    )
    return line | {"against": against, "load": round(os.getloadavg()[0], 1)}


def script(folder: str, turns: int) -> list[str]:
    """What the model says: make a file, then view, edit and print parts of it (0.5 to 1.7 kB of output each), finish."""
    path = f"{folder}/table.py"
    make = 'for i in $(seq 400); do echo "value_$i = $((i * i))  # row $i of the table"; done > table.py; tail -n 30 table.py'
    said = ["I start with the table. " + call("terminal", command=make, security_risk="LOW")]
    rng = random.Random(0)
    for turn in range(turns - 2):
        row = rng.randrange(1, 360)
        if turn % 3 == 0:
            view = call("file_editor", command="view", path=path, view_range=[row, row + 35], security_risk="LOW")
            said.append(f"Let me look at the rows from {row} on. {view}")
        elif turn % 3 == 1:
            old, new = f"# row {row} of the table", f"# row {row} of the table, checked in turn {turn}"
            edit = {"command": "str_replace", "path": path, "old_str": old, "new_str": new, "security_risk": "LOW"}
            said.append(f"Row {row} is not marked. {call('file_editor', **edit)}")
        else:
            look = f"python3 table.py && sed -n '{row},{row + 35}p' table.py"
            said.append(f"Does it still run? {call('terminal', command=look, security_risk='LOW')}")
    return [*said, call("finish", message="All rows are right now.")]


def tokens_of(folder: Path) -> Chat:
    """A byte-pair tokenizer of 4,096 tokens, trained on this project's sources, with the toy template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([path.read_text() for path in sorted((ROOT / "harness").rglob("*.py"))], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Chat(folder, ["<|im_end|>"])


@asynccontextmanager
async def _sandboxes() -> AsyncIterator[tuple[str, Any]]:
    """(kind, provider): containers if an engine answers, else processes."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    kind, provider = "docker", DockerSandboxes(DockerConfig(image=IMAGE), run_id)
    try:
        await provider.start()
    except ConfigError:
        kind, provider = "process", ProcessSandboxes(ProcessConfig(), run_id)  # type: ignore[assignment]
        await provider.start()
    try:
        yield kind, provider
    finally:
        await provider.close()


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far, in steps of a kernel tick (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
