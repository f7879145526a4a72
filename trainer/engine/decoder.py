"""The forward pass of the embedded engine: a Hugging Face decoder's own weights and mathematics in a third of the operations.

Flows in: packed tokens, their positions, the step's `KVSlots`. Flows out: hidden states. On small models and short steps the
number of operations is the cost: q, k and v are one product, so are gate and up, a residual is added by the product before it,
and a mixture's few experts see all tokens of a short step instead of tokens sorted by expert.

Fused weights are the storage of the model's own parameters, so loading weights into the model in place is seen here at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import KV

FAMILIES = ("llama", "qwen3", "qwen3_moe")
DENSE = 2**23
"""Every expert sees every token while tokens times weights of all gate and up projections are not more than this."""


def decoder(model: Any) -> Decoder | HfDecoder:
    """The forward of `model`: ours if its family is known and its layers have no biases, else transformers'."""
    config = model.config
    biased = any(name.endswith("bias") for name, _ in model.named_parameters())
    known = config.model_type in FAMILIES and not biased and getattr(config, "sliding_window", None) is None
    return Decoder(model.model) if known else HfDecoder(model.model)


class HfDecoder:
    """Transformers' forward."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """Hidden states [N, width] of N packed tokens."""
        out = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False, kv=kv)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]


class Decoder:
    """Ours."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = [Layer(layer, number) for number, layer in enumerate(model.layers)]

    def __call__(self, ids: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """Hidden states [N, width] of N packed tokens."""
        x = self._model.embed_tokens(ids)
        cos, sin = (part[0, :, None] for part in self._model.rotary_emb(x[None], positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer in self._layers:
            x = layer(x, cos, sin, kv)
        return _norm(self._model.norm, x)


class Layer:
    """One transformer layer."""

    def __init__(self, layer: Any, number: int) -> None:
        self._layer, self._number = layer, number
        a = layer.self_attn
        self._qkv = fuse(a.q_proj, a.k_proj, a.v_proj)
        queries, keys = (proj.weight.shape[0] // a.head_dim for proj in (a.q_proj, a.k_proj))
        self._heads = queries, keys
        self._norms = fuse(a.q_norm, a.k_norm).view(2, -1) if hasattr(a, "q_norm") else None
        self._which = torch.tensor([0] * queries + [1] * keys)
        self._gate_up = None if hasattr(layer.mlp, "experts") else fuse(layer.mlp.gate_proj, layer.mlp.up_proj)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KV) -> Tensor:
        """[N, width]; `sin` carries the sign of rotated halves."""
        a, dim = self._layer.self_attn, cos.shape[-1]
        qkv = F.linear(_norm(self._layer.input_layernorm, x), self._qkv).view(len(x), -1, dim)
        queries, keys = self._heads
        rotated = qkv[:, : queries + keys]
        if self._norms is not None:
            rotated = F.rms_norm(rotated, (dim,), None, a.q_norm.variance_epsilon) * self._norms[self._which]
        rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
        parts = rotated[:, :queries], rotated[:, queries:], qkv[:, queries + keys :]
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mixed = kv.attend(self._number, q, k, v, a.scaling)
        x = torch.addmm(x, mixed.reshape(len(x), -1), a.o_proj.weight.t())
        return self._mlp(x, _norm(self._layer.post_attention_layernorm, x))

    def _mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        mlp = self._layer.mlp
        if self._gate_up is None:
            return x + self._experts(normed)
        gate, up = F.linear(normed, self._gate_up).chunk(2, -1)
        return torch.addmm(x, mlp.act_fn(gate) * up, mlp.down_proj.weight.t())

    def _experts(self, x: Tensor) -> Tensor:
        mlp = self._layer.mlp
        experts = mlp.experts
        _, weights, chosen = mlp.gate(x)
        if len(x) * experts.gate_up_proj.numel() > DENSE:
            return experts(x, chosen, weights)  # type: ignore[no-any-return]
        share = x.new_zeros(len(x), experts.num_experts, 1).scatter_(1, chosen[..., None], weights[..., None])
        gate, up = F.linear(x, experts.gate_up_proj.flatten(0, 1)).view(len(x), experts.num_experts, -1).chunk(2, -1)
        inner = experts.act_fn(gate) * up * share
        return torch.bmm(inner.transpose(0, 1), experts.down_proj.transpose(1, 2)).sum(0)


@torch.no_grad()
def fuse(*modules: Any) -> Tensor:
    """The modules' weights laid end to end; they become views of the result."""
    weights: list[nn.Parameter] = [module.weight for module in modules]
    whole = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
        weight.data = part
    return whole


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
