"""The trainer as real torchrun processes: the commands of a run on two ranks, errors, and an end with its owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config import CriticConfig, SftConfig, TrainerConfig, ValueConfig
from harness.errors import ConfigError, LearnerError
from harness.learner import Learner
from tests.trainer import support
from trainer.model import build_critic, build_policy
from trainer.weights import read_file, sha256

ROOT = Path(__file__).parents[2]
WAIT_S = 150.0
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc"),
]


def family(leader: int) -> list[int]:
    """A process and all below it. Ranks have sessions of their own, so a process group does not hold them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = [leader]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def alive(pid: int) -> bool:
    """A process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pids: list[int], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
    return True


class World:
    """Two ranks and the loop in which their connection lives."""

    def __init__(self, runner: asyncio.Runner, learner: Learner, folder: Path) -> None:
        self.runner, self.learner, self.folder = runner, learner, folder
        self.pids = family(learner._process.pid)

    def run(self, work: Awaitable[Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    def call(self, command: str, **arguments: Any) -> Any:
        return self.run(self.learner.call(command, timeout_s=WAIT_S, **arguments))

    def save(self, seed: int, n: int, **info: Any) -> list[str]:
        """Stored trajectories."""
        paths = []
        for t in support.batch(seed, n):
            path = self.folder / f"{t.episode_id}.parquet"
            t.judged(t.reward or 0.0, **info).save(path)
            paths.append(str(path))
        return paths


def trainer() -> dict[str, Any]:
    return TrainerConfig(dtype="float32", micro_batch_tokens=64, optimizer=support.optimizer(lr=1e-3, clip=1.0)).model_dump()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("two")
    with asyncio.Runner() as runner:
        learner = runner.run(Learner.launch(folder / "trainer.log", ranks=2, threads=1, start_s=120.0))
        world = World(runner, learner, folder)
        assert world.call("setup", trainer=trainer()) == {"ranks": 2, "device": "cpu"}
        yield world
        assert len(world.pids) >= 3, "torchrun and two ranks"
        runner.run(learner.close())
        assert ends(world.pids)


STEP = {
    "sampling": "s",
    "number": 1,
    "version": 5,
    "critic_updates": 2,
    "update_policy": True,
    "max_length": 100,
    "seed": 0,
}


def test_a_run_of_commands(two: World, moe: Path) -> None:
    """SFT, value pre-training, steps, publishes, a checkpoint and the exported policy, on two ranks."""
    folder = two.folder
    report = two.call(
        "sft",
        start={"path": None, "fields": support.fields("qwen3_moe"), "files": str(moe)},
        paths=two.save(1, 5),
        settings=SftConfig(batch=4, epochs=2, optimizer=support.optimizer(lr=1e-3)).model_dump(),
        out=str(folder / "model"),
        seed=3,
    )
    assert report["steps"] == 2
    report = two.call(
        "pretrain_value",
        model=str(folder / "model"),
        paths=two.save(2, 12),
        settings=ValueConfig(heldout=0.3, batch=4).model_dump() | {"head_lr_mult": 1.0},
        out=str(folder / "critic"),
        seed=3,
    )
    marker = support.read_json(folder / "critic" / "critic.json")
    assert marker == report
    assert marker["policy_sha256"] == sha256(folder / "model" / "model.safetensors")
    facts = two.call(
        "init",
        model=str(folder / "model"),
        arm=support.arm(),
        critic=str(folder / "critic"),
        critic_settings=CriticConfig().model_dump(),
    )
    assert facts["policy_parameters"] == sum(p.numel() for p in build_policy(folder / "model").parameters())
    critic = build_critic(folder / "critic")
    assert facts["critic_trainable"] + facts["critic_frozen"] == sum(p.numel() for p in critic.parameters())

    probe = [1, 2, 3, 4, 5, 6]
    first = two.call("publish", path=str(folder / "v0.safetensors"), probe=probe)
    assert first["sha256"] == sha256(folder / "v0.safetensors")
    assert support.equal(read_file(folder / "v0.safetensors"), read_file(folder / "model" / "model.safetensors"))
    result = two.call("step", paths=two.save(4, 6), **STEP)
    assert result["stepped"]
    json.dumps(result, allow_nan=False)
    two.call("save", path=str(folder / "checkpoint"))
    second = two.call("publish", path=str(folder / "v1.safetensors"), probe=probe)
    assert second["sha256"] != first["sha256"]
    after = two.call("step", paths=two.save(5, 6), **STEP)
    two.call("load", path=str(folder / "checkpoint"))
    assert two.call("publish", path=str(folder / "v1b.safetensors"), probe=probe) == second
    assert two.call("step", paths=two.save(5, 6), **STEP) == after

    two.call("load", path=str(folder / "checkpoint"))
    two.call("export_policy", model=str(folder / "model"), out=str(folder / "policy"))
    assert {p.name for p in (folder / "policy").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert sha256(folder / "policy" / "model.safetensors") == second["sha256"]
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=torch.tensor([probe])).logits[0], -1)
    expected = logp[:-1].gather(1, torch.tensor(probe)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(second["probe"]), expected, atol=1e-4, rtol=0)


def test_the_users_errors_come_back_with_their_next_step(two: World, moe: Path) -> None:
    settings = CriticConfig().model_dump()
    two.call("init", model=str(moe), arm=support.arm(), critic=str(moe), critic_settings=settings)
    paths = two.save(6, 3)
    with pytest.raises(ConfigError, match="another contract") as caught:
        two.call("step", paths=paths, **(STEP | {"sampling": "other"}))
    assert caught.value.hint
    value = ValueConfig(heldout=1e-9).model_dump() | {"head_lr_mult": 1.0}
    with pytest.raises(ConfigError, match="held-out"):
        two.call("pretrain_value", model=str(moe), paths=paths, settings=value, out="x", seed=0)
    assert two.learner.idle
    assert two.call("step", paths=paths, **STEP)["stepped"], "the ranks are still together"


def test_a_crash_is_a_learner_error_with_the_log(two: World, moe: Path) -> None:
    """The last test of these ranks: all of them end."""
    with pytest.raises(LearnerError) as caught:
        two.call("step", paths=["/no/such/trajectory.parquet"], **STEP)
    assert "/no/such/trajectory.parquet" in str(caught.value) and "trainer.log" in caught.value.hint
    with pytest.raises(LearnerError):
        two.call("setup", trainer=trainer())
    assert not two.learner.idle
    assert ends(two.pids)
    assert "Traceback" in (two.folder / "trainer.log").read_text()


def endless(moe: Path, stored: Path) -> dict[str, Any]:
    """A command that takes minutes."""
    settings = SftConfig(batch=1, epochs=1_000_000).model_dump()
    start = {"path": str(moe), "files": str(moe)}
    return {"start": start, "paths": [str(stored)], "settings": settings, "out": str(stored.parent / "never"), "seed": 0}


def test_one_rank_and_an_unanswered_command(tmp_path: Path, moe: Path) -> None:
    """After a time-out the late answer must not be taken for the next command's; a close cuts a command in progress."""
    support.batch(1, 1)[0].save(tmp_path / "t.parquet")

    async def story() -> None:
        learner = await Learner.launch(tmp_path / "trainer.log", ranks=1, threads=1, start_s=120.0)
        pids = family(learner._process.pid)
        assert len(pids) >= 2
        assert (await learner.call("setup", trainer=trainer()))["ranks"] == 1
        assert learner.idle
        with pytest.raises(LearnerError, match="sft"):
            await learner.call("sft", 1.0, **endless(moe, tmp_path / "t.parquet"))
        assert not learner.idle
        with pytest.raises(LearnerError, match="earlier command"):
            await learner.call("setup", trainer=trainer())
        await learner.close()
        assert ends(pids)
        await learner.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "nonsense")
    with pytest.raises(LearnerError, match="did not start") as caught:
        asyncio.run(asyncio.wait_for(Learner.launch(tmp_path / "t.log", ranks=1, threads=1, start_s=100.0), WAIT_S))
    assert "nonsense" in str(caught.value) and "t.log" in caught.value.hint


ORPHAN = """
import asyncio, json, sys
from pathlib import Path
from harness.learner import Learner

async def main():
    learner = await Learner.launch(Path(sys.argv[1]), ranks=2, threads=1, start_s=120.0)
    await learner.call("setup", trainer=json.loads(sys.argv[2]))
    busy = asyncio.create_task(learner.call("sft", **json.loads(sys.argv[3])))
    while learner.idle:
        await asyncio.sleep(0)
    print(learner._process.pid, flush=True)
    await busy

asyncio.run(main())
"""


def test_no_rank_outlives_a_killed_parent(tmp_path: Path, moe: Path) -> None:
    """In the middle of a command: a resumed run must not meet the ranks of the dead one."""
    support.batch(1, 1)[0].save(tmp_path / "t.parquet")
    arguments = [str(tmp_path / "t.log"), json.dumps(trainer()), json.dumps(endless(moe, tmp_path / "t.parquet"))]
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = family(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    assert len(pids) >= 3, "torchrun and two ranks"
    assert ends(pids)
