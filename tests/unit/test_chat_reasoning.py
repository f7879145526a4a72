"""Reasoning is told from the answer before calls are looked for; prompts that open it are seen; stop tokens of a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.toy_repair import tokenizer
from harness.chat import Chat, split_reasoning
from tests.support import USER, tool_call

CALL = tool_call("edit", "{}")


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        ("plain", False, "", "plain"),
        ("", False, "", ""),
        ("  kept as it is \n", False, "", "  kept as it is \n"),
        ("<think>\nlook\n</think>\n\nsaid", False, "look", "\n\nsaid"),
        ("\n<think>look</think>said", False, "look", "said"),
        ("<think></think>said", False, "", "said"),
        ("<think>\n\n</think>\n\n", False, "", "\n\n"),
        ("look</think>said", True, "look", "said"),
        ("<think>look</think>said", True, "look", "said"),
        ("never closed", True, "never closed", ""),
        ("<think>never closed", False, "never closed", ""),
        ("<think>" + CALL, False, CALL, ""),
        (f"<think>maybe {CALL}</think>{CALL}", False, f"maybe {CALL}", CALL),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think>a<think>b</think>c", False, "a<think>b", "c"),
        ("<think>a</think>b<think>c</think>d", False, "a", "b<think>c</think>d"),
        ("first <think>a</think>", False, "", "first <think>a</think>"),
        (tool_call("edit", '{"x": "</think>"}'), False, "", tool_call("edit", '{"x": "</think>"}')),
        ("<think", False, "", "<think"),
        ("<thinking>a</thinking>", False, "", "<thinking>a</thinking>"),
        ("é✓</think>\ufffd", True, "é✓", "\ufffd"),
    ],
)
def test_reasoning_is_what_an_open_block_holds(text: str, opened: bool, reasoning: str, rest: str) -> None:
    assert split_reasoning(text, opened) == (reasoning, rest)


@pytest.mark.parametrize(
    ("behind", "opens"),
    [("<think>\n", True), ("<think>", True), ("", False), ("<think>\n\n</think>\n\n", False), ("<think> go", False)],
)
def test_a_prompt_that_opens_reasoning_is_seen(tmp_path: Path, behind: str, opens: bool) -> None:
    tokenizer.write(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(tokenizer.TEMPLATE.removesuffix("{% endif %}") + behind + "{% endif %}")
    chat = Chat(tmp_path, ["<|im_end|>"])
    assert chat.opens_thinking(chat.opening([USER], [])) is opens
    assert chat.opens_thinking(chat.continuation([USER], [{"role": "user", "content": "<think>"}], [])) is opens


def test_a_turn_that_ended_with_another_stop_token_gets_the_templates_own(tmp_path: Path) -> None:
    tokenizer.write(tmp_path)
    chat = Chat(tmp_path, ["<|im_end|>", "<|pad|>"])
    end, other = chat.stop_ids
    by_default = chat.continuation([USER], [USER], [])
    assert by_default == chat.encode("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert chat.continuation([USER], [USER], [], end) == by_default
    assert chat.continuation([USER], [USER], [], other) == [end, *by_default]
    assert chat.continuation([USER], [USER], [], 5) == [end, *by_default]
