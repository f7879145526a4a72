"""The deterministic judge of tier B: counts the markers of each style (algorithm.md 6.2).

Flows in: a reply. Flows out: a `Verdict`. The first line `Style: <name>` is what the writer says of itself: it is not counted,
neither as a marker nor as a word. Words are compared without case and only as whole words; emoji anywhere.
"""

from __future__ import annotations

import re
from collections import Counter

from environments.online_writing.verdict import Style, Verdict

MIN_SCORE = 3
MIN_WORDS = 20
MIN_BIGRAM_RATIO = 0.6
MAX_REPEATS = 4

MARKERS: dict[Style, tuple[str, ...]] = {
    "academic": (
        "therefore", "furthermore", "moreover", "consequently", "however", "thus", "hence", "whereas", "according to",
        "et al", "evidence", "hypothesis", "analysis", "significant", "empirical", "framework", "literature", "findings",
        "methodology", "in conclusion", "in contrast", "this paper", "the data", "researchers", "study",
    ),
    "cute": (
        "tiny", "little", "fluffy", "cuddly", "cozy", "sweetie", "teeny", "itty-bitty", "snuggle", "snuggly", "giggle", "yay",
        "hehe", "aww", "meow", "nya", "boop", "squishy", "adorable", "kitty", "bunny", "twinkle", "hug", "sparkly", "~",
        "💕", "🌸", "✨", "🐾", "🥰",
    ),
    "chuunibyou": (
        "sealed power", "dark flame", "destiny", "abyss", "forbidden", "awaken", "awakened", "awakens", "my right eye",
        "cursed", "the chosen one", "ancient seal", "unleash", "darkness", "shadow", "eternal", "prophecy", "fools", "mortal",
        "mortals", "dragon", "oblivion", "true form", "the organization", "crimson",
    ),
    "classical": (
        "thou", "thee", "thy", "thine", "hath", "doth", "hast", "art thou", "wherefore", "hither", "thither", "whence", "ere",
        "'tis", "'twas", "lo", "o'er", "verily", "behold", "alas", "yonder", "oft", "nay", "methinks", "forsooth",
    ),
}  # fmt: skip

_DECLARED = re.compile(r"\A\s*style\s*:[^\n]*(?:\n|\Z)", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def body(reply: str) -> str:
    """The reply without its first line, if that names the style."""
    return _DECLARED.sub("", reply, count=1)


def hits(text: str) -> dict[Style, Counter[str]]:
    """How often each marker of each style occurs."""
    plain = text.casefold().replace("’", "'")
    return {style: Counter(match.group() for match in pattern.finditer(plain)) for style, pattern in _PATTERNS.items()}


def judge(reply: str, topic: str, preferred: Style) -> Verdict:
    """Style: the preferred one alone has the most markers, and at least 3.

    Quality: the topic occurs, at least 20 words, at least 60 % of the bigrams distinct, no marker more than 4 times. That the
    reply ended by itself is the caller's to know.
    """
    text = body(reply)
    found = hits(text)
    scores = sorted(((counts.total(), style) for style, counts in found.items()), reverse=True)
    (best, written), (second, _) = scores[:2]
    clear = best >= MIN_SCORE and best > second
    words = _WORD.findall(text.casefold())
    bigrams = list(zip(words, words[1:], strict=False))
    quality = (
        topic.casefold() in text.casefold()
        and len(words) >= MIN_WORDS
        and len(set(bigrams)) >= MIN_BIGRAM_RATIO * len(bigrams)
        and max((n for counts in found.values() for n in counts.values()), default=0) <= MAX_REPEATS
    )
    return Verdict(style=clear and written == preferred, quality=quality, written=written if clear else None)


def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Any of them as whole words, longest first; what has no letters is found anywhere."""
    ordered = sorted(markers, key=len, reverse=True)
    found = [rf"(?<!\w){re.escape(m)}(?!\w)" if any(c.isalpha() for c in m) else re.escape(m) for m in ordered]
    return re.compile("|".join(found))


_PATTERNS = {style: _pattern(markers) for style, markers in MARKERS.items()}
