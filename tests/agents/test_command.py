"""Agents that know nothing of us, through the gateway: the real mini-swe-agent, and a script in a container without network."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest

from agents.command import CommandAgent, CommandConfig
from agents.openhands import interpreter
from harness.chat import Chat
from harness.errors import EngineError, EnvironmentFault, SandboxError
from harness.protocols import Sandbox
from harness.task import Termination
from tests.agents.support import call, exact, stand
from tests.contracts.sandbox_support import DOCKER, needs_docker, processes_of
from tests.support import Raw

pytestmark = pytest.mark.timeout(300)

MINI = Path(interpreter(None)).parent / "mini"
ALONE = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def mini() -> CommandAgent:
    """mini-swe-agent as its users start it, but for the answers to its questions."""
    command = f'{shlex.quote(str(MINI))} -y --exit-immediately -m openai/policy -t "$SAO_TASK" -o last.traj.json'
    return CommandAgent(CommandConfig(command=command, env=ALONE))


# One call of the model after the other, as an agent of twenty lines does it.
SCRIPT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["SAO_TASK"]}]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "temperature": 0.1}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
    if message["content"] == "stop":
        break
    messages += [message, {"role": "user", "content": os.popen(message["content"]).read()}]
"""


def own(script: str = SCRIPT, **env: str) -> CommandAgent:
    """A user's own agent."""
    return CommandAgent(CommandConfig(command=f"python3 -c {shlex.quote(script)}", env=env))


def test_mini_swe_agent_as_it_is(chat: Chat) -> None:
    seen: dict[str, bytes] = {}

    async def prepare(sandbox: Sandbox) -> list[str]:
        await sandbox.write("calc.py", b"def add(a, b):\n    return a - b\n")
        return [
            "I look first. " + call("bash", command="cat calc.py"),
            call("bash", command="sed -i 's/a - b/a + b/' calc.py && python3 -c 'import calc; print(calc.add(2, 3))'"),
            "Both at once: " + call("bash", command="echo one") + call("bash", command="echo two"),
            SUBMIT,
        ]

    async def look(sandbox: Sandbox) -> None:
        seen["calc.py"] = await sandbox.read("calc.py")

    with stand(chat, agent=mini()) as made:
        played = made.play(prepare, look)
    assert played.end is Termination.FINISHED, played.end
    assert seen["calc.py"] == b"def add(a, b):\n    return a + b\n"
    assert played.trajectory.n_turns == 4, "one segment: it only ever appends"
    exact(played.session.trajectories("t", {}), played.engine)
    text = chat.decode(played.trajectory.tokens.tolist())
    assert "return a - b" in text
    assert '"returncode": 0' in text


def test_mini_swe_agent_takes_back_a_turn_that_it_cannot_use(chat: Chat) -> None:
    """It leaves an answer without a call out of its history: that is another conversation, so a fork, and both are kept."""
    with stand(chat, agent=mini()) as made:
        played = made.play([call("bash", command="echo 1"), "no call at all", SUBMIT])
    assert played.end is Termination.FINISHED, played.end
    first, second = played.session.trajectories("t", {})
    assert (first.n_turns, second.n_turns) == (2, 1)
    assert first.info["facts"]["forks"] == 1
    exact((first, second), played.engine)


@pytest.mark.parametrize("kind", ["process", DOCKER])
def test_an_agent_of_ones_own(chat: Chat, kind: str) -> None:
    async def look(sandbox: Sandbox) -> None:
        assert await sandbox.read("made") == b"x\n"

    with stand(chat, kind, agent=own()) as made:
        played = made.play(["echo x > made; cat made", "ls", "stop"], look)
    assert played.end is Termination.FINISHED, played.end
    assert played.trajectory.n_turns == 3
    assert [r.sampling.temperature for r in played.engine.requests] == [1.0] * 3, "what the agent asks for is ignored"
    exact(played.session.trajectories("t", {}), played.engine)


