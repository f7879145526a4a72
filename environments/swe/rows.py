"""One SWE task as a row in the swebench 5.x schema, and what a row must fulfil before anything is played on it.

Flows in: dictionaries (JSON lines, parquet, a hub dataset, an adapter). Flows out: `SweRow`s. A row that cannot be judged is
refused here, because a judge without tests says yes to everything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from environments.swe import swebench
from harness.errors import ConfigError
from harness.registry import nearest


def _tests(value: Any) -> Any:
    """Datasets keep test lists as JSON text or as lists."""
    return json.loads(value) if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Datasets keep absent text as null and times as numbers or dates."""
    return "" if value is None else value if isinstance(value, str) else str(value)


Tests = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_tests), Field(min_length=1)]
Text = Annotated[str, BeforeValidator(_text)]
Needed = Annotated[str, Field(pattern=r"\S")]


class SweRow(BaseModel):
    """swebench 5.x columns; the last block is ours and optional, other tools ignore it. Unknown columns are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    instance_id: Needed
    repo: Needed
    base_commit: Needed
    problem_statement: Needed
    patch: Needed
    """The gold patch."""
    test_patch: Text
    """Adds the hidden tests to the base commit; empty if the image holds them."""
    FAIL_TO_PASS: Tests
    PASS_TO_PASS: Tests
    image: Needed
    """Container image with the repository at `base_commit` in `workdir`."""
    eval_script: Needed
    log_parser: Needed
    """A name in swebench's `PARSER_REGISTRY`."""
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    version: Text = ""
    hints_text: Text = ""
    created_at: Text = ""
    environment_setup_commit: Text = ""

    workdir: str = "/testbed"
    """Where the repository is."""
    pytest_args: list[str] | None = None
    """Given: the tests run under our own hardened pytest with these arguments, instead of `eval_script`."""
    protected: list[str] = []
    """Paths (globs) of this task that a patch may not touch, beside the usual ones."""
    allowed: list[str] = []
    """Usually protected paths that this task's patch may touch, for example `pyproject.toml`."""
    setup_patch: str = ""
    """Makes the task out of the image: applied in `workdir` before the agent starts, and again before grading."""
    hidden: list[str] = []
    """Absolute paths in the image that are removed before the agent starts, because they hold tests; graders keep them."""


NEXT = {
    "FAIL_TO_PASS": "a task needs tests that the gold patch turns green; drop the row",
    "PASS_TO_PASS": "a task needs tests that must stay green; drop the row",
    "image": "name the container image, or use an adapter: adapter = swegym, swesmith, r2egym, rebench or swebench",
    "eval_script": "give the script that runs the tests, or use an adapter",
    "eval_type": "valid: pass_and_fail, fail_only",
    "problem_statement": "there is nothing to ask; drop the row",
}
"""Next steps by field; elsewhere `correct the row`."""


def validate(row: Mapping[str, Any], source: str, *, parsers: Collection[str] | None = None) -> SweRow:
    """The row as a `SweRow`. Raises `ConfigError` with source, instance, field, value and next step.

    `parsers` are the valid parser names; None asks swebench.
    """
    where = f"{source}: {row.get('instance_id') or 'a row without instance_id'}"
    try:
        valid = SweRow.model_validate(dict(row))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "the row"
        value = "is missing" if first["type"] == "missing" else f"= {_short(row.get(name))}: {first['msg']}"
        raise ConfigError(f"{where}: `{name}` {value}", hint=NEXT.get(name, f"correct the row, field `{name}`")) from None
    known = swebench.parsers() if parsers is None else parsers
    if valid.log_parser not in known:
        raise ConfigError(
            f"{where}: `log_parser` = {valid.log_parser!r} is not one of swebench's parsers",
            hint=nearest(valid.log_parser, sorted(known)) + " (or drop the row)",
        )
    return valid


def validate_all(rows: Iterable[Mapping[str, Any]], source: str) -> list[SweRow]:
    """All rows as `SweRow`s; the first bad one and the first repeated `instance_id` are a `ConfigError`."""
    parsers = swebench.parsers()
    seen: dict[str, SweRow] = {}
    for row in rows:
        valid = validate(row, source, parsers=parsers)
        refuse_duplicate(valid.instance_id, seen, source)
        seen[valid.instance_id] = valid
    return list(seen.values())


def refuse_duplicate(instance_id: str, seen: Collection[str], source: str) -> None:
    """Raise `ConfigError` if the instance was seen already: an `instance_id` is the name of a task."""
    if instance_id in seen:
        raise ConfigError(f"{source}: {instance_id}: `instance_id` is there twice", hint="drop one of the rows")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
