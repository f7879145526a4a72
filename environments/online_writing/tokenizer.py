"""The tiny policy's tokenizer: one token per word of tier A. Words parted by single spaces round-trip exactly.

`python -m environments.online_writing.tokenizer FOLDER` writes `tokenizer.json` and `chat_template.jinja`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from environments.online_writing.symbols import WORDS

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
TEMPLATE = (
    "<bos>{% for message in messages %} {{ message.content }}{% if message.role == 'assistant' %} <eos>{% endif %}{% endfor %}"
)


def build_tokenizer() -> Tokenizer:
    """A table of words; whatever is not in it is `<unk>`."""
    words = (*SPECIAL, *WORDS)
    tokenizer = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


def write(folder: Path) -> None:
    """Write the two files that a model folder needs beside its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
