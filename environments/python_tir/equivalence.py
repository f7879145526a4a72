"""Whether two written answers say the same: numbers at once, words as words, everything else by math-verify.

Flows in: the right answer and a given one, as they would stand in a box. Flows out: true or false. Pure functions, but an
answer may take for ever or all memory (`9^{9^{9^9}}`): `judge.py` calls `equivalent` in a process of its own.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

WRAPPERS = (
    re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}", re.DOTALL),
    re.compile(r"\\displaystyle(?![a-zA-Z])(.*)", re.DOTALL),
)
REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\!|\\limits(?![a-zA-Z])", ""),
        (r"\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\{,\}", ","),
        (r"\\\$|\$", ""),
        (r"\\[lg]eq(?![a-zA-Z])", lambda m: m[0][:-1]),
        (r"(?<=\d)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|degrees?\b)", ""),
    )
)
SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}
    | {"∪": r"\cup ", "ℤ": r"\mathbb{Z}", "ℝ": r"\mathbb{R}", "\u00a0": " ", "\n": " "}
)
LINK = re.compile(
    r"\s*,?\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z]))\s*"
)
UNIT = re.compile(r"(?<=[\d})])\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?\s*\Z")
NAMED = re.compile(r"\A[a-zA-Z]\s*=\s*")
TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "gcd", "lcm", "max", "min", "mod", "deg")
    + ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
)
NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+(?:\.\d+)?|\.\d+)|(?P<a>\d+)\s*/\s*(?P<c>\d+)|\\frac\s*\{(?P<b>\d+)\}\s*\{(?P<d>\d+)\})"
)
GROUPED = re.compile(r"([+-]?\d{1,3})((?:[, ]\d{3})+)")
NUMBER_MAX = 1_000
"""Characters that are read as a number without further thought."""
RELATIVE = 1e-6
"""How near a decimal fraction must be to a number that it rounds."""


def clean(text: str) -> str:
    """Without what does not change the meaning: dollars, `\\left`, spacing commands, a full stop, `and` between values."""
    text = re.sub(r"\s+", " ", text.translate(SIGNS)).strip()
    while True:
        before = text
        if not text.endswith((r"\ldots", "...")):
            text = text.rstrip(".;,").rstrip() if not text.endswith("\\,") else text[:-2].rstrip()
        for wrapper in WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = next(group for group in match.groups() if group is not None).strip()
        if text == before:
            break
    for pattern, to in REWRITES:
        text = pattern.sub(to, text)
    return re.sub(r"\s+", " ", LINK.sub(", ", text)).strip().rstrip(".;,").rstrip()


def number(text: str) -> Fraction | None:
    """The value of a plainly written number (`1,234`, `-0.5`, `1/3`, `\\frac{1}{3}`), of a cleaned text; None for anything
    else."""
    if grouped := GROUPED.fullmatch(text):
        text = grouped[1] + re.sub("[, ]", "", grouped[2])
    if len(text) > NUMBER_MAX or not (match := NUMBER.fullmatch(text)):
        return None
    sign, top, bottom = match["sign"], match["a"] or match["b"] or match["whole"], match["c"] or match["d"] or "1"
    value = Fraction(top) / Fraction(bottom) if int(bottom) else None
    return -value if value is not None and sign == "-" else value


def wordy(text: str) -> bool:
    """Whether an answer is said in words, which no algebra can compare."""
    return any(word not in FUNCTIONS for word in WORD.findall(TEXT.sub(r" \1 ", text)))


def words(text: str) -> str:
    """What is compared of an answer in words: letters, digits and signs, without case, articles, space and dollars."""
    text = re.sub(r"\b(?:the|a|an)\b", " ", TEXT.sub(r" \1 ", text).casefold())
    return re.sub(r"[\s{}$.]+", "", text)


def plain(gold: str, answer: str) -> bool | None:
    """The verdict where it needs no algebra: the same text, or two numbers. None: it does."""
    gold, answer = clean(gold), clean(answer)
    if gold.replace(" ", "") == answer.replace(" ", ""):
        return True
    right, stripped = number(gold), NAMED.sub("", UNIT.sub("", answer))
    given = number(stripped)
    if right is not None and given is not None and (right == given or right.denominator == 1 or "." not in stripped):
        return right == given
    if wordy(gold):
        return words(gold) == words(answer)
    return None


def equivalent(gold: str, answer: str) -> bool:
    """Whether the answer is the right one."""
    if (verdict := plain(gold, answer)) is not None:
        return verdict
    gold, answer = clean(gold), UNIT.sub("", clean(answer))
    from math_verify import verify

    right, given = _parse(gold), _parse(answer)
    if right is None or given is None:
        return False
    exact = _exact(right), _exact(given)
    if exact[0] is not None and exact[1] is not None:
        return bool(exact[0] == exact[1])
    return bool(verify(right, given, timeout_seconds=None)) and _near(right, given)


def _parse(text: str) -> Any:
    """The sympy form of the whole text, or None."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Without its units: to it the `m` of `2 - 2m` is a metre.
    normal = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normal)]
    found = parse(f"${text}$", config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    return found[0] if found else None


def _exact(value: Any) -> Any:
    """The rational number that an expression is, or None: differences of large ones are not seen in floating point."""
    import sympy

    try:
        value = value.doit()
    except Exception:  # noqa: BLE001 - sympy raises anything
        return None
    return value if isinstance(value, sympy.Rational) else None


def _near(right: Any, given: Any) -> bool:
    """A decimal fraction must be near in relation to the number too, not only in its sixth decimal."""
    import sympy

    if not isinstance(given, sympy.Float) or not getattr(right, "is_number", False):
        return True
    value = complex(right.evalf())
    return abs(value - complex(given)) <= RELATIVE * abs(value)
