"""FSDP2 over torchrun ranks, also with one rank: shard a model, count globally, move commands from rank 0 to all.

gloo on CPU, NCCL on GPU. Losses are divided by global counts and multiplied by the world size, because FSDP averages gradients.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

IDLE = timedelta(days=7)
"""Ranks wait for the next command inside a collective, for as long as a batch takes to fill. A dead rank ends all by
torchrun.
"""


def start(threads: int) -> None:
    """Join the process group that torchrun describes."""
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=IDLE)
    else:
        dist.init_process_group("gloo", timeout=IDLE)


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def shard(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Shard each decoder layer and the root over all ranks, in place; fp32 master weights, `dtype` compute, fp32 reduction.

    A scalar value head stays fp32. Freeze parameters before or after; build the optimizer after.
    """
    model.to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module:
            for layer in module:
                fully_shard(layer, mesh=mesh, mp_policy=mixed)
            break
    head = getattr(model, "v_head", None)
    if head is not None and dtype != torch.float32:
        fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32))
    # By default the root keeps its compute copies after a forward; one without backward would then export those.
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    return model


def total(value: float) -> float:
    """Sum over all ranks, float64."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(tensor)
    return float(tensor.item())


def broadcast(value: Any) -> Any:
    """Rank 0's object on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]
