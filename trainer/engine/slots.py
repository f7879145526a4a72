"""The key-value cache of the embedded engine: one slot per running sequence, padded to a common capacity that doubles when
needed.

Flows in: the rows of one engine step (slot, first position, token count), then per layer queries, keys and values of those
tokens laid end to end. Flows out: the attention output. Single-token rows must come first; they are attended together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of the sequence in `slot`, the first at position `start`."""

    slot: int
    start: int
    count: int


class KVSlots:
    """Keys and values, each [layers, slots, kv_heads, capacity, head_dim]."""

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, max_len: int) -> None:
        self.max_len = max_len
        self._shape = (layers, slots, kv_heads, head_dim)
        self._keys = self._empty(min(256, max_len))
        self._values = torch.zeros_like(self._keys)  # zeros: a masked position has weight 0, and 0 * garbage may be NaN
        self._rows: list[Row] = []

    def _empty(self, capacity: int) -> Tensor:
        layers, slots, heads, dim = self._shape
        return torch.zeros(layers, slots, heads, capacity, dim)

    def begin(self, rows: list[Row]) -> Tensor:
        """Set up one step. Returns the positions of its tokens, int64 [N]."""
        need = max(row.start + row.count for row in rows)
        capacity = self._keys.shape[3]
        while capacity < need:
            capacity = min(2 * capacity, self.max_len)
        if capacity > self._keys.shape[3]:
            keys, values = self._empty(capacity), self._empty(capacity)
            keys[:, :, :, : self._keys.shape[3]] = self._keys
            values[:, :, :, : self._values.shape[3]] = self._values
            self._keys, self._values = keys, values
        self._rows = rows
        self._slot = torch.tensor([row.slot for row in rows for _ in range(row.count)])
        self._position = torch.tensor([row.start + i for row in rows for i in range(row.count)])
        self._singles = sum(row.count == 1 for row in rows)
        if self._singles:
            lengths = self._position[: self._singles] + 1
            self._longest = int(lengths.max())
            self._mask = (torch.arange(self._longest) < lengths[:, None])[:, None, None, :]
        return self._position

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store [1, kv_heads, N, head_dim] keys and values; attention output [1, N, heads, head_dim]."""
        keys, values = self._keys[layer], self._values[layer]
        keys[self._slot, :, self._position] = key[0].transpose(0, 1)
        values[self._slot, :, self._position] = value[0].transpose(0, 1)
        gqa = query.shape[1] != key.shape[1]
        parts: list[Tensor] = []
        s = self._singles
        if s:
            slots = self._slot[:s]
            out = F.scaled_dot_product_attention(
                query[0, :, :s].transpose(0, 1)[:, :, None],
                keys[slots, :, : self._longest],
                values[slots, :, : self._longest],
                attn_mask=self._mask,
                scale=scale,
                enable_gqa=gqa,
            )
            parts.append(out[:, :, 0].transpose(0, 1)[None])
        at = s
        for row in self._rows[s:]:
            stop = row.start + row.count
            mask = torch.ones(row.count, stop, dtype=torch.bool).tril(diagonal=row.start)
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, at : at + row.count],
                    keys[row.slot : row.slot + 1, :, :stop],
                    values[row.slot : row.slot + 1, :, :stop],
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=gqa,
                )
            )
            at += row.count
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()
