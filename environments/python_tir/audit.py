"""How the grader judges the answers of a data set: every right one in at least five written forms, and wrong ones near it.

    python -m environments.python_tir.audit [invalid=skip] FILE [FILE ...]

The first bad row is an error, unless `invalid=skip`, as in the environment's options, leaves such rows out and prints why.
Flows out: per file the share of right forms that were refused and of wrong answers that were accepted, then every such case.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from environments.python_tir.equivalence import clean, number, wordy
from environments.python_tir.grading import Grader
from environments.python_tir.rows import MathRow, load
from harness.errors import ConfigError, SaoError

FORMS_MIN = 5
SKIP = "invalid=skip"
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
DIGITS = re.compile(r"(?<![\w.])\d+|(?<=[a-zA-Z }({^_*+-])\d+(?!\.\d)")


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to be judged."""

    row: MathRow
    form: str
    answer: str
    right: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What came of the cases of one data set."""

    rows: int
    right: int
    wrong: int
    refused: tuple[Case, ...]
    accepted: tuple[Case, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows",
            f"right forms refused:     {len(self.refused)} of {self.right} ({_share(self.refused, self.right)})",
            f"wrong answers accepted:  {len(self.accepted)} of {self.wrong} ({_share(self.accepted, self.wrong)})",
        ]
        for title, cases in (("refused", self.refused), ("accepted", self.accepted)):
            lines += [f"{title}: {c.row.id}: gold {c.row.answer!r}: {c.form}: {c.answer!r}" for c in cases]
        return "\n".join(lines)


def _share(part: tuple[Case, ...], whole: int) -> str:
    return f"{len(part) / max(whole, 1):.2%}"


def right_forms(gold: str) -> Iterator[tuple[str, str]]:
    """(name, text) of ways to write an answer; the first five fit any."""
    core = gold.strip().strip("$.").strip() if gold.count("$") <= 2 else gold.strip()
    yield "as given", gold
    yield "dollars and full stop", f"${core}$." if "$" not in core else f"{core}."
    yield "spaced", f"  {re.sub(r',(?! )', ', ', core)}  "
    yield "braces and thin space", f"{core}\\,"
    if wordy(clean(gold)):
        yield "text", f"\\text{{{core}}}" if not re.search(r"[\\{}$]", core) else f"\\displaystyle {core}"
        yield "capitals", core if re.search(r"[\\_$]", core) else core[0].swapcase() + core[1:]
        return
    yield "display", f"\\displaystyle {core}"
    if (value := whole(gold)) is not None:
        yield "decimal point", f"{value}.0"
        yield "fraction", f"\\frac{{{2 * value}}}{{2}}"
        yield "dfrac", f"\\dfrac{{{3 * value}}}{{3}}"
        yield "named", f"n = {value}"
        yield "unit", f"{value} \\text{{ units}}"
        yield "sum", f"{value - 1} + 1"
        if abs(value) >= 1000:
            yield "commas", f"{value:,}"
            yield "LaTeX commas", f"{value:,}".replace(",", "{,}")
        return
    if "frac{" in core:
        yield "dfrac", core.replace("\\frac", "\\dfrac")
        yield "tfrac", core.replace("\\frac", "\\tfrac")
        if (match := FRACTION.search(core)) and "\\" not in match[1] + match[2]:
            yield "slash", core[: match.start()] + f"(({match[1]})/({match[2]}))" + core[match.end() :]
    if found := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", core):
        sign, top, bottom = found[1], int(found[2]), int(found[3])
        yield "not reduced", f"{sign}\\frac{{{top * 6}}}{{{bottom * 6}}}"
        yield "plain slash", f"{sign}{top}/{bottom}"
        if 10**6 % bottom == 0:
            yield "decimal", f"{sign}{top / bottom}"
    if re.search(r"[(\[]", core):
        yield "left right", _left_right(core)
    items = _items(core)
    if items:
        yield "other order", ", ".join(reversed(items))
        yield "set", f"\\{{{', '.join(items)}\\}}"
        yield "and", f"{', '.join(items[:-1])} \\text{{ and }} {items[-1]}"
    elif "=" not in core and "," not in core and not re.search(r"\\(?:cup|mathbb|left\\{)|[<>]|\\[lg]eq?", core):
        yield "plus nothing", f"{core} + 0"
        yield "in parentheses", f"({core})"
        yield "times one", f"1 \\cdot ({core})"


def wrong_forms(gold: str) -> Iterator[tuple[str, str]]:
    """(name, text) of answers that are near but wrong."""
    core = gold.strip().strip("$.").strip() if gold.count("$") <= 2 else gold.strip()
    if wordy(clean(gold)):
        yield "negated", f"not {core}"
        yield "another word", "none of these"
        yield "a number", "17"
        return
    if (value := whole(gold)) is not None:
        for name, other in (("n + 1", value + 1), ("n - 1", value - 1), ("ten times", value * 10 + 1), ("sign", -value or 2)):
            yield name, str(other)
        yield "near decimal", f"{value}.01"
        yield "with another", f"{value}, {value + 1}"
        yield "n + 1 as fraction", f"\\frac{{{2 * value + 2}}}{{2}}"
        return
    for digits in DIGITS.finditer(core):
        yield f"digit at {digits.start()}", core[: digits.start()] + str(int(digits[0]) + 1) + core[digits.end() :]
    if (match := FRACTION.search(core)) and match[1].strip() != match[2].strip():
        yield "swapped", core[: match.start()] + f"\\frac{{{match[2]}}}{{{match[1]}}}" + core[match.end() :]
    items = _items(core)
    if items:
        yield "one missing", ", ".join(items[:-1])
        yield "one more", ", ".join([*items, "777"])
    elif "=" not in core and not re.search(r"\\(?:cup|mathbb|ldots)|[<>,\[]|\\[lg]eq?", core):
        yield "sign", f"-({core})"
        yield "plus one", f"{core} + 1"
        yield "twice", f"2({core})"
    yield "another", "777"


def whole(gold: str) -> int | None:
    """An answer's value if it is an integer."""
    value = number(clean(gold))
    return value.numerator if value is not None and value.denominator == 1 else None


