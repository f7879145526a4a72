"""A run in which everything happens at once: what agents break costs them their own reward, what the world breaks costs a try,
and the honest episodes beside them notice nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import docker
import pytest

from environments.swe.environment import Swe, SweConfig
from harness.ledger import Ledger, Slot
from harness.rollout import collect
from harness.sandboxes import docker_monitor
from harness.sandboxes.docker_engine import Engine
from harness.sandboxes.docker_sandbox import DISK_KILLS
from harness.task import Task, Termination
from harness.trajectory import Trajectory
from tests.contracts.sandbox_support import an_engine, started
from tests.swe.acting import playing, stage
from tests.swe.instance import FIXED, GOLD, row

pytestmark = pytest.mark.timeout(300)
HONEST = 4
GRADING = {"step_s": 30.0, "timeout_s": 120.0, "test_timeout_s": 0.0}
LIMITS = {"memory_mb": 256, "pids": 64, "disk_mb": 48}
FILL = "head -c 100M /dev/zero > fill; sleep 60"
KILLER = "(trap '' TERM HUP INT; while :; do kill -{} -1; done) & while :; do :; done"
# Script and options; each is worth nothing, but keeps its verdict.
BREAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fork bomb": ("bomb() { bomb | bomb & }; bomb; while :; do :; done", {"seconds": 6.0}),
    "endless output": ("yes", {"seconds": 6.0}),
    "endless output behind": ("yes & yes >&2 & true", {"seconds": 6.0}),
    "a full disk": (FILL, {"seconds": 20.0}),
    "a full disk again and again": (FILL, {"times": DISK_KILLS + 2, "seconds": 20.0}),
    "memory": ("while :; do python3 -c 'bytearray(2 << 30)'; x=$(head -c 1G /dev/zero | tr '\\0' x); done", {"seconds": 6.0}),
    "kill everything": ("kill -9 -1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done; kill -9 $$", {}),
    "kill everything for ever": (KILLER.format(9), {"seconds": 6.0}),
    "ask everything to end for ever": (KILLER.format(15), {"seconds": 6.0}),
}
# They wait for a file that only the test makes; in the first try the test kills the container instead.
WAIT = "bash -c 'until [ -e /tmp/go ]; do sleep 0.1; done'"
VICTIMS: dict[str, tuple[str, str]] = {
    # Script, and what is seen in a container that is in the middle of it.
    "killed while it acts": (f"{GOLD}\n{WAIT}", "/tmp/go"),
    "killed while it is judged": (
        f"cat > shop/prices.py <<'X'\nimport os, time\nwhile not os.path.exists('/tmp/go'):\n    time.sleep(0.1)\n{FIXED}X",
        "python3",
    ),
}


def test_chaos(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_monitor, "CHECK_S", 0.5)
    monkeypatch.setattr(docker_monitor, "GRACE_S", 2.0)
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    swe = Swe(SweConfig.model_validate({"dataset": "none", "grading": GRADING}))
    posed = swe.task(row(image=image))
    tasks = [playing(posed, name, script, **options) for name, (script, options) in BREAKERS.items()]
    tasks += [playing(posed, name, f"{{ {script}\n}}") for name, (script, _) in VICTIMS.items()]
    tasks += [playing(posed, f"honest {n}", GOLD) for n in range(HONEST)]

    async def main() -> tuple[list[Any], dict[str, list[str]]]:
        ledger = Ledger(tmp_path)
        try:
            async with started("docker", run_id, image=image, **LIMITS) as sandboxes:
                played = stage(swe, sandboxes, tmp_path / "model")
                run = [(Slot(i, i), task) for i, task in enumerate(tasks)]
                with an_engine() as engine:
                    async with asyncio.TaskGroup() as group:
                        killer = group.create_task(kill_each_once(engine, run_id))
                        episodes = await collect(played, run, ledger, "value", version=0, concurrency=len(tasks), attempts=3)
                    assert engine.find(f"sao.run={run_id}") == [], "nothing is left, also before the end of the run"
                return episodes, killer.result()
        finally:
            ledger.close()

    episodes, killed = asyncio.run(main())
    verdicts = {e.task_id: (e.reward, e.termination, e.info.get("outcome"), e.info.get("reason"), e.error) for e in episodes}
    expected = {task.id: 0.0 if task.id in BREAKERS else 1.0 for task in tasks}
    assert {name: verdicts[name] for name, reward in expected.items() if verdicts[name][0] != reward} == {}
    assert {name: len(of) for name, of in killed.items()} == dict.fromkeys(VICTIMS, 1)
    check_books(tmp_path, tasks, episodes, killed)


def check_books(folder: Path, tasks: list[Task], episodes: list[Any], killed: dict[str, list[str]]) -> None:
    """Everything that was begun has one outcome; the trajectories are on the disk; only what was killed was lost."""
    ledger = Ledger(folder)
    assert ledger.counts() == {"pending": len(tasks), "dropped": len(VICTIMS)}
    lost = {termination: reason for termination, reason, _ in ledger.reasons()}
    assert set(lost) == {Termination.SANDBOX_LOST, Termination.VERIFIER_ERROR}
    acted, judged = (container[:12] for containers in killed.values() for container in containers)
    assert f"{acted} is lost: it was ended from outside, with code 137" in lost[Termination.SANDBOX_LOST]
    assert f"{judged} is lost: it was ended from outside, with code 137" in lost[Termination.VERIFIER_ERROR]
    assert {e.id for e in episodes} == {waiting.id for waiting in ledger.pending("value")}
    assert {e.task_id: int(e.id.rsplit("-", 1)[1]) for e in episodes} == {t.id: 1 + (t.id in VICTIMS) for t in tasks}
    for episode in episodes:
        (stored,) = ledger.trajectories.glob(f"{episode.id}.*")
        loaded = Trajectory.load(stored)
        assert (loaded.reward, loaded.n_actions) == (episode.reward, episode.trajectories[0].n_actions)
        assert (ledger.artifacts / episode.id / "patch.diff").is_file()
    assert len(list(ledger.trajectories.iterdir())) == len(tasks), "nothing of the lost ones"
    ledger.close()


async def kill_each_once(engine: Engine, run_id: str) -> dict[str, list[str]]:
    """Kill one container of each victim in the middle of its work, and let the next one go on; those that were killed."""
    killed: dict[str, list[str]] = {name: [] for name in VICTIMS}
    gone_on: set[str] = set()
    async with asyncio.timeout(100):
        while gone_on != set(VICTIMS):
            for container in await engine.call(engine.find, f"sao.run={run_id}"):
                name, number = container["Labels"]["sao.episode"].split("#")[0], container["Id"]
                if (
                    name in VICTIMS
                    and number not in killed[name]
                    and await engine.call(works, engine, number, VICTIMS[name][1])
                ):
                    if killed[name]:
                        made = await engine.call(engine.api.exec_create, number, ["touch", "/tmp/go"])
                        await engine.call(engine.api.exec_start, made["Id"])
                        gone_on.add(name)
                    else:
                        await engine.call(engine.api.kill, number)
                        killed[name].append(number)
            await asyncio.sleep(0.1)
    return killed


def works(engine: Engine, container: str, mark: str) -> bool:
    """Whether one of a container's processes has the mark in its command line."""
    try:
        return any(mark in process[-1] for process in engine.api.top(container, "-eo pid,args")["Processes"])
    except docker.errors.APIError:
        return False  # not started yet, or removed
