"""One trainer rank under torchrun: rank 0 reads commands from the harness, all ranks run them together.

Flows in: JSON lines `{"command": ..., arguments}`. Flows out: one JSON line each. The commands are the methods of `Worker`.
A closed connection ends every rank.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.trajectory import Trajectory
from trainer import checkpoint, parallel, sft, value
from trainer.freeze import freeze
from trainer.model import build_critic, build_policy, random_policy
from trainer.optimizer import Optimizer
from trainer.step import Learners, train_step
from trainer.weights import export, write_file

TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")
GRACE_S = 3.0
"""An idle rank ends by itself within this time after the harness is gone; a busy one is ended."""


class Worker:
    """State of one rank. Every public method is a command and a collective."""

    def __init__(self) -> None:
        self.learners: Learners
        self.trainer: dict[str, Any] = {}

    def setup(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Fields of `TrainerConfig`, before anything else."""
        self.trainer = trainer
        torch.set_num_threads(trainer["threads"])
        return {"ranks": dist.get_world_size(), "device": str(parallel.device())}

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.trainer["dtype"])  # type: ignore[no-any-return]

    def sft(self, start: dict[str, Any], paths: list[str], settings: dict[str, Any], out: str, seed: int) -> dict[str, Any]:
        """Supervised warm start from a folder (`path`) or random weights (`fields`, `files`) into the folder `out`."""
        source = Path(start["files"])
        policy = build_policy(Path(start["path"])) if start.get("path") else random_policy(start["fields"], seed)
        config = policy.model.config
        parallel.shard(policy, self._dtype)
        demonstrations = [Trajectory.load(Path(p)) for p in paths]
        budget = self.trainer["micro_batch_tokens"]
        report = sft.train(policy, demonstrations, settings, source, budget=budget, seed=seed)
        self._save_folder(policy.model, config, Path(out), source)
        return report

    def pretrain_value(
        self, model: str, paths: list[str], mean_reward: float, settings: dict[str, Any], out: str, seed: int
    ) -> dict[str, Any]:
        """Value pre-training from the policy folder `model` into the critic folder `out`."""
        critic = build_critic(Path(model), mean_reward)
        config = critic.model.config
        freeze(critic, "none")
        parallel.shard(critic, self._dtype)
        trajectories = [Trajectory.load(Path(p)) for p in paths]
        report = value.pretrain(critic, trajectories, settings, budget=self.trainer["micro_batch_tokens"], seed=seed)
        facts = {"mean_reward": mean_reward, "report": report, "trajectories": len(paths)}
        self._save_folder(critic, config, Path(out), Path(model), critic=facts)
        return report

    def init(self, model: str, critic: str, critic_settings: dict[str, Any], bias: float) -> dict[str, Any]:
        """Policy and critic for RL; the critic's frozen set is applied before its optimizer is made."""
        policy = build_policy(Path(model))
        value_model = build_critic(Path(critic), bias)
        report = freeze(value_model, critic_settings["trainable"])
        parallel.shard(policy, self._dtype)
        parallel.shard(value_model, self._dtype)
        self.learners = Learners(
            policy,
            Optimizer(policy, self.trainer["optimizer"]),
            value_model,
            Optimizer(value_model, critic_settings["optimizer"], critic_settings["head_lr_mult"]),
        )
        return {
            "policy_parameters": sum(p.numel() for p in policy.parameters()),
            "critic_trainable": report.n_trainable,
            "critic_frozen": report.n_frozen,
            "critic_trainable_names": report.trainable,
        }

    def step(self, paths: list[str], sampling: str, **arguments: Any) -> dict[str, Any]:
        """One SAO step (`trainer.step.train_step`) on stored trajectories, all sampled under the contract `sampling`."""
        trajectories = [Trajectory.load(Path(p)) for p in paths]
        for trajectory in trajectories:
            if trajectory.info.get("sampling") != sampling:
                raise ConfigError(f"{trajectory.episode_id} was sampled under another contract", hint="start a new run")
        return train_step(self.learners, trajectories, micro_batch_tokens=self.trainer["micro_batch_tokens"], **arguments)

    def publish(self, path: str, probe: list[int]) -> dict[str, Any]:
        """Write the policy's weights; their sha256 and the log-probs of the probe tokens under them."""
        policy = self.learners.policy
        tensors = {name: t.cpu() for name, t in export(policy.model)}
        digest = write_file(tensors, Path(path)) if dist.get_rank() == 0 else ""
        device = parallel.device()
        tokens = torch.tensor(probe, dtype=torch.int32, device=device)
        with torch.no_grad():
            where = torch.arange(1, len(probe), device=device)
            logprobs, _ = policy(tokens, torch.arange(len(probe), device=device), [0, len(probe)], where)
        return {"sha256": digest, "probe": logprobs.tolist()}

    def save(self, path: str) -> dict[str, Any]:
        """Write a checkpoint."""
        checkpoint.save(self.learners, Path(path))
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Restore a checkpoint into initialised learners."""
        checkpoint.load(self.learners, Path(path))
        return {}

    def export_policy(self, model: str, out: str) -> dict[str, Any]:
        """Write the policy as a model folder that any tool can load; tokenizer and template are copied from `model`."""
        policy = self.learners.policy
        self._save_folder(policy.model, policy.model.config, Path(out), Path(model))
        return {}

    def _save_folder(self, model: Any, config: Any, out: Path, source: Path, critic: dict[str, Any] | None = None) -> None:
        tensors = {name: t.cpu() for name, t in export(model)}
        if dist.get_rank() != 0:
            return
        out.mkdir(parents=True, exist_ok=True)
        config.to_json_file(out / "config.json", use_diff=True)
        for name in TOKENIZER_FILES:
            if (source / name).resolve() != (out / name).resolve():
                shutil.copyfile(source / name, out / name)
        if critic is not None:
            (out / "critic.json").write_text(json.dumps(critic, indent=2) + "\n")
        write_file(tensors, out / "model.safetensors")  # last: a folder with weights is whole


def commands() -> Iterator[tuple[dict[str, Any], Any]]:
    """(command, reply function) on every rank, until the harness hangs up."""
    rank0 = dist.get_rank() == 0
    connection = reader = None
    if rank0:
        host, _, port = os.environ["SAO_LEARNER"].partition(":")
        connection = socket.create_connection((host, int(port)), timeout=30.0)
        connection.settimeout(None)
        connection.sendall(os.environ["SAO_LEARNER_SECRET"].encode() + b"\n")
        reader = connection.makefile("rb")
    while True:
        line = reader.readline() if reader is not None else b""
        message = parallel.broadcast(json.loads(line) if line else None)
        if message is None:
            return

        def reply(answer: dict[str, Any]) -> None:
            if connection is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")

        yield message, reply


def _end_with_harness() -> None:
    """A rank inherits torchrun's standard input, a pipe that the harness holds; when it closes, a running command is cut."""
    while os.read(0, 4096):
        pass
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    """Run commands until the harness hangs up."""
    threading.Thread(target=_end_with_harness, daemon=True).start()
    parallel.start(int(os.environ.get("OMP_NUM_THREADS", "1")))
    worker = Worker()
    for message, reply in commands():
        name = message.pop("command")
        try:
            answer = getattr(worker, name)(**message)
        except ConfigError as error:
            answer = {"error": error.message, "hint": error.hint, "user": True}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            reply({"error": f"{type(error).__name__}: {error}"})
            raise
        reply(answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
