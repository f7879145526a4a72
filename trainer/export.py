"""Model folders: what any tool can load, written whole or not at all, and the policy of a checkpoint as one of them.

    python -m trainer.export CHECKPOINT MODEL OUT        # MODEL: the folder that the run started from

Flows in: tensors by their public names, or a checkpoint of any rank count. Flows out: config.json, tokenizer, template and
weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from trainer.model import build_policy
from trainer.weights import export, write_file

TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")


def save_folder(tensors: dict[str, Tensor], config: Any, out: Path, source: Path, critic: dict[str, Any] | None = None) -> None:
    """Tokenizer and template are copied from `source`; `critic`: the record of a value model."""
    out.mkdir(parents=True, exist_ok=True)
    config.to_json_file(out / "config.json", use_diff=True)
    for name in TOKENIZER_FILES:
        if (source / name).resolve() != (out / name).resolve():
            shutil.copyfile(source / name, out / name)
    if critic is not None:
        (out / "critic.json").write_text(json.dumps(critic, indent=2) + "\n")
    write_file(tensors, out / "model.safetensors")  # last: a folder with weights is whole


def export_checkpoint(checkpoint: Path, model: Path, out: Path) -> None:
    """The policy of `checkpoint` as a model folder, without starting a trainer."""
    policy = build_policy(model)
    state = {"policy": {"model": get_model_state_dict(policy)}}
    read_state(state, checkpoint_id=checkpoint, no_dist=True)
    set_model_state_dict(policy, state["policy"]["model"])
    save_folder(dict(export(policy.model)), policy.model.config, out, model)


if __name__ == "__main__":
    export_checkpoint(*map(Path, sys.argv[1:4]))