def _items(core: str) -> list[str]:
    """The values of a list that stands in no parentheses."""
    if re.search(r"\\(?:ldots|cdots|underbrace)|\.\.\.|\\cup|\\mathbb|[<>]|\\[lg]e", core):
        return []
    items, depth = [""], 0
    for character in core:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items] if len(items) > 1 and not depth else []


def _left_right(core: str) -> str:
    return re.sub(r"(?<!\\left)(?<!\\right)([(\[])", r"\\left\1", re.sub(r"(?<!\\right)([)\]])", r"\\right\1", core))


def cases_of(row: MathRow) -> list[Case]:
    """All cases of a row."""
    right = [Case(row, form, text, True) for form, text in right_forms(row.answer)]
    return right + [Case(row, form, text, False) for form, text in wrong_forms(row.answer)]


async def audit(rows: list[MathRow]) -> Report:
    """Judge all cases of all rows."""
    grader = Grader()
    cases = [case for row in rows for case in cases_of(row)]
    try:
        verdicts = await asyncio.gather(*(grader.grade(case.row.answer, case.answer) for case in cases))
    finally:
        grader.close()
    judged = list(zip(cases, verdicts, strict=True))
    return Report(
        len(rows),
        sum(case.right for case in cases),
        sum(not case.right for case in cases),
        tuple(case for case, verdict in judged if case.right and not verdict.correct),
        tuple(case for case, verdict in judged if not case.right and verdict.correct),
    )


def main(words: list[str]) -> None:
    """Print a report per file. Raises `ConfigError`."""
    files = [word for word in words if word != SKIP]
    if not files:
        raise ConfigError("no file is named", hint=f"python -m environments.python_tir.audit [{SKIP}] FILE [FILE ...]")
    for file in files:
        rows, refused = load(file, invalid="skip" if SKIP in words else "error")
        lines = [f"{Path(file).name}: {asyncio.run(audit(rows))}", *(f"no row: {reason}" for reason in refused)]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SaoError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
