"""What one rank and two ranks must compute alike. Runs in the tests' own process, and as a torchrun program:

torchrun cases.py MODEL FOLDER        writes FOLDER/results-RANK.pt, FOLDER/checkpoint and FOLDER/remembered
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from environments.toy_repair.tokenizer import build_tokenizer
from harness.config import CorpusPhase, SftConfig
from tests.trainer import support
from trainer import checkpoint, parallel, sft, value
from trainer.optimizer import Optimizer
from trainer.weights import export

Result = dict[str, Any]
LR = {"policy_optimizer": support.optimizer(lr=1e-3), "critic_optimizer": support.optimizer(lr=1e-3)}


def _steps(folder: Path, sizes: list[int], **changes: Any) -> Result:
    made = support.learners(folder, **LR)
    reports = [support.step(made, support.batch(i, n), **changes) for i, n in enumerate(sizes)]
    return {"reports": reports, "gradients": support.gradients(made), "state": support.state(made)}


def even(folder: Path) -> Result:
    """Two steps on batches that fill both ranks."""
    return _steps(folder, [6, 7], algorithm=support.algorithm(eps_low=0.9, eps_high=2.0))


def uneven(folder: Path) -> Result:
    """Small micro-batches, whitening and bootstrap: ranks hold different numbers of action tokens and of micro-batches."""
    algorithm = support.algorithm(advantage_norm="global_mean_std", truncation="bootstrap", lam_value=0.9)
    return _steps(folder, [5, 3], algorithm=algorithm, micro_batch_tokens=30)


def single(folder: Path) -> Result:
    """One trajectory: the second rank has nothing but empty micro-batches."""
    return _steps(folder, [1, 1])


def rejected(folder: Path) -> Result:
    """Nothing inside the band: no step, on any rank."""
    return _steps(folder, [4], algorithm=support.algorithm(eps_low=1e-7, eps_high=1e-7))


def pretrained(folder: Path) -> Result:
    """Value pre-training."""
    critic = support.critic_of(folder)
    parallel.shard(critic, torch.float32)
    trajectories = [t for i in range(4) for t in support.batch(i, 6)]
    settings = {"heldout": 0.3, "batch": 5, "epochs": 2, "optimizer": support.optimizer(lr=1e-3), "head_lr_mult": 2.0}
    report = value.pretrain(critic, trajectories, settings, budget=40, seed=1)
    return {"reports": [report], "state": support.parameters(critic)}


def imitated(folder: Path) -> Result:
    """A supervised loss with uneven weights, also when there are fewer examples than ranks."""
    out: Result = {"state": {}}
    for n in (1, 5):
        policy = support.learners(folder).policy
        loss = sft.weighted_loss(policy, [sft.demonstration(t, 0.3) for t in support.batch(2, n)], 40)
        Optimizer(policy, support.optimizer(lr=1e-3)).step()
        out["state"] |= {f"{n}.{name}": p for name, p in support.parameters(policy).items()} | {f"{n}.loss": torch.tensor(loss)}
    return out


def letters(rng: random.Random, level: int) -> list[tuple[str, bool]]:
    """A corpus of two levels."""
    return [("a" * level, False), ("".join(rng.choice("bcd") for _ in range(5)), True)]


def taught(folder: Path) -> Result:
    """One step of a curriculum: Muon on sharded attention matrices (apart: it works in bfloat16), AdamW on the rest."""
    policy = support.policy("qwen3", vocab_size=build_tokenizer().get_vocab_size())
    before = support.parameters(policy)
    parallel.shard(policy, torch.float32)
    skill = sft.Skill(letters, build_tokenizer(), random.Random(0))
    phases = [CorpusPhase(levels=[1, 2, 3], loss=99.0)]
    settings = SftConfig(corpus_phases=phases, corpus_optimizer=support.optimizer(lr=1e-3), corpus_batch=40)
    report = sft.teach(policy, skill, settings.model_dump(), 100)
    after = support.parameters(policy)
    muon = {n for n, p in before.items() if ".self_attn." in n and p.ndim == 2}
    return {
        "reports": [report],
        "state": {n: p for n, p in after.items() if n not in muon},
        "muon": {n: after[n] - before[n] for n in muon},
    }


def exported(folder: Path) -> Result:
    """Names and whole tensors on every rank."""
    made = support.learners(folder)
    return {"state": {n: t.clone() for n, t in export(made.policy.model)} | {n: t.clone() for n, t in export(made.critic)}}


ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"id": "grpo"}},
    "reinforce_pp": {"advantage": {"id": "reinforce_pp_baseline"}},
    "step_last": {"advantage": {"id": "step_last"}, "lam_value": 0.9},
    "through_observation": {"advantage": {"id": "through_observation"}},
    "token_kept": {"loss_norm": "token_kept", "eps_low": 0.9, "eps_high": 2.0},
    "seq_mean": {"loss_norm": "seq_mean"},
    "global_std_only": {"advantage_norm": "global_std_only"},
    "value_clip": {"value_clip": 1e-3},
    "mask": {"truncation": "mask", "loss_norm": "seq_mean"},
    "mask_grpo": {"truncation": "mask", "advantage": {"id": "grpo"}},
    "all_masked": {"truncation": "mask"},
    "gspo": {"loss": {"id": "gspo", "eps_low": 0.9, "eps_high": 0.5}, "loss_norm": "seq_mean"},
}
"""Changes of an `arm`."""


def _arm(name: str) -> Callable[[Path], Result]:
    """Two steps on groups with segments; a limit ended every third episode, or all."""

    def case(folder: Path) -> Result:
        algorithm = support.algorithm(**ARMS[name])
        made = support.learners(folder, **LR)
        if algorithm.critic is None:
            made = support.without_critic(folder, LR["policy_optimizer"])
        reports = []
        for i in range(2):
            cut = [name == "all_masked" or int(t.episode_id[-1]) == 1 for t in support.grouped(i)]
            ended = ["max_turns" if c else "finished" for c in cut]
            batch = [
                t.judged(t.reward or 0.0, t.turn_rewards, termination=e) for t, e in zip(support.grouped(i), ended, strict=True)
            ]
            reports.append(support.step(made, batch, algorithm, micro_batch_tokens=40))
        return {"reports": reports, "gradients": support.gradients(made), "state": support.state(made)}

    case.__name__ = name
    return case


CASES: list[Callable[[Path], Result]] = [
    *(even, uneven, single, rejected, pretrained, imitated, taught, exported),
    *map(_arm, ARMS),
]


def resumed(folder: Path, at: Path) -> Result:
    """A checkpoint in the middle; then one more step."""
    made = support.learners(folder, **LR)
    support.step(made, support.batch(0, 5), update_policy=False)
    support.step(made, support.batch(1, 5))
    checkpoint.save(made, at)
    return continued(made)


def continued(made: Any) -> Result:
    """The step after the checkpoint."""
    report = support.step(made, support.batch(2, 5))
    return {"reports": [report], "state": support.state(made)}


SPO = {"loss": {"id": "ppo_clip"}, "advantage": {"id": "spo"}}


def remembered(folder: Path, at: Path) -> Result:
    """A checkpoint of an arm without critic that has seen each prompt before; then one more step."""
    made = support.without_critic(folder, LR["policy_optimizer"])
    for i in range(2):
        support.step(made, support.grouped(i), support.algorithm(**SPO))
    checkpoint.save(made, at)
    return {"memory": asdict(made.memory)} | seen_again(made)


def seen_again(made: Any) -> Result:
    """The step after that checkpoint."""
    report = support.step(made, support.grouped(2), support.algorithm(**SPO))
    return {"reports": [report], "state": support.state(made), "memory_after": asdict(made.memory)}


def main() -> None:
    """All cases under torchrun."""
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    parallel.start(1)
    results = {case.__name__: case(model) for case in CASES}
    results["resumed"] = resumed(model, folder / "checkpoint")
    again = support.learners(model, seed=5, **LR)
    checkpoint.load(again, folder / "checkpoint")
    results["again"] = continued(again)
    results["remembered"] = remembered(model, folder / "remembered")
    results["idle_s"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    torch.save(results, folder / f"results-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
