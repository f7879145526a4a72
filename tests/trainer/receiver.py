"""A server's worker of `tests/trainer/test_broadcast.py`, in a process of its own. Prints one line: what came, or what broke.

Arguments: port, meeting, rank, world, limit (s), so many tensors are taken, shapes (JSON). The test closes standard input when
this process may end.
"""

import hashlib
import json
import os
import sys

import torch

from harness.engines.vllm_plugin.sao_address import facing
from harness.engines.vllm_plugin.sao_meeting import Group, visit


def main() -> None:
    """Come, take, and stay until told to go; with fewer tensors than there are, never say that all came."""
    port, meeting, rank, world, limit_s, taken, shapes = (*sys.argv[1:6], int(sys.argv[6]), json.loads(sys.argv[7]))
    digest = hashlib.sha256()
    try:
        store = visit("127.0.0.1", int(port), float(limit_s))
        with Group(store, meeting, int(rank), int(world), "gloo", facing("127.0.0.1", int(port)), float(limit_s)) as group:
            for shape in shapes[:taken]:
                tensor = torch.empty(shape)
                group.broadcast(tensor, float(limit_s))
                digest.update(tensor.view(-1).view(torch.uint8).numpy())
            if taken < len(shapes):
                print(f"has {taken}", flush=True)
                sys.stdin.read()
                os._exit(1)
            group.part(float(limit_s))
            print(digest.hexdigest(), flush=True)
    except RuntimeError as error:
        print(f"broke: {str(error).splitlines()[0]}", flush=True)


main()
