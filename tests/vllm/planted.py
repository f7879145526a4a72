"""Worker extension of the tests, in vLLM's interpreter: plants faults in the plug-in, over `/collective_rpc`."""

import os
import signal
import time
from contextlib import nullcontext
from itertools import islice
from typing import Any

import sao_meeting
import sao_vllm

FIXES = {"tied": ("pack_tied_head", lambda model: None), "moe": ("packed_experts", nullcontext)}
REAL = {name: getattr(sao_vllm, name) for name, _ in FIXES.values()}


class Planted(sao_vllm.WorkerExtension):
    """The plug-in's extension, and switches."""

    def without_fix(self, fix: str | None) -> None:
        """Take away one fix, or (None) put all back."""
        for name, function in REAL.items():
            setattr(sao_vllm, name, function)
        if fix is not None:
            name, nothing = FIXES[fix]
            setattr(sao_vllm, name, nothing)

    def break_next_load(self, after: int, times: int = 1) -> None:
        """Let the next load, or so many, fail when so many tensors have come."""
        model = self.weight_transfer_engine.model  # type: ignore[attr-defined] # the worker's
        load, left = model.load_weights, times

        def broken(weights: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                del model.load_weights
            load(islice(weights, after))
            raise RuntimeError("planted: the load broke off")

        model.load_weights = broken

    def break_next_broadcast(self, after: int) -> None:
        """Let this worker fall out of the next broadcast when so many tensors have come."""
        broadcast, left = sao_meeting.Group.broadcast, iter(range(after))

        def broken(group: Any, tensor: Any, limit_s: float) -> None:
            if next(left, None) is None:
                sao_meeting.Group.broadcast = broadcast  # type: ignore[method-assign]
                raise RuntimeError("planted: the receiver fell out")
            broadcast(group, tensor, limit_s)

        sao_meeting.Group.broadcast = broken  # type: ignore[method-assign]

    def run_model(self) -> None:
        """Call the model without arguments."""
        self.weight_transfer_engine.model()  # type: ignore[attr-defined] # the worker's

    def die_in_next_load(self, after: int) -> None:
        """Be killed in the middle of the next load, when so many tensors have come."""
        model = self.weight_transfer_engine.model  # type: ignore[attr-defined] # the worker's
        load = model.load_weights

        def deadly(weights: Any) -> None:
            load(islice(weights, after))
            os.kill(os.getpid(), signal.SIGKILL)

        model.load_weights = deadly

    def pace(self, step_s: float) -> None:
        """Let a step take this much longer, as a larger model's would; 0 for as fast as it can."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined] # the worker's
        if (hook := getattr(engine, "pace", None)) is not None:
            hook.remove()
        engine.pace = engine.model.register_forward_pre_hook(lambda *_: time.sleep(step_s)) if step_s > 0 else None
