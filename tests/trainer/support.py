"""Tiny real models, random trajectories and learners for the tests of the trainer; also imported by `cases.py` under
torchrun.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from environments.toy_repair import tokenizer
from harness.config import AlgorithmConfig, OptimizerConfig
from harness.trajectory import Trajectory, TrajectoryBuilder
from trainer import objective, parallel
from trainer.freeze import freeze
from trainer.model import Critic, Policy, build_critic, build_policy, random_policy
from trainer.objective import Objective
from trainer.optimizer import Optimizer
from trainer.step import Learners, StepOptions, train_step
from trainer.weights import export, write_file

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
"""The wide initialisation makes log-probs differ by nats, so that nothing passes by chance."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama"},
}


def fields(family: str, **more: Any) -> dict[str, Any]:
    """The config.json of a tiny model."""
    return SHAPE | FAMILIES[family] | more


def policy(family: str = "qwen3_moe", seed: int = 0, **more: Any) -> Policy:
    """A tiny policy; norms are moved off 1 so that forgetting one is seen."""
    made = random_policy(fields(family, **more), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def write_model(folder: Path, made: Policy, config: Any = None) -> Path:
    """A model folder as the worker writes them, with the toy_repair tokenizer."""
    tokenizer.write(folder)
    (config or made.model.config).to_json_file(folder / "config.json", use_diff=True)
    write_file(dict(export(made.model)), folder / "model.safetensors")
    return folder


def critic_of(folder: Path, seed: int = 0, bias: float = 0.3) -> Critic:
    """A critic with a head that is not zero."""
    critic = build_critic(folder, bias)
    nn.init.normal_(critic.v_head.weight, std=0.2, generator=torch.Generator().manual_seed(seed))
    return critic


def trajectory(
    rng: random.Random, name: str, *, prompt: int = 3, turns: int = 2, task: str | None = None, reward: float | None = None
) -> Trajectory:
    """A random multi-turn trajectory of random lengths, ending on an action or on an observation."""
    builder = TrajectoryBuilder()
    builder.observe([rng.randrange(VOCAB) for _ in range(prompt)])
    for turn in range(turns):
        n = rng.randint(1, 6)
        builder.act([rng.randrange(VOCAB) for _ in range(n)], [-rng.random() * 5 for _ in range(n)], [rng.randint(2, 5)] * n)
        if turn + 1 < turns or rng.random() < 0.5:
            builder.observe([rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))])
    reward = float(rng.random() < 0.5) if reward is None else reward
    return builder.build(name, task or f"task-{name}", reward=reward, info={"termination": "finished", "sampling": "s"})


def batch(seed: int, n: int = 6) -> list[Trajectory]:
    """`n` trajectories of very different lengths, both rewards among them."""
    rng = random.Random(seed)
    made = [trajectory(rng, f"{seed}-{i}", prompt=rng.randint(1, 9), turns=rng.randint(1, 5)) for i in range(n)]
    made[0], made[-1] = made[0].judged(1.0), made[-1].judged(0.0)
    return made


def grouped(seed: int, sizes: Sequence[int] = (3, 3, 2)) -> list[Trajectory]:
    """Several episodes of each of a few tasks, the same tasks for every seed; rewards in [0, 1], not all equal in a group.

    Two episodes have a second segment with the same verdict, one a turn reward.
    """
    rng = random.Random(f"grouped-{seed}")
    made = []
    for task, size in enumerate(sizes):
        for i in range(size):
            reward = (i + seed) % 3 * 0.25 + 0.25 * (task == 1)
            one = trajectory(rng, f"g{seed}-{task}-{i}", prompt=rng.randint(1, 6), turns=rng.randint(2, 4), task=f"task-{task}")
            made.append(one.judged(reward, {0: 0.25} if (task, i) == (0, 1) else None))
            if i == 0 and task < 2:
                fork = trajectory(rng, one.episode_id, turns=rng.randint(1, 3), task=one.task_id)
                made.append(replace(fork, reward=reward, segment=1))
    return made


