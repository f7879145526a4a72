"""Ask a module of the kit in another process, with other hashes and nothing that this one has done before.

Flows in: the module's name and its words. Flows out: the JSON of the last line that it prints.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from harness.kit.verdicts import Broken

CHILD_S = 120.0


async def elsewhere(module: str, *words: str, seed: str, doing: str) -> Any:
    """Run `python -m harness.kit.MODULE WORDS` with the hash seed `seed`. Raises `Broken` if it fails, or takes longer than
    `CHILD_S`."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"harness.kit.{module}", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
    )
    try:
        async with asyncio.timeout(CHILD_S):
            out, errors = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise Broken(f"another process could not {doing} in {CHILD_S:g} s", "make them lazily, and one by one") from None
    if child.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise Broken(f"another process cannot {doing}: {last}", "make them from the options alone")
    return json.loads(out.decode().splitlines()[-1])
