"""Episodes that stop at a point each, in a harness that is then killed: the first half of `test_resume.py`.

Run as `python -m tests.agents.resumable FOLDER IMAGE RUN`; FOLDER has the model and gets the sessions. A line of JSON says when
an episode has come to where it stops, or is about to run the command that does not end: `[episode, pids of the workers]`.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agents.openhands import OpenHands, OpenHandsConfig
from environments.swe.environment import Swe, SweConfig
from environments.swe.patch import Extracted
from environments.swe.rows import SweRow
from harness.chat import Chat
from harness.episode import Episode, Stage, run_episode
from harness.parsers import hermes
from harness.protocols import GenerateRequest, Generation, Message, Reply
from harness.session import TokenSession
from harness.task import Limits, Score, Task
from tests.agents.expert import EXPLORE, TESTS, editor, line_of, look
from tests.agents.support import FINISH, run
from tests.contracts.sandbox_support import started
from tests.swe.instance import BASE, FIXED, row

LIMITS = Limits(max_turns=20, max_context=1_000_000, max_tokens_per_turn=4096, wall_s=400.0)
COUNT = "echo once >> /tmp/ran"
BLOCKS = f"cd shop; {COUNT}; mkfifo /tmp/began; echo began > /tmp/began; sleep 1001; {COUNT}"
LOOK = "echo \"ran $(wc -l < /tmp/ran), living $(pgrep -cfx 'sleep 1001')\""
COMMANDS = {"command": run(BLOCKS), "two": run(BLOCKS) + run(COUNT), "half": run(BLOCKS) + run(COUNT)}
OLD, NEW = 3, 4
"""Policy versions before and after the kill."""
Stop = Callable[[str, str, int], Awaitable[None]]
"""Told (episode, point, turn)."""
POINTS = {"asked": 2, "recorded": 2, "unasked": 2, "command": 1, "two": 1, "half": 1, "judged": 5}
"""Episode -> the turn at which it stops: asked and not answered; answered on disk, but not to OpenHands; not asked yet; its
command runs; the first of its two commands runs; the same, and OpenHands has lost the second; it is being judged."""


def turns(text: str) -> str:
    """What the policy says next. Where it was interrupted it goes on as if nothing had happened."""
    seen = look(text)
    point = re.search(r"^Manner: (\w+)\.$", text, re.MULTILINE)
    assert point is not None
    return (
        EXPLORE,
        COMMANDS.get(point[1], run(COUNT)),
        editor("str_replace", seen, old_str=line_of(BASE["shop/prices.py"]), new_str=line_of(FIXED)),
        run(LOOK),
        run(f"cd {seen.folder} && {TESTS}"),
        FINISH if re.search(r"\d passed", seen.last) else "The tests do not pass.",
    )[seen.turn]


class Engine:
    """Plays `turns` with the log-prob and the version given, and keeps the numbers of the turns it was asked for."""

    def __init__(self, chat: Chat, version: int, stop: Stop) -> None:
        self.chat, self.version, self.stop = chat, version, stop
        self.asked: dict[str, list[int]] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        """One turn; or none."""
        episode, _, number = request.request_id.rpartition("/")
        self.asked.setdefault(episode, []).append(int(number))
        await self.stop(episode, "asked", int(number))
        ids = [*self.chat.encode(turns(self.chat.decode(request.token_ids))), self.chat.stop_ids[0]]
        return Generation(ids, [-0.5 - self.version] * len(ids), [self.version] * len(ids), "stop")


class Session(TokenSession):
    """Stops before and after a call."""

    stop: Stop

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """As a session does."""
        number = self.turns
        await self.stop(self.episode_id, "unasked", number)
        reply = await super().complete(messages, tools)
        await self.stop(self.episode_id, "recorded", number)
        return reply


class Judge(Swe):
    """Stops when its second container is there."""

    stop: Stop

    async def judge(self, row: SweRow, extracted: Extracted, acquire: Any) -> Score:
        """As the environment does."""

        async def acquired() -> Any:
            sandbox = await acquire()
            await self.stop(row.instance_id, "judged", POINTS["judged"])
            return sandbox

        return await super().judge(row, extracted, acquired)


def task_of(environment: Swe, episode: str, image: str) -> Task:
    """The tiny instance, as the task of that episode."""
    text = f"A discount is a percentage.\nManner: {episode}."
    return environment.task(row(image=image, instance_id=episode, problem_statement=text))


async def play(
    folder: Path, image: str, version: int, stop: Stop, agent: OpenHands, sandboxes: Any, *, resume: bool
) -> tuple[dict[str, Episode], Engine]:
    """All episodes at once."""
    chat = Chat(folder / "model", ["<|im_end|>"])
    engine = Engine(chat, version, stop)
    environment = Judge(SweConfig.model_validate({"dataset": "none", "grading": {"timeout_s": 300.0, "test_timeout_s": 60.0}}))
    environment.stop = stop

    def session(episode: str, seed: int | None) -> TokenSession:
        made = Session(chat, engine, hermes, LIMITS, episode, seed=seed, folder=folder / "episodes" / episode)  # type: ignore[arg-type]
        made.stop = stop
        return made

    stage = Stage(environment, agent, sandboxes, LIMITS, session)
    tasks = [task_of(environment, name, image) for name in POINTS]
    episodes = await asyncio.gather(*(run_episode(stage, task, task.id, resume=resume) for task in tasks))
    return {episode.id: episode for episode in episodes}, engine


async def main(folder: Path, image: str, run_id: str) -> None:
    """Play until killed."""
    agent = OpenHands(OpenHandsConfig(no_change_s=LIMITS.wall_s))

    async def stop(episode: str, point: str, number: int) -> None:
        if number == POINTS[episode] and point == ("recorded" if episode in COMMANDS else episode):
            assert agent._crew is not None
            sys.stdout.write(json.dumps([episode, [worker.pid for worker in agent._crew._workers]]) + "\n")
            sys.stdout.flush()
            if episode not in COMMANDS:
                await asyncio.wait_for(asyncio.Event().wait(), LIMITS.wall_s)

    async with started("docker", run_id, image=image) as sandboxes:
        await play(folder, image, OLD, stop, agent, sandboxes, resume=False)


if __name__ == "__main__":
    socket.gethostname = lambda: f"host-of-{sys.argv[3]}"
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
