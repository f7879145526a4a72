"""The key-value cache of the embedded engine: one slot per running sequence, padded to a common capacity that doubles when
needed.

Flows in: the rows of one engine step (slot, first position, token count), then per layer queries, keys and values of those
tokens laid end to end. Flows out: the attention output. Single-token rows must come first, in the order of their slots; they
are attended together, in place where their slots lie close.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SPREAD = 2
"""Single-token rows are attended in place if their slots span at most this many times their number; else copied together."""


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
        singles = sum(row.count == 1 for row in rows)
        self._singles, self._others = rows[:singles], rows[singles:]
        position = torch.tensor([row.start + i for row in rows for i in range(row.count)])
        slot = torch.tensor([row.slot for row in rows for _ in range(row.count)])
        heads = self._shape[2]
        self._lines = ((slot[:, None] * heads + torch.arange(heads)) * capacity + position[:, None]).flatten()
        if singles:
            self._begin_singles(slot[:singles], position[:singles] + 1)
        self._masks = [
            None if row.start == 0 else torch.ones(row.count, row.start + row.count, dtype=torch.bool).tril(row.start)
            for row in self._others
        ]
        return position

    def _begin_singles(self, slots: Tensor, lengths: Tensor) -> None:
        """Where the single-token rows lie: a stretch of slots, with gaps in it or not, or slots to be copied together."""
        first, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
        self._longest = int(lengths.max())
        self._stretch = slice(first, first + span) if span <= SPREAD * len(slots) else None
        self._slots, self._inside = slots, None
        if self._stretch is not None and span > len(slots):
            self._inside = slots - first
            lengths = torch.ones(span, dtype=torch.int64).index_copy_(0, self._inside, lengths)
        unseen = torch.arange(self._longest) >= lengths[:, None]
        self._mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store [1, kv_heads, N, head_dim] keys and values; attention output [1, N, heads, head_dim]."""
        keys, values = self._keys[layer], self._values[layer]
        dim = keys.shape[3]
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, dim).index_copy_(0, self._lines, new[0].transpose(0, 1).reshape(-1, dim))
        parts: list[Tensor] = []
        at = len(self._singles)
        if at:
            parts.append(self._attend_singles(query[0, :, :at].transpose(0, 1), keys, values, scale))
        gqa = query.shape[1] != key.shape[1]
        for row, mask in zip(self._others, self._masks, strict=True):
            past = slice(row.slot, row.slot + 1), slice(None), slice(row.start + row.count)
            out = F.scaled_dot_product_attention(
                query[:, :, at : at + row.count],
                keys[past],
                values[past],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=gqa,
            )
            parts.append(out[0].transpose(0, 1))
            at += row.count
        return torch.cat(parts)[None]

    def _attend_singles(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[S, heads, head_dim] for queries of that shape. Heads that share keys are handled as positions of one head."""
        grouped = query.reshape(len(query), keys.shape[1], -1, keys.shape[3])
        if self._stretch is None:
            keys, values = (x[:, :, : self._longest].index_select(0, self._slots) for x in (keys, values))
        else:
            keys, values = (x[self._stretch, :, : self._longest] for x in (keys, values))
        if self._inside is not None:
            grouped = grouped.new_zeros(len(keys), *grouped.shape[1:]).index_copy_(0, self._inside, grouped)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        if self._inside is not None:
            out = out.index_select(0, self._inside)
        return out.reshape(query.shape)
