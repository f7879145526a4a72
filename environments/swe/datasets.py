"""Rows from a file or a hub: `.jsonl`, `.json`, `.parquet`, or a name such as `SWE-bench/SWE-bench_Verified` or `verified`.

Flows in: a source and an adapter's name. Flows out: validated `SweRow`s in the source's order, no instance twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from environments.swe import swebench
from environments.swe.adapters import ADAPTERS, adapter_of, legacy
from environments.swe.rows import SweRow, refuse_duplicate, validate
from harness.errors import ConfigError
from harness.registry import nearest
from harness.task import Split

ALIASES = {
    "full": "SWE-bench/SWE-bench",
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
"""Short names, as swebench has them."""
SPLITS = {"swegym": "train", "swesmith": "train", "r2egym": "train", "rebench": "train", "swebench": "test"}
"""A hub dataset's split by adapter, if none is asked for."""
FORMATS = (".jsonl", ".json", ".parquet")
BATCH = 64


def load(
    source: str,
    adapter: str | None = None,
    *,
    split: str | None = None,
    revision: str | None = None,
    invalid: Literal["error", "skip"] = "error",
) -> tuple[list[SweRow], list[str]]:
    """Valid rows, and why each other row was refused. A refusal raises `ConfigError` at once, unless `invalid` is "skip".

    `adapter` None: by the hub name, else `swebench`. `split` and `revision` are a hub dataset's.
    """
    name = adapter or adapter_of(ALIASES.get(source.strip().lower(), source))
    if name not in ADAPTERS:
        raise ConfigError(f"adapter = {name!r} is not known", hint=nearest(name, sorted(ADAPTERS)))
    parsers = swebench.parsers()
    rows: dict[str, SweRow] = {}
    refused: list[str] = []
    for raw, outcome in _adapted(read(source, split=split or SPLITS[name], revision=revision), name):
        try:
            if isinstance(outcome, ConfigError):
                where = raw.get("instance_id") or raw.get("docker_image") or "a row without instance_id"
                raise ConfigError(f"{source}: {where}: {outcome.message}", hint=outcome.hint)
            row = validate(outcome, source, parsers=parsers)
            refuse_duplicate(row.instance_id, rows, source)
        except ConfigError as error:
            if invalid == "error":
                raise
            refused.append(error.message)
            continue
        rows[row.instance_id] = row
    if not rows:
        reason = f", the first because {refused[0]}" if refused else ""
        raise ConfigError(f"{source}: no usable row ({len(refused)} refused{reason})", hint="name another source or adapter")
    return list(rows.values()), refused


def split_of(instance_id: str, heldout: float = 0.05) -> Split:
    """Train or held-out, by hash of the id alone: the same on every machine, and for every subset of a dataset."""
    share = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:8]) / 2**64
    return "heldout" if share < heldout else "train"


def _adapted(rows: Iterable[dict[str, Any]], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | ConfigError]]:
    """Each row with its 5.x form or the reason why there is none; 4.x rows go through swebench 4.1 in batches."""
    for batch in itertools.batched(rows, BATCH):
        old = [row for row in batch if name == "swebench" and _is_legacy(row)]
        columns = dict(zip(map(id, old), swebench.legacy_columns(old) if old else [], strict=True))
        for row in batch:
            try:
                yield row, legacy(row, columns[id(row)]) if id(row) in columns else ADAPTERS[name](row)
            except ConfigError as error:
                yield row, error


def _is_legacy(row: dict[str, Any]) -> bool:
    """4.x columns only: no environment, but what `make_test_spec` needs. A row without these is refused by `validate`."""
    return not {"image", "eval_script", "log_parser"} & row.keys() and {"repo", "version", "test_patch"} <= row.keys()


def read(source: str, *, split: str = "test", revision: str | None = None) -> Iterator[dict[str, Any]]:
    """Raw rows of a file or a hub dataset, read lazily."""
    path = Path(source).expanduser()
    if source.endswith(FORMATS):
        if not path.is_file():
            raise ConfigError(f"dataset {source!r}: there is no such file", hint=f"correct the path; looked in {Path.cwd()}")
        yield from _read_file(path, source)
        return
    name = ALIASES.get(source.strip().lower(), source)
    if name.count("/") != 1 or path.exists():
        known = f"a file ({', '.join(FORMATS)}), a hub name (owner/name), or one of {', '.join(sorted(ALIASES))}"
        raise ConfigError(f"dataset = {source!r} is neither a file nor a hub name", hint=f"valid: {known}")
    for file in _download(name, split, revision):
        yield from _read_file(file, f"{name} ({file.name})")


def _read_file(path: Path, source: str) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=BATCH):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{source}: cannot be read as parquet: {error}", hint="correct the file") from error
        return
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".json":
            yield from _objects([(source, file.read())], source)
        else:
            yield from _objects(((f"{source}, line {n}", line) for n, line in enumerate(file, 1) if line.strip()), source)


def _objects(texts: Iterable[tuple[str, str]], source: str) -> Iterator[dict[str, Any]]:
    for where, text in texts:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON: {error}", hint="correct the file") from error
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a row is {type(row).__name__}, not an object", hint="correct the file")
            yield row


def _download(name: str, split: str, revision: str | None) -> list[Path]:
    """The files of one split of a hub dataset, through the hub client's cache."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"dataset = {name!r} is on a hub, whose client is missing", hint=swebench.INSTALL) from error
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
