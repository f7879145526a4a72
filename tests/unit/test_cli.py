"""The command line: every mistake a user can make is one `error:` line and one `hint:` line, exit code 2, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from environments.toy_repair import tokenizer
from harness.configfile import load_config
from harness.ledger import Ledger, Slot
from harness.rundir import RunDir
from tests.support import episode

ROOT = Path(__file__).parents[2]
SAO = [sys.executable, "-c", "import sys; sys.argv[0] = 'sao'; from harness.cli import main; main()"]


def sao(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SAO, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    said = done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    lines = said.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, said
    assert sum(line.startswith("hint: ") for line in lines) == 1, said
    for word in words:
        assert word in said


def write_config(folder: Path) -> Path:
    """A valid file beside a model folder whose weights are empty: good enough until an engine starts."""
    tokenizer.write(folder / "model")
    for name in ("config.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    plugins = {"environment": "toy_repair", "sandbox": "memory", "agent": "tool_loop"}
    tables = "".join(f'[{kind}]\nid = "{name}"\n' for kind, name in plugins.items())
    path = folder / "c.toml"
    path.write_text(f'[model]\npath = "{folder / "model"}"\n{tables}')
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def run(config: Path) -> Path:
    """A stopped run's folder."""
    made = RunDir.create(load_config(config, [f"run_dir='{config.parent / 'runs'}'"]), "train")
    ledger = Ledger(made.path)
    for draw, name in enumerate("ab", 1):
        ledger.dispatch(name, "train", "t", Slot(draw, 0), 0)
    ledger.complete(episode("a"), 0, "pending")
    ledger.drop("b", None, "too stale")
    ledger.close()
    made.close()
    return made.path


BAD_INPUT = [
    (["train"], ["no configuration"]),
    (["train", "none.toml"], ["none.toml", "neither a file nor a preset"]),
    (["train", "."], ["directory"]),
    (["train", "c.toml", "step=3"], ["`step`", "`steps`"]),
    (["train", "c.toml", "rollout.concurency=3"], ["`rollout.concurency`", "`concurrency`"]),
    (["train", "c.toml", "environment.sed=3"], ["`environment.sed`", "`seed`"]),
    (["train", "c.toml", "steps=many"], ["`steps`", "'many'"]),
    (["train", "c.toml", "steps"], ["'steps'", "neither a file nor a preset"]),
    (["train", "c.toml", "=3"], ["key=value"]),
    (["train", "c.toml", "sao_resoning"], ["`sao_reasoning`"]),
    (["train", "c.toml", "grpo", "algorithm.group=1"], ["`algorithm.group` is 1", "algorithm.group=8"]),
    (["train", "c.toml", "model.path=gone"], ["`model.path`", "config.json"]),
    (["train", "c.toml", "environment.id=toy_repare"], ["toy_repare", "toy_repair"]),
    (["train", "c.toml", "environment.id=no.such:Env"], ["no.such"]),
    (["train", "c.toml", "environment.id=':Env'"], [":Env"]),
    (["train", "c.toml", "--dry-run", "rollout.eta=-1"], ["`rollout.eta`"]),
    (["train", "c.toml", "run_dir=c.toml"], ["run folder", "run_dir"]),
    (["train", "--resume", "gone"], ["gone is not a run folder"]),
    (["train", "--resume", "."], ["is not a run folder"]),
    (["train", "c.toml", "--resume", "gone"], ["--resume"]),
    (["sft", "c.toml"], ["[sft]"]),
    (["pretrain-value", "c.toml"], ["[value]"]),
    (["status", "gone"], ["is not a run folder"]),
    (["engine"], ["no configuration"]),
    (["engine", "c.toml"], ["`engine.id` = 'torch'", "engine.id=vllm"]),
    (["engine", "c.toml", "engine.id=vllm", "engine.url=http://127.0.0.1:9"], ["`engine.url`", "drop"]),
    (["engine", "c.toml", "engine.id=vllm", "engine.vllm.server.python=gone"], ["interpreter gone", "make setup-vllm"]),
    (["engine", "c.toml", "engine.id=vllm", "engine.vllm.server.host=0.0.0.0"], ["`engine.vllm.server.host`", "private"]),
    (["engine", "c.toml", "engine.id=vllm", "engine.vllm.server.host=8.8.8.8"], ["`engine.vllm.server.host`", "private"]),
    (["engine", "c.toml", "engine.id=vllm", "engine.vllm.server.host=node7"], ["`engine.vllm.server.host`"]),
    (["doctor", "--engine", "none.toml"], ["none.toml", "neither a file nor a preset"]),
]
BAD_USAGE = [
    [],
    ["trian"],
    ["train", "--dryrun"],
    ["train", "c.toml", "--dryrun", "a=b"],
    ["status"],
    ["train", "--resume"],
    ["status", "a", "b=c"],
    ["doctor", "c.toml"],
    ["doctor", "--engine"],
]

