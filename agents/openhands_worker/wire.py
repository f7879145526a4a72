"""Frames on the pipe between harness and worker: four bytes of length (big-endian), then JSON. Both sides use it.

harness   {"start": EPISODE, ...}  {"answer": N, "result": ...} or {"answer": N, "error": KIND, "message": ...}
          {"cancel": EPISODE}
worker    {"ready": VERSIONS}  {"ask": N, "episode": EPISODE, "method": ..., "arguments": {...}}
          {"done": EPISODE, "end": ..., "detail": ...}
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    """One frame as bytes."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame: Frame = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame
