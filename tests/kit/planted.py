"""A sound little environment, and the same with one fault each: what the contract suite must name.

A task asks for a word that is derived from the number in question.txt; the agent looks, and answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.engines.scripted import Script, call, in_turn
from harness.protocols import Sandbox, Tool, ToolResult
from harness.task import Score, Split, Task
from harness.tools import current_turn, tool

WORDS = ("amaranth", "bergamot", "cardamom", "dandelion", "elderflower", "fenugreek", "galangal", "horseradish")


class Options(BaseModel):
    """Options of the sound one."""

    model_config = ConfigDict(extra="forbid")
    seed: int = 0


class Live:
    """One task; state in the sandbox, and the turn of the first look."""

    def __init__(self, environment: Sound, task: Task, sandbox: Sandbox) -> None:
        self.environment, self.task, self.sandbox = environment, task, sandbox
        self.looked: int | None = None
        self.tools: Sequence[Tool] = (tool(self.look), tool(self.answer))

    async def look(self) -> str:
        """Read the question."""
        if self.looked is None:
            self.looked = current_turn()
        return (await self.sandbox.read("question.txt")).decode()

    async def answer(self, word: str) -> ToolResult:
        """Hand in a word.

        Args:
            word: the answer
        """
        await self.sandbox.write("answer.txt", word.encode(errors="replace"))
        return ToolResult("thank you", done=True)

    async def judge(self) -> float:
        """1 for the right word."""
        try:
            given = (await self.sandbox.read("answer.txt")).decode()
        except FileNotFoundError:
            return 0.0
        return float(given == self.task.data["answer"])

    async def score(self) -> Score:
        """See `LiveTask`."""
        reward = await self.judge()
        return Score(reward, {self.looked: 0.0} if self.looked is not None else {})


class Sound:
    """Breaks nothing."""

    Config: type[BaseModel] = Options
    live: type[Live] = Live

    def __init__(self, config: Any) -> None:
        self.config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        """Eight, as many in each split."""
        return [self.task(split, index) for index in range(8)]

    def task(self, split: Split, index: int) -> Task:
        """A function of split, seed and index."""
        word = WORDS[index] + ("ish" if split == "heldout" else "")
        data = {"number": index, "answer": word}
        return Task(f"{split}/{self.config.seed}/{index}", ({"role": "user", "content": f"Look at {split} {index}."},), data)

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        """Write the question."""
        await sandbox.write("question.txt", f"Which word has number {task.data['number']}?".encode())
        return self.live(self, task, sandbox)

    def solver(self, task: Task) -> Script:
        """Look and answer."""
        return in_turn(call("look"), call("answer", word=task.data["answer"]))


# --- options and tasks -----------------------------------------------------------------------------------------------


class LooseOptions(BaseModel):
    """Takes anything."""

    seed: int = 0


class IgnoresUnknownOptions(Sound):
    """Fault of `config`."""

    Config = LooseOptions


class HasASetInItsData(Sound):
    """Fault of `plain_tasks`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["tags"] = {"one"}
        return task


class FollowsTheHash(Sound):
    """Fault of `repeatable_tasks`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["number"] = hash(f"{split}/{index}") % 100_000
        return task


class DrawsGlobally(Sound):
    """Fault of `repeatable_tasks`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["number"] = random.randrange(10**9)
        return task


class NamesTwoTasksAlike(Sound):
    """Fault of `unique_ids`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        return Task("the task", task.messages, task.data) if index in (2, 5) else task


class TrainsOnHeldOut(Sound):
    """Fault of `disjoint_splits`."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task("train", index)
        return Task(f"{split}/{index}", task.messages, task.data)


# --- episodes --------------------------------------------------------------------------------------------------------


class OffersOtherTools(Sound):
    """Fault of `begin`."""

    class live(Live):  # noqa: N801
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            look = self.tools[0]
            self.tools = (Tool(look.name, f"Look {random.random()}", look.parameters, look.call), self.tools[1])


class RaisesInATool(Sound):
    """Fault of `episodes`."""

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            return str(self.task.data["no such key"])


class RewardsATurnThatWasNot(Sound):
    """Fault of `turn_rewards`."""

    class live(Live):  # noqa: N801
        async def score(self) -> Score:
            return Score(await self.judge(), {99: 0.5})


class NeverJudges(Sound):
    """Fault of `limits`; to be given a short one."""

    class live(Live):  # noqa: N801
        async def score(self) -> Score:
            await asyncio.Event().wait()
            return await super().score()


class CannotBeCancelled(Sound):
    """Fault of `limits`."""

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            while True:
                try:
                    return await super().look()
                except asyncio.CancelledError:
                    continue


class TakesATimeoutForAZero(Sound):
    """Fault of `limits`."""

    class live(Live):  # noqa: N801
        async def score(self) -> Score:
            try:
                return await super().score()
            except asyncio.CancelledError:
                return Score(0.0)


class BlocksTheLoop(Sound):
    """Fault of `blocking`."""

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            time.sleep(1.7)
            return await super().look()


class CannotBeSolved(Sound):
    """Fault of `solver`."""

    class live(Live):  # noqa: N801
        async def judge(self) -> float:
            return 0.5 * await super().judge()


class CannotSolve(Sound):
    """Fault of `solver`: raises when it is asked for a script."""

    def solver(self, task: Task) -> Script:
        return in_turn(str(task.data["no such key"]))


