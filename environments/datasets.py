"""Raw rows from a file or a hub, for every environment: `.jsonl`, `.json`, `.csv`, `.parquet`, or a name such as `owner/name`.

Flows in: a source. Flows out: rows in the source's order, each with where it stands, and the split of an id.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.task import Split

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
BATCH = 64
RAGGED = "\0ragged"
Located = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and the row."""


def split_of(instance_id: str, heldout: float = 0.05) -> Split:
    """Train or held-out, by hash of the id alone: the same on every machine, and for every subset of a dataset."""
    share = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:8]) / 2**64
    return "heldout" if share < heldout else "train"


def read(
    source: str, *, split: str = "test", revision: str | None = None, aliases: Mapping[str, str] | None = None
) -> Iterator[Located]:
    """Rows of a file or a hub dataset, read lazily. `aliases` are short names of hub datasets."""
    aliases = aliases or {}
    path = Path(source).expanduser()
    if source.endswith(FORMATS):
        if not path.is_file():
            raise ConfigError(f"dataset {source!r}: there is no such file", hint=f"correct the path; looked in {Path.cwd()}")
        yield from _read_file(path, source)
        return
    name = aliases.get(source.strip().lower(), source)
    if name.count("/") != 1 or path.exists():
        short = f", or one of {', '.join(sorted(aliases))}" if aliases else ""
        known = f"a file ({', '.join(FORMATS)}), a hub name (owner/name){short}"
        raise ConfigError(f"dataset = {source!r} is neither a file nor a hub name", hint=f"valid: {known}")
    for file in _download(name, split, revision):
        yield from _read_file(file, f"{name} ({file.name})")


def _read_file(path: Path, source: str) -> Iterator[Located]:
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path, source)
        elif path.suffix == ".csv":
            yield from _read_csv(path, source)
        else:
            with path.open(encoding="utf-8") as file:
                if path.suffix == ".json":
                    yield from _objects([(source, file.read())])
                else:
                    yield from _objects((f"{source}, line {n}", line) for n, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}", hint="correct the file") from error


def _read_parquet(path: Path, source: str) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    count = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=BATCH):
                for row in batch.to_pylist():
                    count += 1
                    yield f"{source}, row {count}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{source}: cannot be read as parquet: {error}", hint="correct the file") from error


def _read_csv(path: Path, source: str) -> Iterator[Located]:
    """A row with more or fewer fields than the header has them under the name `RAGGED`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows: Iterator[dict[str, Any]] = csv.DictReader(file, restkey=RAGGED, restval=RAGGED)
        line = 1
        try:
            for row in rows:
                where, line = f"{source}, line {line + 1}", rows.line_num  # type: ignore[attr-defined]
                yield where, {**row, RAGGED: True} if RAGGED in row.values() else row
        except csv.Error as error:
            raise ConfigError(f"{source}, line {line + 1}: no CSV: {error}", hint="correct the file") from error


def _objects(texts: Iterable[tuple[str, str]]) -> Iterator[Located]:
    for where, text in texts:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON: {error}", hint="correct the file") from error
        listed = isinstance(value, list)
        for number, row in enumerate(value if listed else [value], 1):
            place = f"{where}, row {number}" if listed else where
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: a row is {type(row).__name__}, not an object", hint="correct the file")
            yield place, row


def _download(name: str, split: str, revision: str | None) -> list[Path]:
    """The files of one split of a hub dataset, through the hub client's cache."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"dataset = {name!r} is on a hub, whose client is missing", hint="pip install huggingface-hub"
        ) from error
    try:
        files = huggingface_hub.HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
        chosen = split_files(files, split)
        got = [Path(huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)) for file in chosen]
    except Exception as error:  # the hub's client has its own errors and those of whichever HTTP library it uses
        detail = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"dataset = {name!r} cannot be fetched from the hub: {type(error).__name__}: {detail}",
            hint="check name, access and network, or download the dataset and name the .parquet or .jsonl file",
        ) from error
    if not got:
        raise ConfigError(f"{name}: no file of split {split!r}", hint=f"its files: {', '.join(sorted(files)[:20])}")
    return got


def split_files(files: Iterable[str], split: str) -> list[str]:
    """A dataset repository's data files of one split: `data/test-00000-of-00002.parquet`, `test.jsonl`, `test/0000.parquet`."""
    data = sorted(file for file in files if file.endswith(FORMATS))
    parquet = [file for file in data if file.endswith(".parquet")]
    return [file for file in parquet or data if _of_split(Path(file), split)]


def _of_split(path: Path, split: str) -> bool:
    return path.stem == split or path.stem.startswith((f"{split}-", f"{split}_0")) or split in path.parts[:-1]
