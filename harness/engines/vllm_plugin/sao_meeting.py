"""A trainer and all workers of one server meet, and the trainer (rank 0) broadcasts tensors to them.

Both sides of a broadcast import this: `trainer/broadcast.py` in the trainer's interpreter, `sao_vllm.py` in vLLM's. torch only.
Flows in: a store that all of them reach, and each one's rank. Flows out: tensors, or a `RuntimeError` within a step's limit.
NCCL was not run here: there was no GPU.
"""

import os
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

BACKENDS = ("gloo", "nccl")
UNKILLED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""By default NCCL's watchdog ends the whole process, trainer or server, when one broadcast fails."""
WATCHDOG_S = 86_400.0
"""The watchdog's own limit; `broadcast` waits with a shorter one and gives the group up itself."""


def visit(address: str, port: int, limit_s: float) -> Store:
    """The store of a trainer that listens there."""
    return TCPStore(address, port, None, False, timedelta(seconds=limit_s), wait_for_workers=False)


class Group:
    """One rank's place in a meeting, a context manager: whoever leaves it closes its connections, so that nobody waits in vain.

    `address`: this machine's, for gloo.
    """

    def __init__(self, store: Store, meeting: str, rank: int, world: int, backend: str, address: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        self._store, self._rank, self._world = PrefixStore(meeting, store), rank, world
        self._all("here", timedelta(seconds=limit_s))
        limit = timedelta(seconds=max(0.001, end - time.monotonic()))
        self.backend = backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._group: Any = (
            _nccl(self._store, rank, world) if backend == "nccl" else _gloo(self._store, rank, world, address, limit)
        )

    def broadcast(self, tensor: torch.Tensor, limit_s: float) -> None:
        """Rank 0's tensor, contiguous and on `device`, into everybody's; done when this returns."""
        if limit_s <= 0:
            raise RuntimeError("no time is left")
        options = BroadcastOptions()
        options.timeout = limit = timedelta(seconds=limit_s)
        work = self._group.broadcast([tensor], options)
        if self.backend == "nccl":
            work.wait(limit)  # with a limit, it also waits for the device
        else:
            work.wait()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        group, self._group = self._group, None  # an error's traceback may keep `self` for long
        if self.backend == "nccl":
            group.abort()

    def part(self, limit_s: float) -> None:
        """Wait until all have everything: who closes a connection too early may cut off what is on its way."""
        self._all("done", timedelta(seconds=limit_s))

    def _all(self, word: str, limit: timedelta) -> None:
        self._store.set(f"{word}-{self._rank}", "")
        self._store.wait([f"{word}-{rank}" for rank in range(self._world)], limit)


def _gloo(store: Store, rank: int, world: int, address: str, limit: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # its stub lacks it
    options._timeout = limit
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Store, rank: int, world: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds for CPUs lack it

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WATCHDOG_S)
    with patch.dict(os.environ, UNKILLED):
        return ProcessGroupNCCL(store, rank, world, options)