@needs_docker
def test_the_container_reaches_the_model_and_nothing_else(chat: Chat) -> None:
    with stand(chat, "docker", agent=own()) as made:
        look = "cat /proc/net/route | wc -l; ls /sys/class/net; env | grep -c API_KEY"
        played = made.play([look, "stop"])
    assert played.end is Termination.FINISHED, played.end
    text = chat.decode(played.trajectory.tokens.tolist())
    assert "1\nlo\n" in text, "no route, one device"


def test_eight_at_once_never_see_each_other(chat: Chat) -> None:
    with stand(chat, agent=own()) as made:

        async def main() -> list[Any]:
            turns = [[f"echo mine-{i}", f"echo again-{i}", "stop"] for i in range(8)]
            return list(await asyncio.gather(*(made.episode(t, name=f"e{i}") for i, t in enumerate(turns))))

        for i, played in enumerate(made.run(main())):
            text = chat.decode(played.trajectory.tokens.tolist())
            assert (played.end, played.trajectory.n_turns) == (Termination.FINISHED, 3)
            assert f"mine-{i}" in text
            assert all(f"mine-{j}" not in text for j in range(8) if j != i)


def test_turns_run_out(chat: Chat) -> None:
    with stand(chat, agent=own()) as made:
        played = made.play(["echo 1"] * 9, max_turns=3)
    assert played.end is Termination.MAX_TURNS
    assert played.trajectory.n_turns == 3


def test_one_that_asks_on_and_on_is_ended(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.command.GRACE_S", 0.5)
    stubborn = SCRIPT.replace("urllib.request.urlopen(request, timeout=60)", "ask(request)")
    ask = "while True:\n    try: return urllib.request.urlopen(r)\n    except OSError: time.sleep(.05)"
    head = f"import time\ndef ask(r):\n  {ask}\n"
    with stand(chat, agent=own(head + stubborn, MARK="stubborn-agent")) as made:
        played = made.play(["echo 1", Raw(chat.encode("echo")[:2], "length")])
        assert played.end is Termination.MAX_TOKENS_PER_TURN
        assert processes_of("stubborn-agent") == []


def test_what_a_broken_command_means(chat: Chat) -> None:
    with stand(chat, agent=CommandAgent(CommandConfig(command="echo no such agent; exit 3"))) as made:
        played = made.play(["stop"])
    assert isinstance(played.end, EnvironmentFault)
    assert "no model call (exit code 3): no such agent" in str(played.end)
    with stand(chat, agent=own(SCRIPT + "raise SystemExit(4)")) as made:
        played = made.play(["stop"])
    assert played.end is Termination.FINISHED, "the model was asked: what it said is judged"
    assert played.facts()["command_failed"] == 1
    with stand(chat, agent=own()) as made:
        played = made.play(["echo 1", EngineError("gone")])
    assert isinstance(played.end, EngineError)


def test_a_wall_clock_kills_the_command(chat: Chat) -> None:
    with stand(chat, agent=own("import time; time.sleep(1000)", MARK="sleeping-agent")) as made:
        played = made.play(["stop"], wall_s=3.0)
        assert isinstance(played.end, TimeoutError)
        assert processes_of("sleeping-agent") == []


def test_a_child_left_behind_does_not_hold_the_episode(chat: Chat) -> None:
    with stand(chat, agent=own(SCRIPT + "import os\nos.system('sleep 1000 &')")) as made:
        assert made.play(["stop"], wall_s=60.0).end is Termination.FINISHED


@needs_docker
def test_a_sandbox_without_python_is_one_clear_error(chat: Chat) -> None:
    async def prepare(sandbox: Sandbox) -> list[str]:
        await sandbox.exec("rm -f /usr/bin/python3*", timeout_s=30)
        return ["stop"]

    with stand(chat, "docker", agent=own()) as made:
        played = made.play(prepare)
    assert isinstance(played.end, SandboxError)
    assert "python3" in f"{played.end} {played.end.hint}"