def on_policy(made: Policy, trajectories: list[Trajectory], noise: float, seed: int = 0) -> list[Trajectory]:
    """The same tokens with rollout log-probs near the policy's own, so that DIS keeps most of them (noise in nats)."""
    rng = np.random.default_rng(seed)
    out = []
    for t in trajectories:
        tokens = torch.from_numpy(t.tokens.astype(np.int64))
        with torch.no_grad():
            logits = made.model(input_ids=tokens[None], use_cache=False, cu_seqlens=[0, len(t)]).logits[0]
        logp = torch.log_softmax(logits.double(), -1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        logp = np.minimum(np.concatenate([[0.0], logp]) + noise * rng.standard_normal(len(t)), 0.0).astype(np.float32)
        out.append(
            Trajectory(
                t.episode_id,
                t.task_id,
                t.tokens,
                t.turn_ids,
                np.where(t.loss_mask, logp, np.float32("nan")),
                t.policy_versions,
                t.reward,
                t.turn_rewards,
                t.segment,
                t.info,
            )
        )
    return out


CRITIC = {"lam": 1.0, "value_clip": None, "advantage_values": "post"}


def arm(
    loss: dict[str, Any] | None = None, advantage: dict[str, Any] | None = None, **changes: Any
) -> dict[str, dict[str, Any]]:
    """The tables of one arm; DIS has a band wide enough for random log-probs unless said otherwise.

    `changes` are fields of `AlgorithmConfig`, of the critic (`lam_value` is its `lam`), and DIS's bounds.
    """
    band = {key: changes.pop(key) for key in ("eps_low", "eps_high") if key in changes}
    critic = {key: changes.pop(key) for key in ("value_clip", "advantage_values") if key in changes}
    if "lam_value" in changes:
        critic["lam"] = changes.pop("lam_value")
    return {
        "loss": loss or {"id": "dis", "eps_low": 1.0, "eps_high": 50.0} | band,
        "advantage": advantage or {"id": "skip_observation"},
        "settings": AlgorithmConfig(**({"loss_norm": "token_global"} | changes)).model_dump() | CRITIC | critic,
    }


def algorithm(**changes: Any) -> Objective:
    """The objective of an `arm`."""
    return objective.build(**arm(**changes))


def optimizer(**changes: Any) -> dict[str, Any]:
    """The fields of `OptimizerConfig`."""
    return OptimizerConfig(**({"lr": 1e-2, "clip": 1e9} | changes)).model_dump()


class Recorded(Optimizer):
    """The real optimizer, which keeps a copy of the gradients that it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[dict[str, Tensor]] = []

    def step(self, scale: float = 1.0) -> float:
        """A collective."""
        self.seen.append({name: whole(p.grad) for name, p in self.model.named_parameters() if p.grad is not None})
        return super().step(scale)


def learners(
    folder: Path,
    *,
    seed: int = 0,
    trainable: Any = "mlp_only",
    policy_optimizer: dict[str, Any] | None = None,
    critic_optimizer: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Learners:
    """Sharded policy and critic from a model folder, as `Worker.init` builds them but with a head that is not zero."""
    actor, critic = build_policy(folder), critic_of(folder, seed)
    freeze(critic, trainable)
    parallel.shard(actor, dtype)
    parallel.shard(critic, dtype)
    return Learners(
        actor,
        Recorded(actor, policy_optimizer or optimizer()),
        critic,
        Recorded(critic, critic_optimizer or optimizer(), 3.0),
    )


def without_critic(folder: Path, policy_optimizer: dict[str, Any] | None = None) -> Learners:
    """As for the arms that read no values."""
    actor = build_policy(folder)
    parallel.shard(actor, torch.float32)
    return Learners(actor, Recorded(actor, policy_optimizer or optimizer()))


def step(made: Learners, trajectories: list[Trajectory], algorithm: Objective | None = None, **changes: Any) -> dict[str, Any]:
    """`train_step` with defaults."""
    options: dict[str, Any] = {
        "number": 1,
        "version": 6,
        "critic_updates": 2,
        "update_policy": True,
        "micro_batch_tokens": 64,
        "max_length": 100,
        "seed": 0,
    }
    return train_step(made, trajectories, algorithm or objective.build(**arm()), StepOptions(**(options | changes)))


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor that may be sharded. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Plain copies of all parameters. A collective."""
    return {name: whole(p) for name, p in model.named_parameters()}


def state(made: Learners) -> dict[str, Tensor]:
    """Plain copies of both models' parameters."""
    models = {who: getattr(made, who) for who in ("policy", "critic") if getattr(made, who) is not None}
    return {f"{who}.{n}": p for who, model in models.items() for n, p in parameters(model).items()}


def gradients(made: Learners) -> dict[str, Tensor]:
    """Every gradient that either optimizer was given, in order."""
    out = {}
    for who, optimizer in (("policy", made.policy_optimizer), ("critic", made.critic_optimizer)):
        if optimizer is None:
            continue
        assert isinstance(optimizer, Recorded)
        out |= {f"{who}.{i}.{n}": g for i, seen in enumerate(optimizer.seen) for n, g in seen.items()}
    return out


def spread(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest difference."""
    assert before.keys() == after.keys()
    return max(float((before[n] - after[n]).abs().max()) for n in before)


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, relative to the largest element."""
    size = max(float(g.abs().max()) for g in theirs.values())
    assert size > 0
    return spread(ours, theirs) / size


def equal(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    value: dict[str, Any] = json.loads(path.read_text())
    return value
