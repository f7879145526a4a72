"""Which parameters train, by Hugging Face name, on real (tiny) models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from trainer.freeze import freeze, module_group

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


class TinyCritic(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = AutoModel.from_config(AutoConfig.for_model(family, **TINY, **MODELS[family]))
        self.v_head = nn.Linear(16, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.v_head(self.model(input_ids=tokens, use_cache=False).last_hidden_state)
        return hidden.square().mean()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("model.layers.3.self_attn.k_proj.bias", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "attention"),
        ("model.layers.3.linear_attn.in_proj_qkvz.weight", "linear_attention"),
        ("model.layers.3.linear_attn.norm.weight", "linear_attention"),
        ("model.layers.3.linear_attn.A_log", "linear_attention"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "dense_mlp"),
        ("model.layers.3.mlp.down_proj.bias", "dense_mlp"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.3.mlp.experts.down_proj", "experts"),
        ("model.layers.3.mlp.experts.127.gate_proj.weight", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared_expert"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.3.input_layernorm.weight", "norms"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("norm.weight", "norms"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "embeddings"),
        ("v_head.bias", "value_head"),
        ("critic.v_head.weight", "value_head"),
        ("score.weight", "value_head"),
    ],
)
def test_module_group(name: str, group: str) -> None:
    assert module_group(name) == group


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_projection.weight",
        "model.layers.0.mlp.experts.linear_fc1.weight0",
        "model.layers.0.mixer.in_proj.weight",
        "model.layers.0.xmlp.gate_proj.weight",
        "value_head.weight",
    ],
)
def test_an_unknown_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        module_group(name)


@pytest.mark.parametrize("family", MODELS)
def test_mlp_only_trains_exactly_the_projections_and_the_head(family: str) -> None:
    model = TinyCritic(family)
    report = freeze(model, "mlp_only")
    expected = [
        name
        for name, _ in model.named_parameters()
        if name.startswith("v_head") or (".mlp." in name and not name.endswith("mlp.gate.weight"))
    ]
    assert report.trainable == expected == [name for name, p in model.named_parameters() if p.requires_grad]
    per_layer = 2 if family == "qwen3_moe" else 3
    assert len(report.trainable) == 2 * per_layer + 2
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert set(report.trainable) | set(report.frozen) == set(sizes)
    assert report.n_trainable == sum(sizes[name] for name in report.trainable)
    assert report.n_trainable + report.n_frozen == sum(sizes.values())


@pytest.mark.parametrize("family", MODELS)
def test_no_attn_freezes_exactly_the_attention(family: str) -> None:
    model = TinyCritic(family)
    report = freeze(model, "no_attn")
    assert report.frozen == [name for name, _ in model.named_parameters() if ".self_attn." in name]
    assert report.frozen


def unfused() -> nn.Module:
    """The names of an MoE as files and transformers 4 have them: three matrices for each expert."""

    def linear() -> nn.Linear:
        return nn.Linear(4, 4, bias=False)

    def layer() -> nn.ModuleDict:
        experts = [nn.ModuleDict({f"{name}_proj": linear() for name in ("gate", "up", "down")}) for _ in range(3)]
        return nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({"q_proj": linear(), "o_proj": linear(), "q_norm": nn.RMSNorm(4)}),
                "mlp": nn.ModuleDict({"gate": nn.Linear(4, 3, bias=False), "experts": nn.ModuleList(experts)}),
                "post_attention_layernorm": nn.RMSNorm(4),
            }
        )

    backbone = {"embed_tokens": nn.Embedding(8, 4), "layers": nn.ModuleList([layer(), layer()]), "norm": nn.RMSNorm(4)}
    return nn.ModuleDict({"model": nn.ModuleDict(backbone), "v_head": nn.Linear(4, 1)})


@pytest.mark.parametrize("scheme", ["mlp_only", "no_attn"])
def test_experts_by_their_own_names(scheme: Any) -> None:
    """20 steps with weight decay, a gradient for whatever would take one, an optimizer that is offered everything."""
    torch.manual_seed(0)
    model = unfused()
    experts = {
        f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight" for i in (0, 1) for e in range(3) for x in ("gate", "up", "down")
    }
    attention = {name for name, _ in model.named_parameters() if ".self_attn." in name}
    report = freeze(model, scheme)
    if scheme == "mlp_only":
        assert set(report.trainable) == experts | {"v_head.weight", "v_head.bias"}
        assert report.kinds()["model.layers.*.mlp.experts.*.up_proj.weight"] == 6
    else:
        assert set(report.frozen) == attention and len(attention) == 6
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for _ in range(20):
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(report.trainable) and len(optimizer.state) == len(moved)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("scheme", ["mlp_only", "no_attn"])
def test_frozen_parameters_are_bit_identical_after_20_steps(family: str, scheme: Any) -> None:
    torch.manual_seed(0)
    model = TinyCritic(family)
    model(torch.arange(8)[None]).backward()
    freeze(model, scheme)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for _ in range(20):
        model(torch.randint(0, 32, (2, 8))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


def test_freezing_is_undone_by_none() -> None:
    model = TinyCritic("llama")
    freeze(model, "mlp_only")
    report = freeze(model, "all")
    assert report.frozen == []
    assert all(p.requires_grad for p in model.parameters())


def test_an_unknown_parameter_stops_before_anything_changes() -> None:
    model = TinyCritic("llama")
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\.weight, adapter\.bias"):
        freeze(model, "mlp_only")
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_without_mlp_is_refused() -> None:
    model = nn.Module()
    model.v_head = nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r"no MLP projection.*v_head\.weight"):
        freeze(model, "mlp_only")


def test_hybrid_layers_and_shared_experts() -> None:
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.linear_attn = nn.Linear(2, 2, bias=False)
    model.layer.mlp = nn.ModuleDict(
        {
            "shared_expert": nn.ModuleDict({"up_proj": nn.Linear(2, 2, bias=False)}),
            "shared_expert_gate": nn.Linear(2, 1, bias=False),
        }
    )
    attention, expert, gate = (
        "layer.linear_attn.weight",
        "layer.mlp.shared_expert.up_proj.weight",
        "layer.mlp.shared_expert_gate.weight",
    )
    assert freeze(model, "mlp_only").trainable == [expert]
    report = freeze(model, "no_attn")
    assert (report.trainable, report.frozen) == ([expert, gate], [attention])
