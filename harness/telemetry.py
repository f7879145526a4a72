"""What the harness itself knows of a step: rewards, queue, lags, losses to infrastructure, speed.

Flows in: the ledger, clocks, the scheduler's counters. Flows out: the harness's part of one row of metrics.jsonl; the trainer
adds its own (`trainer/measure`).

| name | formula |
|---|---|
| `reward/mean`, `rollout/success` | mean reward of the batch's episodes; share with reward > 0.5 |
| `source/<name>_reward`, `.._success`, `.._share` | of a mixture's parts: as above; share of the batch's episodes |
| `rollout/trajectories_per_s`, `rollout/action_tokens_per_s`, `rollout/tokens_per_s` | of the batch / seconds since the last |
| `rollout/infra_failure_frac` | share of the last 200 finished episodes that infrastructure lost |
| `rollout/dropped_<reason>`, `rollout/replayed` | episodes dropped since the run began by termination; second and later tries |
| `prompts/epoch` | mean number of earlier draws of the batch's tasks |
| `async/submission_lag`, `async/queue_lag` | version at consumption - at submission, - at completion; means |
| `async/queue_age_s` | mean seconds between completion and consumption |
| `async/queue`, `async/capacity` | episodes that wait; episodes that admission would still start |
| `async/in_flight`, `async/rollout_idle` | episodes running, mean over the step; 1 - that / concurrency |
| `async/trainer_idle` | share of the step spent waiting for a batch |
| `async/publish_lag` | trainer's version - engine's |
| `async/len_consumed_over_submitted` | tokens per episode: consumed batches 5 to 8 steps ago / dispatched in the same span |
| `engine/tokens_per_s` | tokens sampled since the last row / seconds; null after a server was replaced |
| `engine/generated_tokens`, `engine/running`, `engine/waiting` | since its start; requests now that run, that wait in it |
| `engine/busy_s`, `engine/up_s` | embedded engine: seconds in which it computed, since its start |
| `engine/replicas`, `engine/window`, `engine/queued` | vLLM: that serve; requests let in at once, held back |
| `engine/kv_usage`, `engine/prefix_hit_rate`, `engine/preemptions` | vLLM: share of memory, of prompt tokens found |
| `engine/lost_attempts` | vLLM: attempts that a replica did not finish |
| `time/wait_s`, `time/train_s`, `time/publish_s` | the step's parts |
"""

from __future__ import annotations

import math
import time
from typing import Any

from harness.ledger import Ledger

Row = dict[str, Any]
LAGGED = (8, 5)
"""Batches ago that the length comparison looks at: long episodes of that time have ended by now."""


class Telemetry:
    """Rows, one after another."""

    def __init__(self, ledger: Ledger, concurrency: int, slot_seconds: float, *, mixed: bool = False) -> None:
        self._ledger, self._concurrency = ledger, concurrency
        self._started = self._seen = time.monotonic()
        self._slot_seconds = slot_seconds
        self._mixed = mixed
        self._sampled = math.nan

    def row(
        self,
        *,
        batch: int,
        version: int,
        consumed_version: int,
        engine_version: int,
        capacity: int,
        slot_seconds: float,
        wait_s: float,
        train_s: float,
        publish_s: float,
        engine: dict[str, float],
    ) -> Row:
        """The step that just ended. slot_seconds: episodes in flight, integrated over time since the scheduler began.

        engine: what the engine says of its load.
        """
        now = time.monotonic()
        span = max(now - self._seen, 1e-9)
        in_flight = (slot_seconds - self._slot_seconds) / span
        sampled, before = engine.get("generated_tokens", math.nan), self._sampled
        self._sampled = sampled
        self._seen, self._slot_seconds = now, slot_seconds
        step_s = max(wait_s + train_s + publish_s, 1e-9)
        seen = self._ledger.batch_facts(batch)
        return {
            "step": batch,
            "version": version,
            "elapsed_s": round(now - self._started, 3),
            "reward/mean": seen["reward"],
            "rollout/success": seen["success"],
            **(self._sources(batch, seen["episodes"]) if self._mixed else {}),
            "rollout/trajectories_per_s": seen["episodes"] / step_s,
            "rollout/action_tokens_per_s": seen["action_tokens"] / step_s,
            "rollout/tokens_per_s": seen["tokens"] / step_s,
            "rollout/infra_failure_frac": self._ledger.infra_failure_frac(),
            "rollout/replayed": self._ledger.replayed(),
            **{f"rollout/dropped_{reason}": n for reason, n in self._ledger.dropped().items()},
            "prompts/epoch": seen["epoch"],
            "async/submission_lag": consumed_version - seen["submit_version"],
            "async/queue_lag": consumed_version - seen["complete_version"],
            "async/queue_age_s": max(time.time() - seen["completed_s"] - train_s - publish_s, 0.0),
            "async/queue": len(self._ledger.pending()),
            "async/capacity": max(capacity, 0),
            "async/in_flight": in_flight,
            "async/rollout_idle": 1 - in_flight / self._concurrency,
            "async/trainer_idle": wait_s / step_s,
            "async/publish_lag": version - engine_version,
            "async/len_consumed_over_submitted": self._ledger.length_bias(batch - LAGGED[0], batch - LAGGED[1]),
            "engine/tokens_per_s": (sampled - before) / span if sampled >= before else None,
            **{f"engine/{name}": value for name, value in engine.items()},
            "time/wait_s": round(wait_s, 4),
            "time/train_s": round(train_s, 4),
            "time/publish_s": round(publish_s, 4),
        }

    def _sources(self, batch: int, episodes: float) -> Row:
        row: Row = {}
        for name, (n, reward, success) in self._ledger.batch_sources(batch).items():
            row |= {f"source/{name}_reward": reward, f"source/{name}_success": success, f"source/{name}_share": n / episodes}
        return row
