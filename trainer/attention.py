"""The attention of packed sequences, registered with transformers under the name `sao`, for training and for the embedded
engine.

Flows in: queries, keys and values of N packed tokens [1, heads, N, head_dim] and, as keyword arguments of the model's forward,
either `cu_seqlens` (training: B+1 Python ints) or `kv` (generation: a `KVSlots`). No mask is ever built; sequences cannot see
each other by construction.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "sao"


class KV(Protocol):
    """A key-value cache that stores and attends; the embedded engine's `KVSlots`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append the new keys and values, return the attention output [1, N, heads, head_dim]."""
        ...


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seqlens: list[int] | None = None,
    kv: KV | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence."""
    if attention_mask is not None or dropout or options.get("sliding_window") is not None:
        raise NotImplementedError("packed attention takes no mask, dropout or sliding window")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if kv is not None:
        return kv.attend(module.layer_idx, query, key, value, scale), None
    if cu_seqlens is None:
        raise ValueError("packed attention needs cu_seqlens or kv")
    gqa = query.shape[1] != key.shape[1]
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        for q, k, v in zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
