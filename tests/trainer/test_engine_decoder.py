"""The embedded engine's own forward and its cache, piece by piece: against transformers, and against one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer import support
from trainer.engine import decoder as decoder_module
from trainer.engine.decoder import Decoder, HfDecoder, decoder
from trainer.engine.slots import KVSlots, Row
from trainer.weights import export, load_tensors


def cache(model: Any, slots: int = 2) -> KVSlots:
    config = model.config
    return KVSlots(config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim, 512)


def hidden(forward: Decoder | HfDecoder, model: Any, tokens: Tensor) -> Tensor:
    """A prompt in one step, then two tokens one by one."""
    kv, parts = cache(model), []
    for start, stop in ((0, len(tokens) - 2), (len(tokens) - 2, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        positions = kv.begin([Row(1, start, stop - start)])
        parts.append(forward(tokens[start:stop], positions, kv))
    return torch.cat(parts)


@pytest.mark.parametrize("dense", [0, 2**40], ids=["sorted", "dense"])
@pytest.mark.parametrize("family", decoder_module.FAMILIES)
@torch.inference_mode()
def test_ours_is_transformers_forward(family: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether experts see all tokens or those that chose them."""
    monkeypatch.setattr(decoder_module, "DENSE", dense)
    model = support.policy(family).model.eval()
    tokens = torch.randint(0, support.VOCAB, (60,), generator=torch.Generator().manual_seed(0))
    expected = hidden(HfDecoder(model.model), model, tokens)
    ours = decoder(model)
    assert isinstance(ours, Decoder)
    torch.testing.assert_close(hidden(ours, model, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", decoder_module.FAMILIES)
def test_loaded_weights_are_seen_and_given_out_again(family: str) -> None:
    """The fused weights are the parameters' own storage."""
    model, other = support.policy(family).model.eval(), support.policy(family, seed=1).model.eval()
    ours, tokens = decoder(model), torch.arange(10)
    load_tensors(model, dict(export(other)))
    with torch.inference_mode():
        expected = hidden(HfDecoder(other.model), other, tokens)
        torch.testing.assert_close(hidden(ours, model, tokens), expected, atol=1e-5, rtol=1e-5)
    for (name, tensor), (_, theirs) in zip(export(model), export(other), strict=True):
        assert torch.equal(tensor, theirs), name


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"model_type": "qwen2"}], ids=["biases", "family"])
def test_what_is_not_known_is_left_to_transformers(changes: dict[str, Any]) -> None:
    model = support.policy("llama", **changes).model
    assert isinstance(decoder(model), HfDecoder)


@pytest.mark.parametrize(
    "slots", [[0], [2, 3, 4], [1, 3, 4], [0, 7], [0, 5, 6, 7]], ids=["one", "close", "gap", "copied", "wide gap"]
)
@pytest.mark.parametrize("shared", [1, 3], ids=["mha", "gqa"])
def test_wherever_the_slots_lie(slots: list[int], shared: int) -> None:
    """Single-token rows, with a prompt in another slot beside them, against plain attention of each."""
    generator = torch.Generator().manual_seed(len(slots))
    heads, dim = 2, 8

    def draw(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(  # type: ignore[return-value]
            torch.randn(1, n, tokens, dim, generator=generator) for n in (heads * shared, heads, heads)
        )

    kv = KVSlots(1, 9, heads, dim, 64)
    past = {slot: draw(3 + slot) for slot in slots}
    for slot, (query, key, value) in past.items():
        kv.begin([Row(slot, 0, 3 + slot)])
        kv.attend(0, query, key, value, 0.3)
    rows = [*(Row(slot, 3 + slot, 1) for slot in slots), Row(8, 0, 5)]
    query, key, value = draw(len(slots) + 5)
    kv.begin(rows)
    got = kv.attend(0, query, key, value, 0.3)[0]
    assert got.shape == (len(slots) + 5, heads * shared, dim)
    for number, slot in enumerate(slots):
        keys = torch.cat((past[slot][1], key[:, :, number : number + 1]), 2)
        values = torch.cat((past[slot][2], value[:, :, number : number + 1]), 2)
        expected = F.scaled_dot_product_attention(query[:, :, number : number + 1], keys, values, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got[number], expected[0, :, 0])
    at = slice(len(slots), None)
    expected = F.scaled_dot_product_attention(
        query[:, :, at], key[:, :, at], value[:, :, at], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got[at].transpose(0, 1), expected[0])
