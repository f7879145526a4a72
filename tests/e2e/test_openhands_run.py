"""`sao train` with OpenHands, as a user runs it: real samples of a tiny policy, real tools, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.configfile import load_config
from harness.protocols import LiveTask, Sandbox, Tool
from harness.task import Score, Split, Task
from harness.trajectory import Trajectory
from tests.agents.expert import SLIM, write_sampler
from tests.contracts.sandbox_support import processes_of
from tests.e2e.support import ROOT, Training, all_gone, assert_closed, book, metrics, sandboxes_left, sao
from tests.support import NoConfig

pytestmark = pytest.mark.timeout(600)
STEPS, BATCH, TURNS = 2, 2, 4
LISTEN = "SAO_TEST_LISTEN"


class Said:
    """Tasks whose verdict is in a file that the policy's commands append to: 1 if anything was said."""

    Config = NoConfig

    def __init__(self, config: NoConfig) -> None:
        pass

    def tasks(self, split: Split) -> Sequence[Task]:
        """Eight, all alike."""
        return [Task(f"{split}/{i}", ({"role": "user", "content": f"Say something ({i})."},)) for i in range(8)]

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """An empty folder; where a test listens, the file is its pipe."""
        if (pipe := os.environ.get(LISTEN)) is not None:
            await sandbox.exec(f"ln -s {shlex.quote(pipe)} said", timeout_s=60)
        return SaidTask(sandbox)


class SaidTask:
    """One of them."""

    tools: Sequence[Tool] = ()

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def score(self) -> Score:
        """Look at the file."""
        looked = await self._sandbox.exec("cat said 2>/dev/null | tr -d '\\n'", timeout_s=60)
        return Score(float(bool(looked.output)), info={"said": looked.output})


CONFIG = """\
seed = 3
steps = {steps}
run_dir = "{folder}/runs"
alarms = "warn"

[model]
path = "{folder}/model"

[environment]
id = "tests.e2e.test_openhands_run:Said"

[agent]
id = "openhands"
system_prompt = "{slim}"
stuck_detection = false

[sandbox]
id = "process"

[limits]
max_turns = {turns}
max_context = 16384
max_tokens_per_turn = 64
wall_s = 300.0

[engine]
max_batch = 4

[rollout]
concurrency = 2
eta = 1.0

[algorithm]
batch = {batch}

[critic]
policy_freeze_steps = 0
updates = 1

[trainer]
dtype = "float32"
micro_batch_tokens = 8192
optimizer = {{ lr = 1e-4, weight_decay = 0.0 }}

[eval]
tasks = 0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the model."""
    folder = tmp_path_factory.mktemp("openhands")
    write_sampler(folder / "model", seed=0)
    return folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A temp folder of the test's own, for the run and everything that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    monkeypatch.undo()
    tempfile.tempdir = None


def config(folder: Path, steps: int = STEPS, turns: int = TURNS) -> str:
    """A file as a user writes it."""
    path = folder / f"config-{steps}-{turns}.toml"
    path.write_text(CONFIG.format(folder=folder, steps=steps, turns=turns, batch=BATCH, slim=SLIM))
    return str(path)


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    model = write_sampler(tmp_path, seed=0, steps=0, positions=131_072)
    loaded = load_config([ROOT / "configs/openhands-swe.toml", f"model.path={model}", "environment.dataset=rows.jsonl"])
    assert (loaded.agent.id, loaded.sandbox.id, loaded.environment.id) == ("openhands", "docker", "swe")
    assert (loaded.limits.max_turns, loaded.limits.max_context) == (300, 131_072)
    assert loaded.value is not None and loaded.critic is not None


def left(temporary: Path) -> list[str]:
    """Folders of workers and sandboxes, and processes that were started with this temp folder."""
    return [p.name for p in temporary.glob("sao-*")] + [str(pid) for pid in processes_of(f"TMPDIR={temporary}")]


def test_a_run_with_openhands(model: Path, temporary: Path) -> None:
    done = sao("train", config(model))
    assert done.returncode == 0, done.stderr
    run = Path(done.stdout.strip().splitlines()[-1].removeprefix("run: "))
    assert "agent worker" in done.stderr
    assert_closed(run, STEPS, BATCH)
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert metrics(run)[0]["mismatch/abs_logp_diff"] < 1e-4, "engine and trainer agree before the first update"
    stored = [Trajectory.load(path) for path in sorted((run / "trajectories").glob("*.parquet"))]
    assert len(stored) >= STEPS * BATCH
    for t in stored:
        assert (t.info["termination"], t.n_turns) == ("max_turns", TURNS)
        assert t.reward == float(bool(t.info["said"]))
    assert any(t.reward for t in stored)
    proved = sao("verify", str(run), "--json")
    assert proved.returncode == 0, proved.stdout + proved.stderr
    assert {check["state"] for check in json.loads(proved.stdout)["checks"]} == {"ok"}
    assert left(temporary) == sandboxes_left(run) == []


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Our end of the pipe into which the policy's commands speak; they wait until somebody reads."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv(LISTEN, str(path))
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield end
    os.close(end)


@pytest.fixture
def long(model: Path, temporary: Path, pipe: int) -> Iterator[Training]:
    """A run whose episodes take long."""
    job = Training(config(model, turns=10_000))
    yield job
    if job.process.poll() is None:
        job.process.kill()
        job.process.wait(30.0)


def test_ctrl_c_during_an_episode(long: Training, pipe: int, temporary: Path) -> None:
    long.until("run: ")
    ready, _, _ = select.select([pipe], [], [], 240.0)
    assert ready, "no command of the policy has run"
    assert os.read(pipe, 100).strip()
    children = long.children()
    workers = processes_of(f"TMPDIR={temporary}/sao-worker-")
    assert len(workers) == 1
    assert set(workers) <= set(children)
    code, seconds = long.stop(signal.SIGINT)
    assert code == 130, long.lines
    assert seconds < 30.0
    assert "Traceback" not in "".join(long.lines)
    assert all_gone(children, 1.0) == []
    assert left(temporary) == sandboxes_left(long.run) == []
    assert book(long.run, "SELECT COUNT(*) FROM episodes WHERE status = 'running'") == [(0,)]
    assert sao("verify", str(long.run)).returncode == 0
