"""A run on a server whose weights are slightly other than the model's is stopped by the sampling probe before it trains."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from harness.engines.embedded import EmbeddedEngine
from tests.e2e.support import ROOT, book, sao

MODEL = ROOT / "configs/quickstart-warm"
SHORT = ["grpo_dis", "algorithm.group=2", "steps=1", "eval.tasks=0"]


def slightly_other(folder: Path) -> Path:
    """The quickstart's policy, one of its norms moved by a thousandth."""
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.001
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_slightly_other_policy_stops_the_run(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(re.sub(r"\[engine\]\n.*?\n\n", "", (ROOT / "configs/quickstart.toml").read_text(), flags=re.DOTALL))
    options = {"slots": 8, "max_len": 320, "version": 0, "threads": 1, "seed": 0, "start_s": 120.0}
    with asyncio.Runner() as runner:
        other = slightly_other(tmp_path / "other")
        engine = runner.run(EmbeddedEngine.launch(other, tmp_path / "engine.log", **options))
        try:
            done = sao("train", str(config), *SHORT, f"engine.url={engine.url}", f"run_dir={tmp_path / 'runs'}")
        finally:
            runner.run(engine.close())
    assert done.returncode == 1, done.stderr
    assert "error: engine and trainer disagree on tokens that the engine has sampled" in done.stderr
    assert "weights are other" in done.stderr and "Traceback" not in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "probe.json").exists()
    assert book(run, "SELECT COUNT(*) FROM episodes") == [(0,)]
