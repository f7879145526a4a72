"""The trainer's rank 0 sends a published policy to the workers of one server: over gloo, or NCCL (not run here: no GPU).

Flows in: tensors by their public names; a meeting that the server was told of. Flows out: the bytes in an announced order, or a
`BroadcastError` within the limits; the snapshot stays as it was and can be sent again. Each server is a group of its own: one
that dies breaks nobody else's update. Its side is `harness/engines/vllm_plugin/sao_vllm.py`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not exported

from harness.engines.vllm_plugin.sao_meeting import Group

STORE_LIMIT = timedelta(seconds=30)


class BroadcastError(Exception):
    """A server has not got all of it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy as published: contiguous CPU tensors that nobody changes, and the sha256 (hex) over their bytes in order."""

    tensors: dict[str, Tensor]
    sha256: str

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Snapshot:
        """Of tensors that are copies already."""
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        digest = hashlib.sha256()
        for tensor in whole.values():
            digest.update(tensor.view(-1).view(torch.uint8).numpy())
        return cls(whole, digest.hexdigest())

    def announced(self) -> dict[str, Any]:
        """What a server must know before it comes."""
        return {
            "names": list(self.tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "sha256": self.sha256,
        }


class Door:
    """Where servers' workers come to: a store that listens on one address of this machine and on no other."""

    def __init__(self, address: str) -> None:
        listening = socket.create_server((address, 0))
        self.address, self.port = address, int(listening.getsockname()[1])
        self._store = TCPStore(
            address, self.port, None, True, STORE_LIMIT, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def send(self, snapshot: Snapshot, meeting: str, world: int, backend: str, step_s: float, whole_s: float) -> None:
        """Wait for the `world - 1` workers of `meeting`, a name used once, and send them all tensors.

        Coming and each tensor may take `step_s`, all tensors `whole_s`. Raises `BroadcastError`.
        """
        try:
            group = Group(self._store, meeting, 0, world, backend, self.address, step_s)
        except RuntimeError as error:
            raise BroadcastError(f"the server's workers did not come: {_short(error)}") from error
        end, sent = time.monotonic() + whole_s, 0
        try:
            with group:
                for tensor in snapshot.tensors.values():
                    group.broadcast(tensor.to(group.device), min(step_s, end - time.monotonic()))
                    sent += 1
                group.part(step_s)
        except RuntimeError as error:
            raise BroadcastError(f"it broke off after {sent} of {len(snapshot.tensors)} tensors: {_short(error)}") from error


def _short(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:200]