EACH = """
import json, os, sys, traceback
from harness.cli import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"said.{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["sao", *arguments]
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """What `sao` says to each of the bad lines: a process each, forked from one that has imported the command."""
    folder = tmp_path_factory.mktemp("bad")
    write_config(folder)
    lines = [*(arguments for arguments, _ in BAD_INPUT), *BAD_USAGE]
    command = [sys.executable, "-c", EACH, json.dumps(lines)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)
    texts = [[(folder / f"said.{i}.{stream}").read_text() for stream in (1, 2)] for i in range(len(lines))]
    codes = map(int, done.stdout.split())
    return {
        json.dumps(line): subprocess.CompletedProcess(line, code, *text)
        for line, code, text in zip(lines, codes, texts, strict=True)
    }


Said = dict[str, "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT, ids=lambda value: " ".join(value))
def test_bad_input(said: Said, arguments: list[str], words: list[str]) -> None:
    refused(said[json.dumps(arguments)], *words)


@pytest.mark.parametrize("arguments", BAD_USAGE, ids=lambda value: " ".join(value))
def test_bad_usage_is_explained(said: Said, arguments: list[str]) -> None:
    done = said[json.dumps(arguments)]
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "usage: " in done.stderr
    assert "Traceback" not in done.stderr


def test_docker_that_is_not_there(config: Path) -> None:
    done = sao("train", config, "sandbox.id=docker", folder=config.parent, DOCKER_HOST="unix:///nowhere/docker.sock")
    refused(done, "ocker")


def test_a_dry_run_prints_the_resolved_configuration_and_starts_nothing(config: Path) -> None:
    done = sao("train", config, "--dry-run", "steps=3", folder=config.parent)
    assert done.returncode == 0, done.stderr
    again = config.parent / "again.toml"
    again.write_text(done.stdout)
    assert load_config(again) == load_config(config, ["steps=3"])
    assert not (config.parent / "runs").exists()


def test_overrides_may_stand_on_both_sides_of_a_flag(config: Path) -> None:
    done = sao("train", "--dry-run", config, "steps=3", "seed=4", folder=config.parent)
    assert done.returncode == 0
    assert "steps = 3\n" in done.stdout
    done = sao("train", config, "seed=4", "--dry-run", "steps=3", folder=config.parent)
    assert done.returncode == 0, done.stderr
    assert "steps = 3\n" in done.stdout
    assert "seed = 4\n" in done.stdout


def test_status(run: Path) -> None:
    done = sao("status", run, folder=run.parent)
    assert done.returncode == 0
    assert '"pending": 1' in done.stdout
    assert "too stale" in done.stdout


def test_status_of_a_torn_ledger(run: Path) -> None:
    (run / "ledger.sqlite").write_bytes(b"garbage " * 100)
    for extra in run.glob("ledger.sqlite-*"):
        extra.unlink()
    refused(sao("status", run, folder=run.parent), "ledger.sqlite")


def test_a_run_in_use_is_not_resumed(run: Path) -> None:
    held, _ = RunDir.resume(run)
    try:
        refused(sao("train", "--resume", run, folder=run.parent), "in use")
    finally:
        held.close()


def test_a_run_is_resumed_from_any_folder(run: Path, tmp_path: Path) -> None:
    """The saved configuration is resolved: it must not depend on where the command is given."""
    config = tmp_path / "relative.toml"
    config.write_text((tmp_path / "c.toml").read_text().replace(str(tmp_path / "model"), "model"))
    done = sao("train", config, "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = tmp_path / "saved.toml"
    saved.write_text(done.stdout)
    (tmp_path / "elsewhere").mkdir()
    done = sao("train", saved, "--dry-run", folder=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr


def test_a_foreign_package_under_one_of_our_names_is_named(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").touch()
    done = sao("status", "x", folder=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    refused(done, "`agents`", str(tmp_path))


def test_version(tmp_path: Path) -> None:
    done = sao("--version", folder=tmp_path)
    assert (done.returncode, done.stdout.count(".")) == (0, 2)
