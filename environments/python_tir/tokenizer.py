"""The tiny policy's tokenizer for synthetic level 1: every byte, plus its words and numbers as single tokens.

`python -m environments.python_tir.tokenizer FOLDER` writes `tokenizer.json` and `chat_template.jinja`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from environments.python_tir.prompt import SYSTEM
from environments.python_tir.synthetic import OPERATIONS, SMALL
from environments.toy_repair import tokenizer

WORDS = (
    "system\n", "user\n", "assistant\n", "tool\n", "tools:", " python", SYSTEM, "What is the ", " of ", " and ", "?",
    '<tool_call>\n{"name": "python", "arguments": {"code": "', '"}}\n</tool_call>', "\\boxed{", "}", "[no output]", "\n",
    *OPERATIONS, *(f" {sign} " for sign, _ in OPERATIONS.values()), *map(str, range(max(SMALL) ** 2 + 1)),
)  # fmt: skip


def write(folder: Path) -> None:
    """Write the two files that a model folder needs beside its weights."""
    tokenizer.write(folder, WORDS)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
