"""Model folders: one file or shards, and what is missing is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from harness.errors import ConfigError
from harness.modelfolder import INDEX, WEIGHTS, weight_files, weights_digest
from trainer.model import build_policy, random_policy
from trainer.weights import export, write_file

FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def test_a_model_in_shards_is_the_same_model(tmp_path: Path) -> None:
    policy = random_policy(FIELDS, seed=0)
    tensors = {name: tensor.contiguous() for name, tensor in export(policy.model)}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        policy.model.config.to_json_file(folder / "config.json")
    write_file(tensors, whole / WEIGHTS)
    places = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, parts / file)
    index(parts, places)
    assert [path.name for path in weight_files(parts)] == sorted(set(places.values()))
    one, other = (dict(build_policy(folder).named_parameters()) for folder in (whole, parts))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert weights_digest(whole) == hashlib.sha256((whole / WEIGHTS).read_bytes()).hexdigest() != weights_digest(parts)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {}}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=INDEX if text != '{"weight_map": {}}' else "0 of 0 shards"):
        weight_files(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither model.safetensors nor"):
        weight_files(tmp_path)
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ConfigError, match=r"1 of 2 shards are missing, \['two.safetensors'\]"):
        weight_files(tmp_path)