class SolvesOneTask(Sound):
    """Fault of `solver`: the script raises at a later task."""

    def solver(self, task: Task) -> Script:
        script = super().solver(task)
        return lambda conversation, rng: script(conversation, rng) if task.data["number"] == 0 else str(1 // 0)


class SolvesWithNothing(Sound):
    """Fault of `solver`: the script gives no text."""

    def solver(self, task: Task) -> Script:
        return lambda conversation, rng: None  # type: ignore[return-value]


class PaysForNothing(Sound):
    """Fault of `idle`."""

    class live(Live):  # noqa: N801
        async def judge(self) -> float:
            return max(0.1, await super().judge())


class JudgesByLot(Sound):
    """Fault of `verdict`."""

    class live(Live):  # noqa: N801
        async def judge(self) -> float:
            return await super().judge() or -random.random()


class JudgesInfinitely(Sound):
    """Fault of `verdict`."""

    class live(Live):  # noqa: N801
        async def judge(self) -> float:
            return float("inf") * await super().judge()


class TrustsArguments(Sound):
    """Fault of `arguments`."""

    class live(Live):  # noqa: N801
        async def answer(self, word: str) -> ToolResult:
            """Hand in a word."""
            await self.sandbox.write("initial.txt", word[0].encode())
            return await super().answer(word)


class LeavesAProcess(Sound):
    """Fault of `clean_up`."""

    started: list[subprocess.Popen[bytes]] = []  # noqa: RUF012

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        self.started.append(await asyncio.to_thread(subprocess.Popen, ["sleep", "120"]))
        return await super().begin(task, sandbox)


class LeavesADaemon(Sound):
    """Fault of `clean_up`: a process that has no parent, session or variable of ours."""

    started: list[int] = []  # noqa: RUF012

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        command = ["sh", "-c", "setsid sleep 120 >&- 2>&- & echo $!"]
        done = await asyncio.to_thread(subprocess.run, command, env={"PATH": os.defpath}, stdout=subprocess.PIPE, check=True)
        self.started.append(int(done.stdout))
        return await super().begin(task, sandbox)


class WritesHere(Sound):
    """Fault of `clean_up`: the same file every time."""

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await asyncio.to_thread(Path("state.json").write_text, "{}")
        return await super().begin(task, sandbox)


class WritesAtHome(Sound):
    """Fault of `clean_up`."""

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await asyncio.to_thread(Path("~/.planted").expanduser().write_text, "{}")
        return await super().begin(task, sandbox)


class LeavesAFile(Sound):
    """Fault of `clean_up`."""

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        tempfile.mkdtemp()
        return await super().begin(task, sandbox)


class LeavesASandbox(Sound):
    """Fault of `clean_up`."""

    class live(Live):  # noqa: N801
        async def score(self) -> Score:
            await self.sandbox.fresh()
            return await super().score()


class LeavesATask(Sound):
    """Fault of `clean_up`."""

    class live(Live):  # noqa: N801
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.watching = asyncio.create_task(self.watch())

        async def watch(self) -> None:
            await asyncio.Event().wait()


class KeepsStateInTheEnvironment(Sound):
    """Fault of `concurrency`."""

    class live(Live):  # noqa: N801
        async def answer(self, word: str) -> ToolResult:
            """Hand in a word."""
            self.environment.config.__dict__["last"] = word
            return await super().answer(word)

        async def judge(self) -> float:
            await super().judge()
            last = self.environment.config.__dict__.pop("last", None)
            return float(last == self.task.data["answer"])


class AnswersWithTheLatest(Sound):
    """Fault of `concurrency`: only a reply tells."""

    latest = ""

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            self.environment.latest = await super().look()
            await asyncio.sleep(0)
            return self.environment.latest


class ShowsAllThatWasAsked(Sound):
    """Fault of `concurrency`: a list that grows with every episode."""

    asked: list[str] = []  # noqa: RUF012

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            self.environment.asked.append(await super().look())
            return "\n".join(self.environment.asked)


class TellsTheTime(Sound):
    """No fault: its replies vary by themselves."""

    class live(Live):  # noqa: N801
        async def look(self) -> str:
            """Read the question."""
            return f"{await super().look()} {time.time_ns()}"


class WritesTheAnswer(Sound):
    """Fault of `secrets`."""

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await sandbox.write("tests/expected.txt", task.data["answer"].encode())
        return await super().begin(task, sandbox)


class WritesAShortAnswer(Sound):
    """Fault of `secrets`: a number, below other keys."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["truth"] = {"right_answer": 30 + index}
        return task

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await sandbox.write("answer.json", f'{{"n": {task.data["truth"]["right_answer"]}}}'.encode())
        return await super().begin(task, sandbox)


class WritesALabel(Sound):
    """Fault of `secrets`: two labels, in a file of one line."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["labels"] = ["yes", f"{index}"]
        return task

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await sandbox.write("key.txt", f"labels: {task.data['labels']}".encode())
        return await super().begin(task, sandbox)


class AsksForTheLargest(Sound):
    """No fault: a short answer stands among the numbers that the task is about."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        task.data["largest"] = {"answer": 90 + index}
        return task

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        await sandbox.write("numbers.txt", f"12\n{task.data['largest']['answer']}\n55\n".encode())
        return await super().begin(task, sandbox)


class TakesALossForAZero(Sound):
    """Fault of `lost_sandbox`."""

    class live(Live):  # noqa: N801
        async def score(self) -> Score:
            try:
                return await super().score()
            except Exception:  # noqa: BLE001
                return Score(0.0)
