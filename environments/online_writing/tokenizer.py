"""The tiny policy's tokenizer for tier A: `python -m environments.online_writing.tokenizer FOLDER` writes its two files."""

from __future__ import annotations

import sys
from pathlib import Path

from environments import word_tokenizer
from environments.online_writing.symbols import WORDS


def write(folder: Path) -> None:
    """Write `tokenizer.json` and `chat_template.jinja`."""
    word_tokenizer.write(folder, WORDS)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
