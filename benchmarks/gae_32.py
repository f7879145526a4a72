"""GAE plus global whitening at 32 x 131,072 tokens, pure torch. See `gae_support` for what is measured and how.

python -m benchmarks gae_32
"""

from __future__ import annotations

import json

from benchmarks.gae_support import compare
from trainer.advantages.gae import skip_observation_gae
from trainer.advantages.whiten import whiten


def main() -> None:
    """Print one JSON line."""
    print(json.dumps({"bench": "gae_32"} | compare(32, skip_observation_gae, whiten)))
