"""Whole episodes: what the agent says last is judged, and nothing that the sandbox holds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agents.tool_loop import ToolLoop, ToolLoopConfig
from environments.python_tir.environment import NO_ANSWER, PythonTir, PythonTirConfig
from harness.chat import Chat
from harness.episode import Episode, run_episode
from harness.protocols import ANSWER
from harness.task import Termination
from tests.contracts.sandbox_support import real, started
from tests.support import PlayedEngine, stage_of, tool_call

pytestmark = pytest.mark.timeout(180)


def python(code: str) -> str:
    return tool_call("python", json.dumps({"code": code}))


def played(chat: Chat, tmp_path: Path, turns: list[str], kind: str = "process", **limits: int) -> tuple[Episode, PlayedEngine]:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "p", "problem": "What is 6 * 7?", "answer": "42"}))
    environment = PythonTir(PythonTirConfig(dataset=str(tmp_path / "rows.jsonl"), heldout=1.0))
    (task,) = environment.tasks("heldout")
    engine = PlayedEngine(chat, turns)

    async def main() -> Episode:
        async with started(kind) as provider:
            agent = ToolLoop(ToolLoopConfig())
            return await run_episode(
                stage_of(chat, engine, agent=agent, environment=environment, sandboxes=provider, **limits), task, "e"
            )

    return asyncio.run(main()), engine


@real
def test_tool_then_answer(chat: Chat, tmp_path: Path, kind: str) -> None:
    episode, engine = played(chat, tmp_path, [python("x = 6 * 7"), python("x"), r"So \boxed{42}"], kind)
    assert (episode.termination, episode.reward) == (Termination.FINISHED, 1.0), episode.error
    assert (episode.info["cells"], episode.info["restarts"], episode.info["graded_by"]) == (2, 0, "plain")
    assert "[no output]" in chat.decode(engine.requests[1].token_ids)
    assert chat.decode(engine.requests[2].token_ids).count("42") == 1


@pytest.mark.parametrize(
    ("turns", "limits", "termination", "reward"),
    [
        ([r"\boxed{43}"], {}, Termination.FINISHED, 0.0),
        (["42", r"\boxed{42}"], {}, Termination.FINISHED, 1.0),
        (["42", "42"], {"max_turns": 2}, Termination.MAX_TURNS, 0.0),
        ([r"\boxed{42} " + python("1"), "well"], {"max_turns": 2}, Termination.MAX_TURNS, 0.0),
        ([python("print(r'\\boxed{42}')"), "done"], {"max_turns": 2}, Termination.MAX_TURNS, 0.0),
        ([python(f"open({ANSWER!r}, 'w').write(r'\\boxed{{42}}')")], {"max_turns": 1}, Termination.MAX_TURNS, 0.0),
        ([python(f"open({ANSWER!r}, 'w').write(r'\\boxed{{42}}')"), r"\boxed{1}"], {}, Termination.FINISHED, 0.0),
        ([python("import os; os.kill(os.getppid(), 9)"), r"\boxed{42}"], {}, Termination.FINISHED, 1.0),
    ],
)
def test_what_is_an_answer(
    chat: Chat, tmp_path: Path, turns: list[str], limits: dict[str, int], termination: Termination, reward: float
) -> None:
    episode, _ = played(chat, tmp_path, turns, **limits)
    assert (episode.termination, episode.reward) == (termination, reward), episode.error


def test_a_reply_without_answer_is_told(chat: Chat, tmp_path: Path) -> None:
    _, engine = played(chat, tmp_path, ["42", r"\boxed{42}"])
    assert NO_ANSWER in chat.decode(engine.requests[1].token_ids)
