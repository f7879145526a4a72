"""T-TERM: one test per way an episode can end. What the policy causes keeps its reward; what it cannot has none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agents.tool_loop import ToolLoop, ToolLoopConfig
from harness.chat import Chat
from harness.episode import Episode, Stage, run_episode
from harness.errors import ConfigError, EngineError, InvariantError, SandboxError
from harness.protocols import ExecResult, Sandbox, Tool, ToolResult
from harness.task import Score, Task, Termination
from harness.tools import current_turn
from tests.support import (
    USER,
    FnAgent,
    FnEnvironment,
    NoConfig,
    PlayedEngine,
    Raw,
    WatchedSandbox,
    WatchedSandboxes,
    one_turn,
    run_virtual,
    stage_of,
    tool_call,
)

TASK = Task("train/0", (USER,))
LOOP = ToolLoop(ToolLoopConfig())
ACT = tool_call("act", "{}")
DONE = FnEnvironment(tool_hook=lambda _: ToolResult("bye", done=True))


def play(stage: Stage) -> Episode:
    """Play one episode in virtual time and check what holds for every one of them."""
    result = run_virtual(run_episode(stage, TASK, "e1"))
    sandboxes = stage.sandboxes
    assert isinstance(sandboxes, WatchedSandboxes)
    assert all(s.closed == 1 for s in sandboxes.made), "a sandbox was left open, or closed twice"
    assert (result.reward is not None) == result.termination.policy_caused
    assert result.trainable == any(t.n_actions for t in result.trajectories)
    if not result.termination.policy_caused:
        assert not result.trajectories
        assert result.error
    for t in result.trajectories:
        assert t.reward == result.reward
        assert t.info["termination"] == result.termination
    return result


def fails(error: BaseException) -> Any:
    def hook(*_: Any) -> Any:
        raise error

    return hook


def scored(value: Any) -> FnEnvironment:
    return FnEnvironment(tool_hook=DONE.tool_hook, score_hook=lambda: value)


# --- what the policy can cause ---------------------------------------------------------------------------------------


def test_finished(chat: Chat) -> None:
    environment = scored(Score(0.75, {0: 0.25}, {"edits": 2}))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert (result.termination, result.reward) == (Termination.FINISHED, 0.75)
    (t,) = result.trajectories
    assert t.turn_rewards == {0: 0.25}
    assert t.info["edits"] == result.info["edits"] == 2
    assert (t.episode_id, t.task_id) == ("e1", TASK.id)


def test_max_turns(chat: Chat) -> None:
    result = play(
        stage_of(
            chat,
            PlayedEngine(chat, [ACT] * 3),
            agent=LOOP,
            environment=FnEnvironment(score_hook=lambda: Score(0.0)),
            max_turns=3,
        )
    )
    assert (result.termination, result.reward) == (Termination.MAX_TURNS, 0.0)
    assert result.trajectories[0].n_turns == 3


def test_max_turns_told_by_the_session(chat: Chat) -> None:
    async def greedy(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        messages = list(task.messages)
        while True:
            messages = [*messages, (await session.complete(messages)).message(), USER]

    result = play(stage_of(chat, PlayedEngine(chat, ["x"] * 9), agent=FnAgent(greedy), max_turns=4))
    assert (result.termination, result.reward) == (Termination.MAX_TURNS, 1.0)
    assert result.trajectories[0].n_turns == 4


def test_max_context(chat: Chat) -> None:
    flood = FnEnvironment(tool_hook=lambda _: ToolResult("x" * 500))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT] * 9), agent=LOOP, environment=flood, max_context=400))
    assert (result.termination, result.reward) == (Termination.MAX_CONTEXT, 1.0)
    assert result.trajectories[0].n_turns == 1


def test_max_tokens_per_turn(chat: Chat) -> None:
    result = play(stage_of(chat, PlayedEngine(chat, [Raw([5, 6], "length")]), max_tokens_per_turn=2))
    assert (result.termination, result.reward) == (Termination.MAX_TOKENS_PER_TURN, 1.0)
    assert result.trajectories[0].n_actions == 2


def test_wall_clock(chat: Chat) -> None:
    async def slow(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        await session.complete(list(task.messages))
        await asyncio.sleep(1e6)
        return Termination.FINISHED

    result = play(stage_of(chat, PlayedEngine(chat, ["x"]), agent=FnAgent(slow), wall_s=5.0))
    assert (result.termination, result.reward) == (Termination.WALL_CLOCK, 1.0)
    assert result.trajectories[0].n_turns == 1


def test_malformed_and_unknown_calls_are_turns_not_ends(chat: Chat) -> None:
    engine = PlayedEngine(chat, ["<tool_call>{</tool_call>", tool_call("nope", "{}"), tool_call("act", '"["'), "no call", ACT])
    result = play(stage_of(chat, engine, agent=LOOP, environment=DONE))
    assert (result.termination, result.reward) == (Termination.FINISHED, 1.0)
    assert result.trajectories[0].n_turns == 5


def test_a_command_that_takes_too_long_is_an_observation_not_an_end(chat: Chat) -> None:
    """The policy started it, so it goes on with an error in its hands, and all it said is trained."""

    class Slow(WatchedSandbox):
        async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
            await asyncio.sleep(timeout_s)
            return ExecResult("", -1, timed_out=True)

    class Provider(WatchedSandboxes):
        async def acquire(self, task: Task) -> WatchedSandbox:
            self.made.append(Slow())
            return self.made[-1]

    async def agent(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        reply = await session.complete(list(task.messages))
        result = await sandbox.exec(reply.content, timeout_s=30.0)
        assert result.timed_out
        await session.complete([*task.messages, reply.message(), {"role": "user", "content": "error: no answer in 30 s"}])
        return Termination.FINISHED

    engine = PlayedEngine(chat, ["sleep 99", "done"])
    result = play(stage_of(chat, engine, agent=FnAgent(agent), sandboxes=Provider(), wall_s=60.0))
    assert (result.termination, result.reward) == (Termination.FINISHED, 1.0)
    assert result.trajectories[0].n_turns == 2
    assert "error: no answer in 30 s" in chat.decode(engine.requests[1].token_ids)


def test_judged_but_silent_is_not_trainable(chat: Chat) -> None:
    """The policy sampled nothing: nothing to train, although a limit (a policy cause) ended it."""
    result = play(stage_of(chat, PlayedEngine(chat, []), max_context=2))
    assert (result.termination, result.trainable) == (Termination.MAX_CONTEXT, False)


# --- what it cannot cause --------------------------------------------------------------------------------------------


class Losing(WatchedSandboxes):
    async def acquire(self, task: Task) -> WatchedSandbox:
        raise SandboxError("no container")


def test_sandbox_cannot_be_made(chat: Chat) -> None:
    result = play(stage_of(chat, PlayedEngine(chat, ["x"]), sandboxes=Losing()))
    assert result.termination == Termination.SANDBOX_LOST
    assert "no container" in result.error


def test_sandbox_lost_on_the_way(chat: Chat) -> None:
    environment = FnEnvironment(tool_hook=fails(SandboxError("gone")))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert result.termination == Termination.SANDBOX_LOST


def test_sandbox_lost_while_judging_is_not_a_zero(chat: Chat) -> None:
    environment = FnEnvironment(tool_hook=DONE.tool_hook, score_hook=fails(SandboxError("gone")))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert result.termination == Termination.SANDBOX_LOST


def test_engine_error(chat: Chat) -> None:
    result = play(stage_of(chat, PlayedEngine(chat, [ACT, EngineError("500")]), agent=LOOP))
    assert result.termination == Termination.ENGINE_ERROR


@pytest.mark.parametrize("where", ["begin_hook", "tool_hook"])
@pytest.mark.parametrize("error", [ValueError("boom"), TimeoutError("mine"), KeyError("x"), RecursionError()])
def test_environment_error(chat: Chat, where: str, error: Exception) -> None:
    """Also an environment's own TimeoutError: it is not the episode's wall clock."""
    environment = FnEnvironment(**{where: fails(error)})
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert result.termination == Termination.ENVIRONMENT_ERROR
    assert type(error).__name__ in result.error
    assert TASK.id in result.error


def test_an_agent_that_raises(chat: Chat) -> None:
    result = play(stage_of(chat, PlayedEngine(chat, []), agent=FnAgent(fails(ZeroDivisionError()))))
    assert result.termination == Termination.ENVIRONMENT_ERROR


@pytest.mark.parametrize("error", [ValueError("grader"), TimeoutError()])
def test_verifier_error(chat: Chat, error: Exception) -> None:
    environment = FnEnvironment(tool_hook=DONE.tool_hook, score_hook=fails(error))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert result.termination == Termination.VERIFIER_ERROR
    assert type(error).__name__ in result.error


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        1.0,
        Score(math.nan),
        Score(math.inf),
        Score(None),  # type: ignore[arg-type]
        Score(1.0, {0: math.nan}),
        Score(1.0, info={"x": object()}),
    ],
)
def test_a_verdict_that_is_none_is_a_verifier_error(chat: Chat, verdict: Any) -> None:
    """It must neither be trained (NaN) nor stop the whole run."""
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=scored(verdict)))
    assert result.termination == Termination.VERIFIER_ERROR


def test_the_record_of_how_it_ended_is_the_harness_s_own(chat: Chat) -> None:
    """The trainer reads `termination` from the facts; an environment's fact of the same name must not replace it."""
    environment = scored(Score(1.0, info={"termination": "max_turns", "wall_s": -1, "mine": 1}))
    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=environment))
    assert result.info["termination"] == "finished"
    assert result.info["wall_s"] >= 0
    assert result.info["mine"] == 1


