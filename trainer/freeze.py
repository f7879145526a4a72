"""Which parameters of the critic train: SAO (arXiv 2607.07508, section 3) freezes its attention and trains the MLP projections.

Every parameter belongs to exactly one group by its Hugging Face name (Qwen3-MoE fused or per expert, Qwen2/2.5/3, Llama); a
name that fits no group is an error, because a silent default would train or freeze it unnoticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

Scheme = Literal["mlp_only", "no_attn", "all"]

_GROUPS = {
    "value_head": r"(v_head|score)\.(weight|bias)",
    "linear_attention": r"linear_attn\..+",
    "attention": r"self_attn\..+",
    "router": r"mlp\.(gate|shared_expert_gate)\.weight",
    "shared_expert": r"mlp\.shared_expert\.(gate|up|down)_proj\.(weight|bias)",
    "experts": r"mlp\.experts\.(\d+\.(gate|up|down)_proj\.weight|gate_up_proj|down_proj)",
    "dense_mlp": r"mlp\.(gate|up|down)_proj\.(weight|bias)",
    "norms": r"(input_layernorm|post_attention_layernorm|norm)\.weight",
    "embeddings": r"(embed_tokens|lm_head)\.weight",
}
_PATTERNS = {group: re.compile(rf"(?:.*\.)?{pattern}") for group, pattern in _GROUPS.items()}
_MLP = frozenset({"experts", "shared_expert", "dense_mlp"})
_ATTENTION = frozenset({"attention", "linear_attention"})


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Names in model order, and numbers of elements."""

    trainable: list[str]
    frozen: list[str]
    n_trainable: int
    n_frozen: int

    def kinds(self) -> dict[str, int]:
        """Trainable names with their layer and expert numbers as `*`, and how many parameters each stands for."""
        return dict(Counter(re.sub(r"\b\d+\b", "*", name) for name in self.trainable))


def module_group(name: str) -> str:
    """The group of a parameter: attention, linear_attention, experts, dense_mlp, shared_expert, router (with the gate of a
    shared expert), norms, embeddings (input and output) or value_head. Raises `ValueError` if it fits none.
    """
    return _groups([name])[name]


def freeze(model: nn.Module, scheme: Scheme) -> FreezeReport:
    """Set `requires_grad` of every parameter, drop the gradients of frozen ones, and report. Build the optimizer afterwards.

    mlp_only: MLP and expert projections and the value head train; attention, routers, norms and embeddings are frozen.
    no_attn: only attention is frozen. all: everything trains (value pre-training).

    Raises `ValueError`, changing nothing, if names fit no group or the model has no MLP projection.
    """
    parameters = dict(model.named_parameters())
    groups = _groups(parameters)
    if _MLP.isdisjoint(groups.values()):
        raise ValueError(f"no MLP projection among the parameters: {', '.join(parameters)}")

    trainable = [name for name in parameters if _trains(groups[name], scheme)]
    frozen = [name for name in parameters if not _trains(groups[name], scheme)]
    for name in trainable:
        parameters[name].requires_grad_(True)
    for name in frozen:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None
    return FreezeReport(
        trainable=trainable,
        frozen=frozen,
        n_trainable=sum(parameters[name].numel() for name in trainable),
        n_frozen=sum(parameters[name].numel() for name in frozen),
    )


def _trains(group: str, scheme: Scheme) -> bool:
    if scheme == "mlp_only":
        return group in _MLP or group == "value_head"
    return scheme == "all" or group not in _ATTENTION


def _groups(names: Iterable[str]) -> dict[str, str]:
    groups = {name: next((g for g, pattern in _PATTERNS.items() if pattern.fullmatch(name)), "") for name in names}
    if unknown := [name for name, group in groups.items() if not group]:
        raise ValueError(f"no module group ({', '.join(_PATTERNS)}) for the parameters: {', '.join(unknown)}")
    return groups
