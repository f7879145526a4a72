"""The real OpenHands on real sandboxes: what it does, every way in which an episode ends, and what a failure costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.openhands import OpenHands, OpenHandsConfig
from harness.chat import Chat
from harness.errors import EngineError, EnvironmentFault, EpisodeEnd, SandboxError
from harness.protocols import GenerateRequest, Generation, Sandbox
from harness.task import Termination
from tests.agents.support import FINISH, TASK, Stand, call, exact, run, stand
from tests.contracts.sandbox_support import an_engine, needs_docker
from tests.support import PlayedEngine, Raw

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def openhands(chat: Chat) -> Iterator[Stand]:
    """One worker for all of this module."""
    with stand(chat) as made:
        yield made


def observations(stand: Stand, played: Any) -> list[str]:
    """The text behind each turn."""
    t = played.trajectory
    return [stand.chat.decode(t.tokens[s.start : s.stop].tolist()) for s in t.spans if s.kind == "observation"][1:]


def test_five_turns(openhands: Stand) -> None:
    seen: dict[str, bytes] = {}

    async def turns(sandbox: Sandbox) -> list[str]:
        folder = (await sandbox.exec("pwd", timeout_s=30)).output.strip()
        await sandbox.write("calc.py", b"def add(a, b):\r\n    return a - b\r\n")
        edit = {"path": f"{folder}/calc.py", "old_str": "a - b", "new_str": "a + b"}
        return [
            "Let me look. " + run("cat calc.py"),
            call("file_editor", command="view", path=f"{folder}/calc.py", security_risk="LOW"),
            call("file_editor", command="str_replace", security_risk="LOW", **edit),
            run("python3 -c 'import calc; print(calc.add(2, 3))'"),
            FINISH,
        ]

    async def look(sandbox: Sandbox) -> None:
        seen["calc.py"] = await sandbox.read("calc.py")

    played = openhands.play(turns, look)
    assert played.end is Termination.FINISHED
    assert seen["calc.py"] == b"def add(a, b):\r\n    return a + b\r\n", "its line endings are kept"
    shown = observations(openhands, played)
    assert "return a - b" in shown[0]
    assert "[Command finished with exit code 0]" in shown[0]
    assert "     2\t    return a - b" in shown[1]
    assert "has been edited" in shown[2]
    assert shown[3].count("5") >= 1
    exact(played.session.trajectories("t", {}), played.engine)
    assert played.trajectory.n_turns == 5


def test_the_prompt_is_openhands_own_and_the_same_for_everybody(openhands: Stand) -> None:
    both = [openhands.play([FINISH]) for _ in range(2)]
    prompts = [openhands.chat.decode(p.engine.requests[0].token_ids) for p in both]
    assert "You are OpenHands agent" in prompts[0]
    assert "Fix the bug." in prompts[0]
    assert prompts[0] == prompts[1]
    assert "tools: terminal file_editor task_tracker finish think" in prompts[0]


def test_text_without_a_call_ends_it(openhands: Stand) -> None:
    played = openhands.play(["I am done."])
    assert (played.end, played.session.turns) == (Termination.FINISHED, 1)


def test_an_empty_answer_is_nudged(openhands: Stand) -> None:
    played = openhands.play(["", "<think>hm</think>", FINISH])
    assert played.end is Termination.FINISHED
    exact(played.session.trajectories("t", {}), played.engine)
    assert played.trajectory.n_turns == 3, "one segment: the nudges extend it"
    assert played.facts()["nudges"] == 2


def test_malformed_calls_are_answered_by_the_agent(openhands: Stand) -> None:
    bad = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls}\n</tool_call>'
    played = openhands.play([bad, call("nonsense", a=1), call("terminal", timeout="soon"), FINISH])
    assert played.end is Termination.FINISHED
    shown = observations(openhands, played)
    assert "Error validating tool 'terminal'" in shown[0]
    assert "unparseable JSON" in shown[0]
    assert "Tool 'nonsense' not found" in shown[1]
    assert "Error validating tool" in shown[2]
    assert played.facts()["agent_errors"] == 3
    exact(played.session.trajectories("t", {}), played.engine)


def test_several_calls_in_a_turn_and_aliases(openhands: Stand) -> None:
    two = run("echo one > a; cat a") + "\n" + call("bash", command="cat a; echo two") + call("think", thought="hm")
    played = openhands.play([two, FINISH])
    (shown,) = observations(openhands, played)
    assert shown.index("one") < shown.index("two")
    assert "Your thought has been logged" in shown
    exact(played.session.trajectories("t", {}), played.engine)


def test_two_commands_in_one_call_are_refused_as_by_the_stock_tool(openhands: Stand) -> None:
    played = openhands.play([run("echo one\necho two"), run("for i in 1 2; do\n  echo in-$i\ndone"), FINISH])
    shown = observations(openhands, played)
    assert "Cannot execute multiple commands at once." in shown[0]
    assert "(2) echo two" in shown[0]
    assert "in-1\nin-2" in shown[1]


def test_turns_run_out(openhands: Stand) -> None:
    played = openhands.play([run(f"echo {i}") for i in range(9)], max_turns=4)
    assert (played.end, played.session.turns) == (Termination.MAX_TURNS, 4)


def test_one_that_repeats_itself_is_stuck(openhands: Stand) -> None:
    played = openhands.play([run("echo same")] * 30)
    assert played.end is Termination.FINISHED
    assert played.session.turns < 30
    assert played.facts()["openhands_stuck"] == 1


def ended(played: Any) -> Termination:
    assert isinstance(played.end, EpisodeEnd), played.end
    return played.end.termination


def test_the_context_runs_out(openhands: Stand) -> None:
    played = openhands.play([run("seq 1 2000")] * 9, max_context=30_000)
    assert ended(played) is Termination.MAX_CONTEXT
    assert 1 <= played.session.turns < 9
    assert len(played.trajectory) <= 30_000


def test_an_answer_that_is_cut_ends_it(openhands: Stand) -> None:
    played = openhands.play([run("echo 1"), Raw(openhands.chat.encode(run("echo 2"))[:20], "length"), FINISH])
    assert ended(played) is Termination.MAX_TOKENS_PER_TURN
    assert played.trajectory.n_turns == 2, "the cut answer is trained, and not acted on"


def test_an_engine_that_fails_is_no_verdict(openhands: Stand) -> None:
    played = openhands.play([run("echo 1"), EngineError("gone"), FINISH])
    assert isinstance(played.end, EngineError)
    assert played.session.turns == 1, "and it is not asked again behind the session's back"


class Hanging(PlayedEngine):
    """Never answers."""

    asked: asyncio.Event

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


def hanging(stand: Stand) -> Hanging:
    """One, of the running loop."""
    engine = Hanging(stand.chat, [])
    engine.asked = asyncio.Event()
    return engine


def test_a_hanging_model_is_interrupted(openhands: Stand) -> None:
    async def main() -> Any:
        sandbox = await openhands.sandboxes.acquire(TASK)
        return await openhands.on(sandbox, hanging(openhands), wall_s=5.0)

    assert isinstance(openhands.run(main()).end, TimeoutError)
    worker = openhands.agent._crew._workers[0]
    assert (worker.episodes, worker.ended) == (0, False), "the worker has let go of it and serves on"
    assert openhands.play([FINISH]).end is Termination.FINISHED


def test_a_hanging_command_is_interrupted(openhands: Stand) -> None:
    played = openhands.play([run("sleep 1000", timeout=900), FINISH], wall_s=6.0)
    assert isinstance(played.end, TimeoutError)
    assert openhands.agent._crew._workers[0].episodes == 0


def test_what_the_agent_asks_of_sampling_changes_nothing(openhands: Stand) -> None:
    played = openhands.play([FINISH])
    (request,) = played.engine.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, -1)


def test_sixteen_at_once_in_one_worker(openhands: Stand) -> None:
    async def one(i: int) -> Any:
        turns = [run(f"echo mine-{i} > f; cat f"), run("sleep 0.2; cat f"), FINISH]
        return await openhands.episode(turns, name=f"e{i}")

    async def main() -> list[Any]:
        return list(await asyncio.gather(*(one(i) for i in range(16))))

    for i, played in enumerate(openhands.run(main())):
        assert played.end is Termination.FINISHED
        assert [f"mine-{i}\n" in text for text in observations(openhands, played)] == [True, True]
        assert all(f"mine-{j}\n" not in text for j in range(16) if j != i for text in observations(openhands, played))
    assert len(openhands.agent._crew._workers) == 1


def test_a_dead_worker_costs_its_episodes_only(chat: Chat) -> None:
    with stand(chat) as made:

        async def main() -> tuple[Any, Any]:
            sandbox = await made.sandboxes.acquire(TASK)
            engine = hanging(made)
            running = asyncio.create_task(made.on(sandbox, engine, "first"))
            await asyncio.wait_for(engine.asked.wait(), 120)
            os.kill(made.agent._crew._workers[0].pid, signal.SIGKILL)
            return await running, await made.episode([FINISH], name="second")

        first, second = made.run(main())
        assert isinstance(first.end, EnvironmentFault)
        assert "died" in str(first.end)
        assert second.end is Termination.FINISHED


def test_an_interpreter_without_openhands_is_one_clear_error(chat: Chat) -> None:
    with stand(chat, agent=OpenHands(OpenHandsConfig(python="/usr/bin/python3"))) as made:
        played = made.play([FINISH])
    assert isinstance(played.end, EnvironmentFault)
    assert "did not start" in str(played.end)


def test_workers_end_with_the_agent(chat: Chat) -> None:
    with stand(chat) as made:
        assert made.play([FINISH]).end is Termination.FINISHED
        pid = made.agent._crew._workers[0].pid
        home = Path(f"/proc/{pid}/environ").read_bytes().split(b"HOME=")[1].split(b"\0")[0]
        assert Path(home.decode()).is_dir()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(home.decode()).exists()


# --- in containers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contained(chat: Chat) -> Iterator[Stand]:
    """In containers."""
    with stand(chat, "docker") as made:
        yield made


@needs_docker
@pytest.mark.parametrize("turns", [5, 30, 300])
def test_exact_at_any_length(contained: Stand, turns: int) -> None:
    said = [run(f"echo {i} | tee -a log; seq 1 {i % 40}") for i in range(turns - 1)]

    async def look(sandbox: Sandbox) -> None:
        assert (await sandbox.read("log")).decode().split() == [str(i) for i in range(turns - 1)]

    played = contained.play([*said, FINISH], look)
    assert played.end is Termination.FINISHED
    exact(played.session.trajectories("t", {}), played.engine)
    t = played.trajectory
    assert t.n_turns == turns
    assert len(t.info["calls"]) == turns
    assert json.dumps(t.info)


class Telling(PlayedEngine):
    """Says when it is asked for the second time."""

    second: asyncio.Event

    async def generate(self, request: GenerateRequest) -> Generation:
        if len(self.requests) == 1:
            self.second.set()
        return await super().generate(request)


@needs_docker
def test_a_lost_container_ends_the_episode_at_once(contained: Stand) -> None:
    async def main() -> Any:
        sandbox = await contained.sandboxes.acquire(TASK)
        engine = Telling(contained.chat, [run("echo 1"), run("sleep 600", timeout=500), *[run("echo 2")] * 300])
        engine.second = asyncio.Event()
        running = asyncio.create_task(contained.on(sandbox, engine))
        await asyncio.wait_for(engine.second.wait(), 120)
        with an_engine() as docker:
            docker.remove(sandbox.container_id)
        return await running

    played = contained.run(main())
    assert isinstance(played.end, SandboxError)
    assert len(played.engine.requests) <= 3, "the model is not asked 300 times about a container that is gone"
