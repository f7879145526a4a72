"""A tokenizer for languages of a few dozen words: one token per word, words parted by single spaces, for tiny policies.

Flows in: the words. Flows out: `tokenizer.json` and `chat_template.jinja`, the two files that a model folder needs beside its
weights. Text in these words round-trips exactly; whatever is not among them is `<unk>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
TEMPLATE = (
    "<bos>{% for message in messages %} {{ message.content }}{% if message.role == 'assistant' %} <eos>{% endif %}{% endfor %}"
)


def build(words: Sequence[str]) -> Tokenizer:
    """A table of the special tokens and `words`."""
    table = {word: i for i, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab=table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


def write(folder: Path, words: Sequence[str]) -> None:
    """Write the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    build(words).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
