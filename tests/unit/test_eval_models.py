"""Who can be asked: runs, checkpoints, model folders, endpoints; everything else is one clear error."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import save

from evals import models
from evals.models import find_model
from harness.configfile import dump_config, load_config
from harness.errors import ConfigError, LearnerError

ROOT = Path(__file__).parents[2]
WARM = ROOT / "configs" / "corridor-warm"


def run_folder(folder: Path, *words: str) -> Path:
    """As `sao train` leaves it at its start."""
    folder.mkdir()
    (folder / "checkpoints").mkdir()
    (folder / "config.toml").write_text(dump_config(load_config(["configs/corridor.toml", f"model.path={WARM}", *words])))
    (folder / "ledger.sqlite").touch()
    return folder


def stored(data: bytes) -> bytes:
    """A file of weights."""
    return save({"w": np.frombuffer(data, np.uint8)})


def weights(folder: Path, data: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(stored(data))
    return folder


def checkpoint(run: Path, name: str) -> Path:
    (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / name / ".metadata").touch()
    return run / "checkpoints" / name


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is exported, instead of exporting it."""
    calls: list[list[str]] = []

    def export(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        (Path(command[-1]) / "config.json").write_text("{}")
        (Path(command[-1]) / "model.safetensors").write_bytes(stored(Path(command[-3]).name.encode()))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", export)
    return calls


# --- endpoints and folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://localhost:8000/v1", "https://example.org/v1"])
def test_an_endpoint(url: str) -> None:
    model = find_model(f"{url}#Qwen/Qwen3#a")
    assert model.endpoint == model.identity == {"url": url, "model": "Qwen/Qwen3#a"}
    assert model.layers == {}


@pytest.mark.parametrize("cut", [0, 4, 60])
def test_weights_that_are_cut_off(tmp_path: Path, cut: int) -> None:
    file = weights(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged") as caught:
        find_model(str(tmp_path / "m"))
    assert caught.value.hint


@pytest.mark.parametrize("word", ["http://localhost/v1", "http://localhost/v1#"])
def test_an_endpoint_without_a_name(word: str) -> None:
    with pytest.raises(ConfigError, match="names no model") as caught:
        find_model(word)
    assert "http://localhost/v1#NAME" in caught.value.hint


def test_a_model_folder_is_known_by_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = find_model("model")
    assert model.layers == {"model": {"path": str(folder)}} and model.endpoint is None
    assert model.identity == {"sha256": hashlib.sha256(stored(b"weights")).hexdigest()}
    (folder / "model.safetensors").write_bytes(stored(b"others"))
    assert find_model("model").identity != model.identity


# --- runs and checkpoints --------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_is_its_final_policy(tmp_path: Path, exports: list[list[str]]) -> None:
    run = run_folder(
        tmp_path / "run", "rollout.tool_calls=glm", "agent.id=tool_loop", "agent.nudge=go on", "trainer.dtype=bfloat16"
    )
    final = weights(run / "policy")
    checkpoint(run, "batch-000010-1")
    model = find_model(str(run))
    assert not exports
    assert model.layers["model"] == {"path": str(final), "stop": ["<eos>"]}, "it talks as it was trained to"
    assert model.layers["rollout"] == {"tool_calls": "glm"} and model.layers["trainer"] == {"dtype": "bfloat16"}
    assert model.layers["agent"] == {"id": "tool_loop", "nudge": "go on"}
    assert model.identity == {"sha256": hashlib.sha256(stored(b"weights")).hexdigest()}


def test_a_run_under_way_is_its_newest_whole_checkpoint(tmp_path: Path, exports: list[list[str]]) -> None:
    run = run_folder(tmp_path / "run")
    for name in ("batch-000010-1", "batch-000020-2", "batch-000030-2.part"):
        checkpoint(run, name)
    (run / "checkpoints" / "batch-000040-2").mkdir()  # without what is written last
    model = find_model(str(run))
    assert model.layers["model"]["path"] == str(run / "exported" / "batch-000020-2")
    assert model.identity == {"sha256": hashlib.sha256(stored(b"batch-000020-2")).hexdigest()}
    assert [Path(words[-3]).name for words in exports] == ["batch-000020-2"]
    assert exports[0][-2] == str(WARM), "config and tokenizer are those of the start"


def test_a_checkpoint_is_exported_once(tmp_path: Path, exports: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    weights(run / "policy")
    place = checkpoint(run, "batch-000010-1")
    first = find_model(str(place))
    monkeypatch.chdir(place.parent)
    second = find_model(place.name)
    assert (first.layers, first.identity) == (second.layers, second.identity) and len(exports) == 1
    assert os.listdir(run / "exported") == [place.name], "nothing half is left"


def test_a_run_that_began_with_a_warm_start_has_its_model_itself(tmp_path: Path, exports: list[list[str]]) -> None:
    run = run_folder(tmp_path / "run")
    text = (run / "config.toml").read_text().replace(f'path = "{WARM}"\n', "")
    (run / "config.toml").write_text(text)
    checkpoint(run, "batch-000010-1")
    find_model(str(run))
    assert exports[0][-2] == str(run / "model")


def test_a_real_checkpoint(tmp_path: Path) -> None:
    """Through the process that exports it: the weights that the trainer had, in a folder that an engine can load."""
    from tests.trainer import support
    from trainer.checkpoint import save
    from trainer.weights import read_file

    start = support.write_model(tmp_path / "start", support.policy())
    run = run_folder(tmp_path / "run", f"model.path={start}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        learners = support.learners(start)
        support.step(learners, support.batch(1))
        save(learners, run / "checkpoints" / "batch-000001-1")
        trained = {name: support.whole(p) for name, p in support.export(learners.policy.model)}
    finally:
        dist.destroy_process_group()
    folder = Path(find_model(str(run)).layers["model"]["path"])
    assert support.equal(read_file(folder / "model.safetensors"), trained)
    assert not support.equal(read_file(start / "model.safetensors"), trained)
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json", "chat_template.jinja"}


# --- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["", "nowhere", "configs", "configs/corridor.toml", "ftp://x/v1#m"])
def test_no_model(word: str) -> None:
    with pytest.raises(ConfigError, match="is no model") as caught:
        find_model(word)
    assert "#NAME" in caught.value.hint and "checkpoints/" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("x = ", "cannot be read"), ("seed = 1", "cannot be read"), ("model = 5", "cannot be read")],
)
def test_a_run_whose_configuration_is_lost(tmp_path: Path, text: str | None, message: str) -> None:
    run = run_folder(tmp_path / "run")
    (run / "config.toml").unlink()
    if text is not None:
        (run / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_model(str(run))


def test_a_run_that_has_not_come_to_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a final policy nor a checkpoint") as caught:
        find_model(str(run_folder(tmp_path / "run")))
    assert caught.value.hint


def test_a_checkpoint_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    place = checkpoint(run, "batch-000010-1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LearnerError, match="cannot be exported") as caught:
        find_model(str(place))
    assert "whole checkpoint" in caught.value.hint
    assert os.listdir(run / "exported") == []


def test_an_export_that_takes_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    place = checkpoint(run, "batch-000010-1")

    def never(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(models.subprocess, "run", never)
    with pytest.raises(LearnerError, match="cannot be exported"):
        find_model(str(place))


def test_two_that_export_at_once_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    place = checkpoint(run, "batch-000010-1")

    def overtaken(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        weights(run / "exported" / place.name, b"the other's")
        weights(Path(command[-1]) / "x", b"ours")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", overtaken)
    assert find_model(str(place)).identity == {"sha256": hashlib.sha256(stored(b"the other's")).hexdigest()}
    assert os.listdir(run / "exported") == [place.name]
