"""SWE rows from a file or a hub name such as `SWE-bench/SWE-bench_Verified` or `verified`.

Flows in: a source and an adapter's name. Flows out: validated `SweRow`s in the source's order, no instance twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from environments.datasets import read
from environments.swe import swebench
from environments.swe.adapters import ADAPTERS, adapter_of, legacy
from environments.swe.rows import SweRow, refuse_duplicate, validate
from harness.errors import ConfigError
from harness.registry import nearest

ALIASES = {
    "full": "SWE-bench/SWE-bench",
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
"""Short names, as swebench has them."""
SPLITS = {"swegym": "train", "swesmith": "train", "r2egym": "train", "rebench": "train", "swebench": "test"}
"""A hub dataset's split by adapter, if none is asked for."""
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
    raw_rows = (raw for _, raw in read(source, split=split or SPLITS[name], revision=revision, aliases=ALIASES))
    for raw, outcome in _adapted(raw_rows, name):
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
