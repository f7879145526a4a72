"""A run is a folder: resolved configuration, ledger, trajectories, metrics, checkpoints, logs, summary.

Flows in: a `Config`. Flows out: paths and append-only files. Every tool reads only this folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.config import Config
from harness.configfile import dump_config, load_config
from harness.errors import ConfigError


@dataclass(slots=True)
class RunDir:
    """One run folder, held by one process at a time."""

    path: Path
    _lock: IO[str]

    @classmethod
    def create(cls, config: Config, name: str) -> RunDir:
        """A new folder `<run_dir>/<name>-<time>-<pid>`. Raises `ConfigError` if it cannot be made."""
        path = Path(config.run_dir) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            for folder in ("checkpoints", "logs", "trajectories", "weights"):
                (path / folder).mkdir(parents=True)
            (path / "config.toml").write_text(dump_config(config))
            return cls(path.resolve(), _hold(path))
        except OSError as error:
            raise ConfigError(
                f"cannot make the run folder {path}: {error.strerror}", hint="set run_dir to another disk"
            ) from error

    @classmethod
    def resume(cls, path: Path, *, model: bool = True) -> tuple[RunDir, Config]:
        """An existing folder and its saved configuration. Raises `ConfigError` if it is none, or in use."""
        if not (path / "config.toml").is_file() or not (path / "ledger.sqlite").is_file():
            raise ConfigError(f"{path} is not a run folder", hint="give the folder that the run printed")
        lock = _hold(path)
        return cls(path.resolve(), lock), load_config(path / "config.toml", model=model)

    @property
    def id(self) -> str:
        """The run's label on everything it makes."""
        return self.path.name

    def log(self, name: str) -> Path:
        """A log file's path."""
        return self.path / "logs" / f"{name}.log"

    def metrics(self, row: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. NaN is never written: a missing value is null."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rewind(self, batches: int) -> None:
        """Forget the metrics of batches that were given back to the ledger."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            rows = [line for line in path.read_text().splitlines() if 0 < _step_of(line) <= batches]
            part = path.with_suffix(".part")
            part.write_text("".join(row + "\n" for row in rows))
            os.replace(part, path)

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file atomically."""
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        os.replace(part, self.path / name)

    def prune_checkpoints(self, keep: int, named: str | None) -> None:
        """Remove all but the newest `keep` checkpoints up to the one that the ledger names, and whatever it does not know."""
        folders = sorted((self.path / "checkpoints").iterdir())
        known = [f for f in folders if named is not None and f.name <= Path(named).name and f.suffix != ".part"]
        for folder in folders:
            if folder not in known[-keep:]:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Give the folder back."""
        self._lock.close()


def _step_of(line: str) -> int:
    """The step of a metrics row; 0 for one that a crash cut short."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 0


def _hold(path: Path) -> IO[str]:
    lock = (path / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{path} is in use by another process", hint="wait for it to end, or stop it") from None
    return lock
