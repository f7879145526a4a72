"""The tiny policy's tokenizer: every byte, plus the words of toy_repair as single tokens. Any text round-trips exactly.

`python -m environments.toy_repair.tokenizer FOLDER` writes `tokenizer.json` and `chat_template.jinja`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from environments.toy_repair.tasks import NAMES, NUMBERS, PROMPT

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
WORDS = (
    "system\n", "user\n", "assistant\n", "tool\n", "tools:", PROMPT,
    " run_tests", " read_code", " edit", " finish",
    '<tool_call>\n{"name": "', '}}\n</tool_call>',
    'run_tests", "arguments": {', 'read_code", "arguments": {', 'edit", "arguments": {', 'finish", "arguments": {',
    '{"want"', '"want"', '"got"', '"use": ', '"ok": false}', '{"ok": true}', '{"error": "', '", "ok": false}',
    "NameError", "edited", "done", "error: run the tests first", "error: no edit is left", "\n",
    *(f'"{n}"' for n in NAMES), *(f": {k}, " for k in NUMBERS),
)  # fmt: skip

TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """Byte-level base without merges; longest match of the added words first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(w, special=False, normalized=False) for w in words])
    return tokenizer


def write(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Write the two files that a model folder needs beside its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
