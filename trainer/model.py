"""Policy and critic: a Hugging Face decoder with the packed attention, and heads that read only the positions asked for.

Flows in: a model folder (or fields of config.json for random weights) and packed tokens. Flows out: log-probs of chosen tokens,
values of all states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from harness.errors import ConfigError
from harness.registry import nearest
from trainer import attention
from trainer.logprobs import token_logprobs
from trainer.weights import load_folder


class Policy(nn.Module):
    """The language model. `forward` scores chosen tokens without ever holding all logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: list[int], where: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (nats, fp32, [len(where)]) of the tokens at indices `where` (int64, none starts a
        sequence).
        """
        hidden = self.model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, cu_seqlens=cu_seqlens
        ).last_hidden_state[0]
        return token_logprobs(hidden[where - 1], self.model.lm_head.weight, tokens[where].long())


class Critic(nn.Module):
    """The value model: the policy's backbone and a scalar fp32 head after the final norm (algorithm.md 3.1)."""

    def __init__(self, backbone: Any, bias: float = 0.0) -> None:
        super().__init__()
        self.model = backbone
        self.v_head = nn.Linear(backbone.config.hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.v_head.weight)
        nn.init.constant_(self.v_head.bias, bias)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: list[int]) -> Tensor:
        """V of the state AFTER each token, fp32 [N]; V before token t is entry t - 1."""
        hidden = self.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, cu_seqlens=cu_seqlens
        ).last_hidden_state[0]
        return self.v_head(hidden.float())[:, 0]  # type: ignore[no-any-return]


def build_policy(folder: Path) -> Policy:
    """The policy from a model folder, fp32 master weights."""
    model = _build(AutoModelForCausalLM, AutoConfig.from_pretrained(folder))
    load_folder(model, folder)
    return Policy(model)


def random_policy(fields: dict[str, Any], seed: int) -> Policy:
    """The policy with random weights from the fields of a config.json."""
    default = AutoConfig.for_model(fields["model_type"])
    known = {*default.to_dict(), *default.attribute_map, "head_dim"}
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"`model.scratch.{name}` is not a field of {fields['model_type']}", hint=nearest(name, list(known))
            )
    torch.manual_seed(seed)
    model = _build(AutoModelForCausalLM, AutoConfig.for_model(**fields))
    model.config.architectures = [type(model).__name__]  # other readers of the folder find the class by it
    return Policy(model)


def build_critic(folder: Path, bias: float = 0.0) -> Critic:
    """A critic from a policy folder (fresh head with `bias`) or from a critic folder (its own head)."""
    backbone = _build(AutoModel, AutoConfig.from_pretrained(folder))
    critic = Critic(backbone, bias)
    load_folder(critic if is_critic(folder) else critic.model, folder, prefix="" if is_critic(folder) else "model.")
    return critic


def _build(auto: Any, config: PretrainedConfig) -> Any:
    return auto.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)


def is_critic(folder: Path) -> bool:
    """True if the folder was written from a critic."""
    return (folder / "critic.json").is_file()


def critic_record(folder: Path) -> dict[str, Any] | None:
    """What value pre-training wrote beside a critic's weights: its gate, its data; None for a policy folder."""
    return json.loads((folder / "critic.json").read_text()) if is_critic(folder) else None
