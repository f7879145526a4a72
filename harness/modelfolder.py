"""A model folder as the hubs have it: config.json, tokenizer, template, and weights in one file or in shards with an index.

Flows in: a folder. Flows out: its weight files, and one digest of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from harness.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards that the index names, in order. Raises `ConfigError` if there are none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: there is neither {WEIGHTS} nor {INDEX}", hint="give a model folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX} cannot be read: {error!r}", hint="download the model again") from error
    missing = [name for name in names if not (folder / str(name)).is_file()]
    if missing or not names:
        raise ConfigError(f"{folder}: {len(missing)} of {len(names)} shards are missing, {missing[:3]}", hint="download them")
    return [folder / str(name) for name in names]


def weights_digest(folder: Path) -> str:
    """sha256 of the one file, or of the digests of the shards."""
    digests = []
    for path in weight_files(folder):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