def test_a_sandbox_that_cannot_be_closed_does_not_take_the_verdict_with_it(chat: Chat) -> None:
    class Stuck(WatchedSandbox):
        async def close(self) -> None:
            await super().close()
            raise SandboxError("daemon went away")

    class Provider(WatchedSandboxes):
        async def acquire(self, task: Task) -> WatchedSandbox:
            self.made.append(Stuck())
            return self.made[-1]

    result = play(stage_of(chat, PlayedEngine(chat, [ACT]), agent=LOOP, environment=DONE, sandboxes=Provider()))
    assert (result.termination, result.reward) == (Termination.FINISHED, 1.0)


@pytest.mark.parametrize("said", [t for t in Termination if not t.policy_caused])
def test_an_agent_that_reports_a_loss_is_not_judged(chat: Chat, said: Termination) -> None:
    async def lost(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        await session.complete(list(task.messages))
        return said

    result = play(stage_of(chat, PlayedEngine(chat, ["x"]), agent=FnAgent(lost)))
    assert result.termination == said


def test_an_agent_that_forgets_to_say_how_it_ended(chat: Chat) -> None:
    async def silent(*_: Any) -> Any:
        return None

    result = play(stage_of(chat, PlayedEngine(chat, []), agent=FnAgent(silent)))
    assert result.termination == Termination.ENVIRONMENT_ERROR


# --- what passes through ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError("no image"), InvariantError("corrupt")])
def test_mistakes_that_stop_the_run_pass_through_and_close_the_sandbox(chat: Chat, error: Exception) -> None:
    stage = stage_of(chat, PlayedEngine(chat, []), environment=FnEnvironment(begin_hook=fails(error)))
    with pytest.raises(type(error)):
        play(stage)
    assert [s.closed for s in stage.sandboxes.made] == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["agent", "begin", "score"])
