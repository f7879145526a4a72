"""`sao tasks build`, `rebuild` and `check`: the task factory and its gate, run on container sandboxes.

Flows in: words of the command line. Flows out: task files, verdicts. The factory itself is an environment's
(`environments/swe/factory`) and is imported when asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.configfile import overrides
from harness.errors import ConfigError
from harness.protocols import SandboxProvider
from harness.registry import config_error, load_object, plugin_config

FACTORY = "environments.swe.factory.build"


async def build(out: Path, words: Sequence[str]) -> dict[str, Any]:
    """Build tasks into `out`; `words` are key=value settings of the factory. Returns its report."""
    config = _settings(words)
    async with _sandboxes(config.base) as sandboxes:
        report: dict[str, Any] = await load_object(f"{FACTORY}:build")(out, config, sandboxes)
    return report


def rebuild(folder: Path, words: Sequence[str]) -> list[str]:
    """Make the images of a built folder that this machine lacks; their names. `words` as for `build`."""
    tags: list[str] = load_object("environments.swe.factory.rebuild:rebuild")(folder, _settings(words))
    return tags


async def check(file: Path, workers: int) -> tuple[int, list[str]]:
    """Validate a task file: how many rows there are, and what is wrong with those that are not valid."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file", hint="give a JSON-lines file of SWE rows")
    async with _sandboxes(_first_image(file)) as sandboxes:
        verdicts = await load_object(f"{FACTORY}:check")(file, sandboxes, workers=workers)
    return len(verdicts), [f"{v.instance_id}: {v.reason}" for v in verdicts if not v.valid]


def _settings(words: Sequence[str]) -> Any:
    config_class = load_object(f"{FACTORY}:BuildConfig")
    try:
        return config_class(**overrides(words))
    except ValidationError as error:
        raise config_error(error, config_class) from None


def _first_image(file: Path) -> str:
    """Sandboxes want a default image that exists; every row names its own."""
    try:
        return str(json.loads(file.read_text().split("\n", 1)[0])["image"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: the first line is no SWE row: {error!r}", hint="give a JSON-lines file of SWE rows"
        ) from error


@asynccontextmanager
async def _sandboxes(image: str) -> AsyncIterator[SandboxProvider]:
    """Container sandboxes; `image`: their default one, which must be there."""
    provider, options = plugin_config("sandbox", {"id": "docker", "image": image})
    sandboxes: SandboxProvider = provider(options, f"tasks-{os.getpid()}")
    try:
        await sandboxes.start()
        yield sandboxes
    finally:
        await sandboxes.close()
