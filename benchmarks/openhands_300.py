"""An OpenHands episode of 300 turns: CPU seconds and memory, against the stock LLM class over HTTP. See `openhands_support`.

python -m benchmarks openhands_300          needs `make setup-agents`; Docker and the image of `.ci/docker.sh` if there is one
"""

from __future__ import annotations

import asyncio
import json

from benchmarks.openhands_support import measure

TURNS, EPISODES = 300, 2


def main() -> None:
    """Print the JSON line."""
    print(json.dumps(asyncio.run(measure("openhands_300", TURNS, EPISODES))))
