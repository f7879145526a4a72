"""Trainer checkpoints: models, optimizers, counters and the estimator's memory with torch's distributed checkpoint, resumable
on another rank count.

Flows in: the learners. Flows out: a folder that appears whole or not at all. What waits in the ledger is not here: the ledger
records which batch a checkpoint covers.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from trainer.estimate import Memory
from trainer.optimizer import Optimizer
from trainer.step import Learners

MEMORY = "memory.json"
"""The estimator's memory, the same on every rank."""


def _state(learners: Learners) -> dict[str, Any]:
    return {
        name: {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer.adamw),
            "steps": optimizer.steps,
        }
        for name, model, optimizer in _models(learners)
    }


def _models(learners: Learners) -> list[tuple[str, nn.Module, Optimizer]]:
    models: list[tuple[str, nn.Module, Optimizer]] = [("policy", learners.policy, learners.policy_optimizer)]
    if learners.critic is not None and learners.critic_optimizer is not None:
        models.append(("critic", learners.critic, learners.critic_optimizer))
    return models


def save(learners: Learners, folder: Path) -> None:
    """Write atomically. A collective."""
    part = folder.with_name(folder.name + ".part")
    if dist.get_rank() == 0 and part.exists():
        shutil.rmtree(part)
    dist.barrier()
    write_state(_state(learners), checkpoint_id=part)
    dist.barrier()
    if dist.get_rank() == 0:
        (part / MEMORY).write_text(json.dumps(asdict(learners.memory)))
        os.replace(part, folder)
    _forget_empty(learners)


def load(learners: Learners, folder: Path) -> None:
    """Restore in place. A collective."""
    state = _state(learners)
    read_state(state, checkpoint_id=folder)
    for name, model, optimizer in _models(learners):
        entry = state[name]
        set_state_dict(model, optimizer.adamw, model_state_dict=entry["model"], optim_state_dict=entry["optimizer"])
        optimizer.steps = entry["steps"]
    learners.memory = Memory(**json.loads((folder / MEMORY).read_text()))
    _forget_empty(learners)


def _forget_empty(learners: Learners) -> None:
    """Torch invents one step of AdamW state for an optimizer without any; it would spoil the first real bias correction."""
    for _, _, optimizer in _models(learners):
        if optimizer.steps == 0:
            optimizer.adamw.state.clear()
