"""GAE plus global whitening at 8 and 32 x 131,072 tokens, compiled. See `gae_support` for what is measured and how.

The headline numbers are those of 32 trajectories, the harder case: the loop's cost hardly depends on their number.

    python -m benchmarks gae_compiled
"""

from __future__ import annotations

import json

from benchmarks.gae_support import compare
from trainer.advantages.compiled import skip_observation_gae, whiten_


def main() -> None:
    """Print one JSON line."""
    few, many = (compare(rows, skip_observation_gae, whiten_) for rows in (8, 32))
    few_fields = {f"{key}_8": few[key] for key in ("value", "ratio", "against_ms", "max_error")}
    print(json.dumps({"bench": "gae_compiled"} | many | few_fields))
