"""Log-probs and gradients of 8,192 tokens over 49,152 words: the chunked fp32 head against full logits, log_softmax, gather.

Peak memory is the resident set's high-water mark above what stood before the call, each side in processes of its own, so that
neither hides the other; time is process CPU time on one thread, the better of two processes each, in turns. The gradients
(126 MiB) are part of both. Errors are against float64 logits of the same inputs, over the first 2,048 tokens.

    python -m benchmarks head
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer.logprobs import token_logprobs

TOKENS, WORDS, WIDTH, PROCESSES = 8_192, 49_152, 576, 2
MIB = 2**20


def main() -> None:
    """Print one JSON line."""
    runs: dict[str, list[dict[str, float]]] = {"chunked": [], "full": []}
    for name in list(runs) * PROCESSES:
        command = [sys.executable, "-m", "benchmarks.head", name]
        runs[name].append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    ours, full = ({key: min(run[key] for run in done) for key in done[0]} for done in runs.values())
    line = {"bench": "head", "value": round(ours["peak_mib"]), "unit": "MiB peak, forward and backward"}
    line |= {"ratio": round(full["peak_mib"] / ours["peak_mib"], 1), "against": "full logits, log_softmax, gather"}
    line |= {"peak_mib": round(ours["peak_mib"]), "full_peak_mib": round(full["peak_mib"])}
    line |= {"logits_mib": TOKENS * WORDS * 4 // MIB, "cpu_s": round(ours["cpu_s"], 2), "full_cpu_s": round(full["cpu_s"], 2)}
    line |= {"time_ratio": round(ours["cpu_s"] / full["cpu_s"], 2)}
    line |= {f"max_error_{str(dtype)[6:]}": max_error(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(json.dumps(line))


def inputs(dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and head weights, both with gradient, and labels; logits have unit variance."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=rng).to(dtype).requires_grad_()
    head = torch.randn(WORDS, WIDTH, generator=rng).mul_(WIDTH**-0.5).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, WORDS, (tokens,), generator=rng)


def full_logprobs(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """What most trainers do, [N] fp32."""
    return (hidden @ head.t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def max_error(dtype: torch.dtype, chunk: int = 512) -> float:
    """The largest error of a log-prob, nats."""
    with torch.no_grad():
        hidden, head, labels = inputs(dtype, 2_048)
        logprobs, _ = token_logprobs(hidden, head, labels)
        parts = zip(torch.split(hidden.double(), chunk), torch.split(labels, chunk), strict=True)
        exact = torch.cat([full_logprobs(states, head.double(), words) for states, words in parts])
        return float((logprobs - exact).abs().max())


def measure(name: str) -> dict[str, float]:
    """Peak memory and CPU time of one forward and backward pass, in this process."""
    torch.set_num_threads(1)

    def call(hidden: Tensor, head: Tensor, labels: Tensor) -> None:
        logprobs = token_logprobs(hidden, head, labels)[0] if name == "chunked" else full_logprobs(hidden, head, labels)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    call(*inputs(torch.float32, 1))
    hidden, head, labels = inputs(torch.float32)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.process_time()
    call(hidden, head, labels)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"peak_mib": peak / MIB, "cpu_s": seconds}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
