"""`engine.id = "vllm"` in the configuration: what it takes, and what it refuses with the field and the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.configfile import load_config
from harness.engines.vllm_launch import VllmServer
from harness.errors import ConfigError

ROOT = Path(__file__).parents[2]


def resolved(*words: str) -> Any:
    return load_config(ROOT / "configs/quickstart.toml", list(words)).engine


def test_vllm_has_its_options_also_without_a_table() -> None:
    engine = resolved("engine.id=vllm")
    assert (engine.vllm.replicas, engine.vllm.kv, engine.vllm.server) == (1, "keep", {})
    engine = resolved("engine.id=vllm", "engine.vllm.replicas=2", "engine.vllm.server.dtype=bfloat16")
    assert (engine.vllm.replicas, engine.vllm.server) == (2, {"dtype": "bfloat16"})
    assert resolved().vllm is None


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["engine.vllm.replicas=2"], "`engine.vllm` is given", "engine.id=vllm"),
        (["engine.id=vllm", "engine.threads=2"], "`engine.threads`", "drop it"),
        (["engine.id=vlm"], "engine.id", ""),
        (["engine.id=vllm", "engine.vllm.server.dtpye=float32"], "engine.vllm.server.dtpye", "dtype"),
        (["engine.id=vllm", "engine.vllm.replica=2"], "engine.vllm.replica", "replicas"),
    ],
)
def test_what_cannot_be_honoured_is_refused(words: list[str], says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*words)
    assert says in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("field", ["sleep_mode", "routed_experts"])
def test_what_only_cuda_does_is_refused_on_cpus(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    options: dict[str, Any] = {"python": Path(__file__), "model": tmp_path, field: True}
    with pytest.raises(ConfigError, match=f"{field} needs CUDA"):
        VllmServer(**options).check()
    cuda = VllmServer(**options, platform="cuda", data_parallel=2)
    cuda.check()
    words = " ".join(cuda.command(80))
    assert {"sleep_mode": "--enable-sleep-mode", "routed_experts": "--enable-return-routed-experts"}[field] in words
    assert "--data-parallel-size 2" in words


def test_a_missing_interpreter_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interpreter") as caught:
        VllmServer(python=tmp_path / "python", model=tmp_path).check()
    assert "make setup-vllm" in caught.value.hint
