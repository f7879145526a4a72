"""Weights by their public names: out of a (sharded) model, into a model, to and from files.

Experts leave as `experts.E.{gate,up,down}_proj.weight`, the names every engine and every transformers version reads; inside the
model they are fused. Files are safetensors with a sha256 beside the name, written atomically.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.errors import ConfigError
from harness.modelfolder import weight_files

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def export(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every parameter. A collective: every rank must iterate, in step."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        tensor = parameter.detach().to(dtype)
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        base, _, last = name.rpartition(".")
        if base.endswith(".experts") and last == "gate_up_proj":
            half = full.shape[1] // 2
            for expert in range(full.shape[0]):
                yield f"{base}.{expert}.gate_proj.weight", full[expert, :half]
                yield f"{base}.{expert}.up_proj.weight", full[expert, half:]
        elif base.endswith(".experts") and last == "down_proj":
            for expert in range(full.shape[0]):
                yield f"{base}.{expert}.down_proj.weight", full[expert]
        else:
            yield name, full


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy named tensors into an unsharded model in place. Raises `ConfigError` unless every parameter is covered exactly."""
    parameters = dict(model.named_parameters(remove_duplicate=True))
    elements = {name: 0 for name in parameters}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        fused = parameters.get(f"{match[1]}.down_proj") if match else None
        if match and fused is not None and (expert := int(match[2])) < len(fused):
            target = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
            view = parameters[target][expert]
            if match[3] != "down":
                half = view.shape[0] // 2
                view = view[:half] if match[3] == "gate" else view[half:]
        elif name in parameters:
            target, view = name, parameters[name]
        elif name.endswith("lm_head.weight"):
            continue  # tied to the embedding
        else:
            raise ConfigError(f"the checkpoint has `{name}`, which this model lacks", hint="check config.json")
        if view.shape != tensor.shape:
            raise ConfigError(
                f"`{name}` has shape {tuple(tensor.shape)}, the model {tuple(view.shape)}", hint="check config.json"
            )
        view.copy_(tensor)
        elements[target] += tensor.numel()
    missing = [name for name, n in elements.items() if n != parameters[name].numel()]
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[:3]} and {len(missing[3:])} more", hint="check model.path")


def read_file(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file; with `digest`, refuses a file whose sha256 differs."""
    if digest is not None and (found := sha256(path)) != digest:
        raise ConfigError(f"{path}: sha256 is {found[:12]}, not {digest[:12]}", hint="the file is damaged or not complete")
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def load_folder(model: nn.Module, folder: Path, prefix: str = "") -> None:
    """Load all of a folder's weights; with `prefix`, only the names below it, without it."""
    tensors = {name: tensor for path in weight_files(folder) for name, tensor in read_file(path).items()}
    load_tensors(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})


def write_file(tensors: dict[str, Tensor], path: Path) -> str:
    """Write atomically, readable by whoever may read the folder (an engine may be another user's); the file's sha256."""
    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(part), metadata={"format": "pt"})
    part.chmod(path.parent.stat().st_mode & 0o666)
    os.replace(part, path)
    return sha256(path)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