def test_cancellation_closes_the_sandbox(chat: Chat, where: str) -> None:
    async def run() -> None:
        entered = asyncio.Event()

        async def hang(*_: Any) -> Any:
            entered.set()
            await asyncio.Event().wait()

        class Slow(FnEnvironment):
            async def begin(self, task: Any, sandbox: Any) -> Any:
                live = await super().begin(task, sandbox)
                if where == "begin":
                    await hang()
                if where == "score":
                    live.score = hang
                return live

        agent = FnAgent(hang if where == "agent" else one_turn)
        stage = stage_of(chat, PlayedEngine(chat, ["x"]), agent=agent, environment=Slow())
        runner = asyncio.create_task(run_episode(stage, TASK, "e1"))
        await entered.wait()
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner
        assert [s.closed for s in stage.sandboxes.made] == [1]  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_second_cancellation_does_not_interrupt_the_closing(chat: Chat) -> None:
    async def run() -> None:
        entered, closing, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class SlowToClose(WatchedSandbox):
            async def close(self) -> None:
                closing.set()
                await go.wait()
                await super().close()

        class Provider(WatchedSandboxes):
            async def acquire(self, task: Task) -> WatchedSandbox:
                self.made.append(SlowToClose())
                return self.made[-1]

        async def hang(*_: Any) -> Any:
            entered.set()
            await asyncio.Event().wait()

        stage = stage_of(chat, PlayedEngine(chat, []), agent=FnAgent(hang), sandboxes=Provider())
        runner = asyncio.create_task(run_episode(stage, TASK, "e1"))
        await entered.wait()
        runner.cancel()
        await closing.wait()
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner
        go.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others)
        assert [s.closed for s in stage.sandboxes.made] == [1]  # type: ignore[attr-defined]

    asyncio.run(run())


