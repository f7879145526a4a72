"""One small schema for mathematics data sets, and the spellings of its columns in those that are in use.

Flows in: raw rows (AIME, BeyondAIME, HMMT, IMO-AnswerBench, MATH, GSM8K and the like). Flows out: validated `MathRow`s in the
source's order. The first row that has no problem or no answer is a `ConfigError` with its place and the field.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from environments.datasets import RAGGED, read
from environments.python_tir.grading import last_boxed
from harness.errors import ConfigError

COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("id", "problem_id", "unique_id", "problem_idx", "uid"),
    "problem": ("problem", "question", "prompt", "query"),
    "answer": ("answer", "short_answer", "final_answer", "expected_answer", "solution"),
    "source": ("source", "url", "competition"),
    "level": ("level", "difficulty", "category", "problem_type", "type", "subject"),
}
"""Spellings by field, the first that a row has; case, spaces and hyphens do not matter."""
GSM8K = re.compile(r"####\s*(.+?)\s*\Z")
"""Where an answer with its working ends in the result."""

HINT = 'correct the row, or leave such rows out: environment.invalid = "skip" (in the audit: invalid=skip)'


class MathRow(BaseModel):
    """A problem and its answer. `answer` is what would stand in the box: LaTeX or plain text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    problem: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    source: str = ""
    level: str = ""


def load(
    source: str, *, split: str = "train", revision: str | None = None, invalid: Literal["error", "skip"] = "error"
) -> tuple[list[MathRow], list[str]]:
    """Valid rows of a file or of a hub data set, and why each other row was refused: an error at once, unless `invalid` is
    "skip".

    The same problem with the same answer twice is kept once.
    """
    rows: dict[str, MathRow] = {}
    refused: list[str] = []
    for where, raw in read(source, split=split, revision=revision):
        try:
            row = row_of(raw, where)
            other = rows.setdefault(row.id, row)
            if (other.problem, other.answer) != (row.problem, row.answer):
                raise ConfigError(f"{where}: `id` = {row.id!r} is there twice, with another problem or answer", hint=HINT)
        except ConfigError as error:
            if invalid == "error":
                raise
            refused.append(error.message)
    if not rows:
        reason = f", the first because {refused[0]}" if refused else ""
        raise ConfigError(f"{source}: no usable row ({len(refused)} refused{reason})", hint="name another source")
    return list(rows.values()), refused


def row_of(raw: dict[str, Any], where: str) -> MathRow:
    """One raw row. Raises `ConfigError` that begins with `where`."""
    if RAGGED in raw:
        raise ConfigError(f"{where}: not as many fields as the header, so a quote or a comma is wrong", hint=HINT)
    columns = {re.sub(r"[\s-]+", "_", str(name).strip().lower()): value for name, value in raw.items()}
    problem = _field("problem", columns, where)
    answer = _answer(columns, where)
    key = _field("id", columns, where, "") or hashlib.sha256(f"{problem}\n{answer}".encode()).hexdigest()[:16]
    return MathRow(
        id=key,
        problem=problem,
        answer=answer,
        source=_field("source", columns, where, ""),
        level=_field("level", columns, where, ""),
    )


def _field(field: str, columns: dict[str, Any], where: str, default: str | None = None) -> str:
    for name in COLUMNS[field]:
        value = columns.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{where}: `{name}` is {type(value).__name__}, not text or a number", hint=HINT)
        if text := str(value).strip():
            if re.search("[\ud800-\udfff]", text):
                raise ConfigError(f"{where}: `{name}` holds half a surrogate pair, which is no text", hint=HINT)
            return text
    if default is None:
        names = " or ".join(f"`{name}`" for name in COLUMNS[field])
        raise ConfigError(f"{where}: no {field}: {names} is missing or empty", hint=f"its columns: {', '.join(columns)}")
    return default


def _answer(columns: dict[str, Any], where: str) -> str:
    """A result behind `####` or in the last box, where there is one, else the whole field; a solution must have one."""
    text = _field("answer", columns, where)
    short = any(columns.get(name) not in (None, "") for name in COLUMNS["answer"][:-1])
    if found := GSM8K.search(text):
        return re.sub(r"(?<=\d),(?=\d{3})", "", found[1])
    boxed = last_boxed(text)
    if boxed is None and not short:
        raise ConfigError(f"{where}: `solution` has no \\boxed{{}} answer", hint=HINT)
    return text if boxed is None else boxed
