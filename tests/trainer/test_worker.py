"""The worker's commands in this process: what `init` proves, what a pre-trained critic says of itself, a stranger's loss."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import CriticConfig, TrainerConfig, ValueConfig
from harness.errors import ConfigError
from tests.trainer import support
from trainer import objective, worker
from trainer.model import build_critic
from trainer.value import data_hash
from trainer.weights import sha256
from trainer.worker import Worker

pytestmark = pytest.mark.usefixtures("rank")
STEP = {"sampling": "s", "number": 1, "version": 5, "critic_updates": 2, "update_policy": True, "max_length": 100, "seed": 0}


@pytest.fixture
def made() -> Worker:
    fresh = Worker()
    settings = TrainerConfig(dtype="float32", threads=1, micro_batch_tokens=64, optimizer=support.optimizer(lr=1e-3))
    assert fresh.setup(settings.model_dump()) == {"ranks": 1, "device": str(worker.parallel.device())}
    return fresh


def critic_arguments(moe: Path, **changes: Any) -> dict[str, Any]:
    return {"critic": str(moe), "critic_settings": CriticConfig(**changes).model_dump()}


def stored(folder: Path, n: int = 12) -> list[str]:
    paths = []
    for t in support.batch(2, n):
        paths.append(str(folder / f"{t.episode_id}.parquet"))
        t.save(Path(paths[-1]))
    return paths


@pytest.mark.parametrize("scheme", ["mlp_only", "no_attn", "all"])
def test_the_critics_optimizer_holds_what_trains(made: Worker, moe: Path, scheme: str) -> None:
    facts = made.init(str(moe), support.arm(), **critic_arguments(moe, trainable=scheme))
    critic, optimizer = made.learners.critic, made.learners.critic_optimizer
    assert critic is not None and optimizer is not None and made.learners.guard is not None
    assert set(optimizer.names) == {n for n, p in critic.named_parameters() if p.requires_grad}
    assert facts["critic_frozen"] == sum(p.numel() for p in critic.parameters() if not p.requires_grad)
    assert facts["critic_trainable"] + facts["critic_frozen"] == sum(p.numel() for p in critic.parameters())
    assert facts["critic_record"] is None and facts["policy_sha256"] == sha256(moe / "model.safetensors")
    assert float(support.whole(critic.v_head.bias)) == 0.0, "an untrained critic knows no mean reward"


@pytest.mark.parametrize("change", ["one too many", "one missing"])
def test_another_set_is_an_error(made: Worker, moe: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Before any step."""
    real = worker.freeze

    def freeze(model: Any, scheme: Any) -> Any:
        report = real(model, scheme)
        name = report.frozen[0] if change == "one too many" else report.trainable[0]
        dict(model.named_parameters())[name].requires_grad_(change == "one too many")
        return report

    monkeypatch.setattr(worker, "freeze", freeze)
    with pytest.raises(AssertionError, match="exactly the trainable"):
        made.init(str(moe), support.arm(), **critic_arguments(moe))


def test_an_arm_without_critic(made: Worker, moe: Path, tmp_path: Path) -> None:
    facts = made.init(str(moe), support.arm(advantage={"id": "batch_norm"}))
    assert set(facts) == {"policy_parameters"}
    assert made.learners.critic is None and made.learners.guard is None
    assert made.step(stored(tmp_path), **(STEP | {"critic_updates": 0}))["stepped"]
    made.save(str(tmp_path / "c"))
    state = support.state(made.learners)
    made.step(stored(tmp_path), **(STEP | {"critic_updates": 0}))
    made.load(str(tmp_path / "c"))
    assert support.equal(support.state(made.learners), state)


def test_a_pretrained_critic_names_its_data(made: Worker, moe: Path, tmp_path: Path) -> None:
    """Gate, data and policy; the folder is a critic that `init` reads back."""
    paths, settings = stored(tmp_path), ValueConfig(heldout=0.3, batch=4, min_ev=0.99).model_dump() | {"head_lr_mult": 1.0}
    record = made.pretrain_value(str(moe), paths, settings, str(tmp_path / "critic"), seed=3)
    assert support.read_json(tmp_path / "critic" / "critic.json") == json.loads(json.dumps(record))
    assert set(record) == {
        *("gate", "mean_reward", "trajectories", "data_sha256", "policy_sha256", "settings", "report"),
    }
    assert record["data_sha256"] == data_hash(support.batch(2, 12))
    assert record["policy_sha256"] == sha256(moe / "model.safetensors")
    assert record["trajectories"] == 12 and record["settings"] == settings
    assert record["mean_reward"] == pytest.approx(sum(t.reward or 0.0 for t in support.batch(2, 12)) / 12)
    assert not record["gate"]["passed"] and "value.min_ev = 0.99" in record["gate"]["reason"]
    facts = made.init(str(moe), support.arm(), **(critic_arguments(moe) | {"critic": str(tmp_path / "critic")}))
    assert facts["critic_record"] == json.loads(json.dumps(record))
    critic = made.learners.critic
    assert critic is not None
    assert support.equal(support.parameters(critic), support.parameters(build_critic(tmp_path / "critic", 0.0)))


STRANGER = '''
import torch
from pydantic import BaseModel

from trainer.losses.types import PolicyLossOutput


def loss(inputs, *, scale):
    a = scale * inputs.advantages
    return PolicyLossOutput(-a * inputs.logprobs, inputs.mask, torch.full_like(a, scale))


class Loss:
    """REINFORCE without any correction."""

    function = "stranger_of_the_worker:loss"
    norm = "token_global"

    class Config(BaseModel):
        model_config = {"extra": "forbid"}
        scale: float = 1.0
'''


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stranger_of_the_worker.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stranger_of_the_worker", raising=False)
    return "stranger_of_the_worker:Loss"


def test_a_strangers_loss(moe: Path, stranger: str) -> None:
    """Its options reach it; its gradient is what it says."""
    batch, found = support.grouped(0), []
    for loss in ({"id": stranger, "scale": 2.0}, {"id": "sequence_rejection", "low": 1e-9, "high": 1e9}):
        learners = support.without_critic(moe)
        algorithm = objective.build(**support.arm(loss=loss, advantage={"id": "grpo"}))
        assert support.step(learners, batch, algorithm)["stepped"]
        found.append(support.gradients(learners))
    assert support.apart(found[0], {n: 2 * g for n, g in found[1].items()}) < 1e-6


def test_what_a_stranger_gets_wrong(stranger: str) -> None:
    for table, why in (
        ({"id": stranger, "scales": 2.0}, "loss.scales"),
        ({"id": "stranger_of_the_worker:Lost"}, "has no `Lost`"),
        ({"id": "stranger_of_the_worker:loss"}, "is no plug-in"),
        ({"id": "no_such_module:Loss"}, "cannot import"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            objective.build(**support.arm(loss=table))
        assert caught.value.hint


def test_a_step_refuses_another_sampling_contract(made: Worker, moe: Path, tmp_path: Path) -> None:
    made.init(str(moe), support.arm(advantage={"id": "batch_norm"}))
    before = support.state(made.learners)
    odd = replace(support.batch(2, 1)[0], info={"sampling": "other"})
    odd.save(tmp_path / "odd.parquet")
    with pytest.raises(ConfigError, match="another contract"):
        made.step([*stored(tmp_path), str(tmp_path / "odd.parquet")], **STEP)
    assert support.equal(before, support.state(made.learners))
    assert torch.get_num_threads() == 1
