"""Who is asked: a run, one of its checkpoints, a model folder, or whatever an OpenAI-compatible endpoint serves.

Flows in: what the user named. Flows out: a `Model`: layers of configuration, or an endpoint, and what identifies it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, LearnerError
from harness.modelfolder import weight_files, weights_digest

EXPORT_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Model:
    """Who is asked."""

    name: str
    """As the user gave it."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Configuration, below the user's."""
    endpoint: dict[str, Any] | None = None
    """Fields of `harness.endpoint.EndpointConfig`, for a model without token records."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What makes its weights known."""


def find_model(word: str) -> Model:
    """`http(s)://.../v1#NAME`, the folder of a run, of a checkpoint or of a model. Raises `ConfigError`."""
    if word.startswith(("http://", "https://")):
        url, _, name = word.partition("#")
        if not name:
            raise ConfigError(f"`--model` = {word!r} names no model", hint=f"append it, as {url}#NAME")
        return Model(word, endpoint={"url": url, "model": name}, identity={"url": url, "model": name})
    path = Path(word).resolve()
    if (path / "config.json").is_file():
        return _folder(word, path, {})
    if (path / "ledger.sqlite").is_file():
        return _of_run(word, path, None)
    if path.parent.name == "checkpoints" and (path / ".metadata").is_file():
        return _of_run(word, path.parent.parent, path)
    raise ConfigError(
        f"`--model` = {word!r} is no model",
        hint="give a run, a folder in its checkpoints/, a folder with config.json and weights, or http://HOST/v1#NAME",
    )


def _folder(word: str, path: Path, layers: dict[str, Any]) -> Model:
    model = {**layers.get("model", {}), "path": str(path.resolve())}
    _check_weights(path)
    return Model(word, {**layers, "model": model}, identity={"sha256": weights_digest(path)})


def _check_weights(path: Path) -> None:
    """Raises `ConfigError` for a file that is cut off or no safetensors at all."""
    from safetensors import SafetensorError, safe_open

    for file in weight_files(path):
        try:
            with safe_open(file, "numpy"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}", hint="copy or download it again") from error


def _of_run(word: str, run: Path, checkpoint: Path | None) -> Model:
    """Its final policy, or the one of a checkpoint; it talks as it was trained to."""
    try:
        config = tomllib.loads((run / "config.toml").read_text())
        start = Path(config["model"].get("path", run / "model"))
        layers = {
            "model": {"stop": config["model"]["stop"]},
            "rollout": {"tool_calls": config["rollout"]["tool_calls"]},
            "agent": config["agent"],
            "trainer": {"dtype": config["trainer"]["dtype"]},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run}: its configuration cannot be read: {error!r}", hint="give a run of `sao train`") from error
    final = run / "policy"
    if checkpoint is None and (final / "model.safetensors").is_file():
        return _folder(word, final, layers)
    chosen = checkpoint or _newest(run)
    return _folder(word, _exported(chosen, start), layers)


def _newest(run: Path) -> Path:
    """The last checkpoint of a run that has not ended."""
    found = (path.parent for path in (run / "checkpoints").glob("*/.metadata"))
    folders = sorted(folder for folder in found if folder.suffix != ".part")
    if not folders:
        raise ConfigError(f"{run} has neither a final policy nor a checkpoint", hint="let it train on")
    return folders[-1]


def _exported(checkpoint: Path, start: Path) -> Path:
    """The policy of a checkpoint as a model folder beside it, written once."""
    out = checkpoint.parent.parent / "exported" / checkpoint.name
    if (out / "model.safetensors").is_file():
        return out
    out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{checkpoint.name}.") as name:
        part = Path(name) / "model"
        part.mkdir()
        command = [sys.executable, "-m", "trainer.export", str(checkpoint), str(start), str(part)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LearnerError(f"{checkpoint} cannot be exported within {EXPORT_S:.0f} s", hint="is the disk slow?") from None
        if done.returncode != 0:
            raise LearnerError(f"{checkpoint} cannot be exported:\n{done.stderr[-2_000:]}", hint="is it a whole checkpoint?")
        try:
            part.rename(out)
        except OSError:
            if not (out / "model.safetensors").is_file():  # else another process was faster
                raise
    return out
