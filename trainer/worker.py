"""One trainer rank under torchrun: rank 0 reads commands from the harness, all ranks run them together.

Flows in: JSON lines `{"command": ..., arguments}`. Flows out: one JSON line each. The commands are the methods of `Worker`.
A closed connection ends every rank.
"""

from __future__ import annotations

import json
import os
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
from torch import nn

from harness.errors import ConfigError
from harness.modelfolder import weights_digest
from harness.trajectory import Trajectory
from trainer import checkpoint, objective, parallel, sft, value
from trainer.broadcast import BroadcastError, Door, Snapshot
from trainer.export import save_folder
from trainer.freeze import freeze
from trainer.model import build_critic, build_policy, critic_record, random_policy
from trainer.objective import Objective
from trainer.optimizer import Optimizer
from trainer.report import FrozenGuard
from trainer.step import Learners, StepOptions, train_step
from trainer.weights import export, write_file

SNAPSHOTS = 2
"""So many versions are kept to be sent: while one is being published, a server that comes back may need the one before."""
GRACE_S = 3.0
"""An idle rank ends by itself within this time after the harness is gone; a busy one is ended."""


class Worker:
    """State of one rank. Every public method is a command and a collective."""

    def __init__(self) -> None:
        self.learners: Learners
        self.objective: Objective
        self.trainer: dict[str, Any] = {}
        self.snapshots: dict[int, Snapshot] = {}
        """Published versions that are sent to servers, oldest first."""
        self.doors: dict[str, Door] = {}

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

    def pretrain_value(self, model: str, paths: list[str], settings: dict[str, Any], out: str, seed: int) -> dict[str, Any]:
        """Value pre-training from the policy folder `model` into the critic folder `out`; its record names its data."""
        trajectories = [Trajectory.load(Path(p)) for p in paths]
        mean_reward = value.mean_reward(trajectories)
        critic = build_critic(Path(model), mean_reward)
        config = critic.model.config
        freeze(critic, "all")
        parallel.shard(critic, self._dtype)
        report = value.pretrain(critic, trajectories, settings, budget=self.trainer["micro_batch_tokens"], seed=seed)
        record = {
            "gate": value.gate(report, settings),
            "mean_reward": mean_reward,
            "trajectories": len(paths),
            "data_sha256": value.data_hash(trajectories),
            "policy_sha256": weights_digest(Path(model)),
            "settings": settings,
            "report": report,
        }
        self._save_folder(critic, config, Path(out), Path(model), critic=record)
        return record

    def init(
        self,
        model: str,
        arm: dict[str, Any],
        critic: str | None = None,
        critic_settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Policy and, for arms that read values, critic; the critic's frozen set is applied before its optimizer is made.

        `arm` holds the tables `loss`, `advantage` and `settings`.
        """
        self.objective = objective.build(**arm, compiled_gae=self.trainer["compiled_gae"])
        policy = build_policy(Path(model))
        parallel.shard(policy, self._dtype)
        self.learners = Learners(policy, Optimizer(policy, self.trainer["optimizer"]))
        facts: dict[str, Any] = {"policy_parameters": sum(p.numel() for p in policy.parameters())}
        if critic is None or critic_settings is None:
            return facts
        value_model = build_critic(Path(critic))
        report = freeze(value_model, critic_settings["trainable"])
        parallel.shard(value_model, self._dtype)
        optimizer = Optimizer(value_model, critic_settings["optimizer"], critic_settings["head_lr_mult"])
        if sorted(optimizer.names) != sorted(report.trainable):
            raise AssertionError("the critic's optimizer does not hold exactly the trainable parameters")
        self.learners.critic, self.learners.critic_optimizer = value_model, optimizer
        self.learners.guard = FrozenGuard(value_model)
        return facts | {
            "critic_trainable": report.n_trainable,
            "critic_frozen": report.n_frozen,
            "critic_trainable_kinds": report.kinds(),
            "critic_record": critic_record(Path(critic)),
            "policy_sha256": weights_digest(Path(model)),
        }

    def step(self, paths: list[str], sampling: str, **options: Any) -> dict[str, Any]:
        """One step (`trainer.step.train_step`) on stored trajectories, all sampled under the contract `sampling`."""
        trajectories = [Trajectory.load(Path(p)) for p in paths]
        for trajectory in trajectories:
            if trajectory.info.get("sampling") != sampling:
                raise ConfigError(f"{trajectory.episode_id} was sampled under another contract", hint="start a new run")
        made = StepOptions(micro_batch_tokens=self.trainer["micro_batch_tokens"], **options)
        return train_step(self.learners, trajectories, self.objective, made)

    def publish(self, probe: list[int], version: int = 0, path: str | None = None) -> dict[str, Any]:
        """The policy as `version`, and the log-probs of the probe tokens under it.

        Into the file `path`, with its `sha256`; without one rank 0 keeps a copy for `send`, and `announced` is what a server
        must know of it.
        """
        policy = self.learners.policy
        tensors = _gathered(policy.model, copied=path is None)
        answer: dict[str, Any] = {"probe": _scores(policy, probe)}
        if dist.get_rank() != 0:
            return answer
        if path is not None:
            return answer | {"sha256": write_file(tensors, Path(path))}
        self.snapshots[version] = snapshot = Snapshot.of(tensors)
        for old in list(self.snapshots)[:-SNAPSHOTS]:
            del self.snapshots[old]
        return answer | {"announced": snapshot.announced()}

    def listen(self, address: str) -> dict[str, Any]:
        """Open a door for servers at an address of this machine; its `port`."""
        if dist.get_rank() != 0:
            return {}
        if address not in self.doors:
            try:
                self.doors[address] = Door(address)
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"the trainer cannot listen at {address}: {error}", hint="set engine.vllm.server.weight_transfer=disk"
                ) from error
        return {"port": self.doors[address].port}

    def send(self, address: str, version: int, **how: Any) -> dict[str, Any]:
        """Send a published version to the server that comes to a meeting (`Door.send`); `failed` says why it has not got it."""
        if dist.get_rank() != 0:
            return {}
        if version not in self.snapshots:
            return {"failed": f"version {version} is not kept any more"}
        try:
            self.doors[address].send(self.snapshots[version], **how)
        except BroadcastError as error:
            return {"failed": str(error)}
        return {"failed": None}

    def logprobs(self, texts: list[list[int]], model: str | None = None) -> dict[str, Any]:
        """log p of tokens 1.. of each text (nats, fp32) under the present policy, or under that of the folder `model`."""
        policy = self.learners.policy if model is None else parallel.shard(build_policy(Path(model)), self._dtype)
        return {"logprobs": [_scores(policy, text) for text in texts]}

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
        tensors = _gathered(model)
        if dist.get_rank() != 0:
            return
        save_folder(tensors, config, out, source, critic)


def _gathered(model: nn.Module, *, copied: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor by its public name, on rank 0's CPU; `copied`: later steps do not change them. A collective."""
    rank0 = dist.get_rank() == 0
    return {name: t.to("cpu", copy=copied) for name, t in export(model) if rank0}


def _scores(policy: nn.Module, text: list[int]) -> list[float]:
    """log p of tokens 1... A collective."""
    device = parallel.device()
    tokens = torch.tensor(text, dtype=torch.int32, device=device)
    with torch.no_grad():
        where = torch.arange(1, len(text), device=device)
        logprobs, _ = policy(tokens, torch.arange(len(text), device=device), [0, len(text)], where)
    return logprobs.tolist()  # type: ignore[no-any-return]


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