def test_turn_rewards_belong_to_the_first_segment(chat: Chat) -> None:
    async def forks(task: Any, live: Any, sandbox: Any, session: Any, limits: Any) -> Termination:
        await session.complete([USER])
        await session.complete([{"role": "user", "content": "summary"}])
        return Termination.FINISHED

    environment = FnEnvironment(score_hook=lambda: Score(1.0, {0: 0.5}))
    result = play(stage_of(chat, PlayedEngine(chat, ["a", "b"]), agent=FnAgent(forks), environment=environment))
    assert [(t.segment, t.turn_rewards, t.reward) for t in result.trajectories] == [(0, {0: 0.5}, 1.0), (1, {}, 1.0)]


def test_every_termination_is_either_the_policy_s_or_not() -> None:
    theirs = {t for t in Termination if t.policy_caused}
    assert theirs == {
        Termination.FINISHED,
        Termination.MAX_TURNS,
        Termination.MAX_CONTEXT,
        Termination.MAX_TOKENS_PER_TURN,
        Termination.WALL_CLOCK,
    }


# --- the end of a live task, and turns -------------------------------------------------------------------------------


@dataclass
class Closable:
    """A live task that counts how often it was closed."""

    score_hook: Callable[[], Any]
    closed: int = 0
    tools: tuple[Tool, ...] = ()

    async def score(self) -> Any:
        return self.score_hook()

    async def close(self) -> None:
        self.closed += 1
        raise OSError("and what it raises there changes no verdict")


@dataclass
class Begins:
    """An environment of one live task."""

    live: Any
    Config = NoConfig

    async def begin(self, task: Task, sandbox: Sandbox) -> Any:
        return self.live


def _fail() -> Score:
    raise ValueError("the grader is broken")


@pytest.mark.parametrize(("hook", "reward"), [(lambda: Score(1.0), 1.0), (_fail, None)])
def test_a_live_task_is_closed_once_however_it_ends(chat: Chat, hook: Callable[[], Any], reward: float | None) -> None:
    live = Closable(hook)
    stage = stage_of(chat, PlayedEngine(chat, ["hello"]), environment=Begins(live))
    assert play(stage).reward == reward
    assert live.closed == 1


def test_a_tool_knows_its_turn(chat: Chat) -> None:
    turns: list[int] = []
    environment = FnEnvironment(tool_hook=lambda _: ToolResult(str(turns.append(current_turn()))))
    play(stage_of(chat, PlayedEngine(chat, ["let me see", ACT, ACT + ACT]), agent=LOOP, environment=environment, max_turns=3))
    assert turns == [1, 2, 2]
