"""How busy a vLLM server is, read from its `/metrics`. Flows in: Prometheus' text format. Flows out: a `Load`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.errors import EngineError

NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:generation_tokens_total": "generated_tokens",
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests now, share of the key-value memory in use (0 to 1), and counters since the server's start."""

    running: float
    waiting: float
    kv_usage: float
    prefix_hits: float = 0.0
    """Prompt tokens found in the prefix cache."""
    prefix_queries: float = 0.0
    """Prompt tokens looked for in the prefix cache."""
    preemptions: float = 0.0
    generated_tokens: float = 0.0


def read_load(text: str) -> Load:
    """Add up the engines of one server (their fullest memory counts). Raises `EngineError` if a figure is missing or none."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in NAMES:
            try:
                found.setdefault(NAMES[name], []).append(float(line[len(name) :].rpartition("}")[2].split()[0]))
            except (ValueError, IndexError) as error:
                raise EngineError(f"the engine's metrics have a line that is none: {line[:200]}") from error
    if missing := sorted(set(NAMES.values()) - set(found)):
        raise EngineError(f"the engine's metrics lack {', '.join(missing)}")
    totals = {name: max(values) if name == "kv_usage" else sum(values) for name, values in found.items()}
    if not all(math.isfinite(value) and value >= 0 for value in totals.values()):
        raise EngineError(f"the engine's metrics are no numbers: {totals}")
    return Load(**totals)
