"""What a container is made of, its limits, and how many there may be: the `[sandbox]` table of `id = "docker"`."""

from __future__ import annotations

import os
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.sandboxes.process import start_time
from harness.sandboxes.shell import WATCHED_SUPERVISOR

WARM = "warm"
"""The episode that the label of a container names which was started before its episode (labels cannot change)."""

SCHEMES = ("unix", "tcp", "ssh")


class DockerConfig(BaseModel):
    """See the module docstring."""

    model_config = ConfigDict(extra="forbid")

    image: str = "python:3.12-slim"
    """For tasks that name none; needs bash and coreutils. Empty: every task names its own."""
    engines: list[str] = Field(default_factory=list)
    """unix:///path, tcp://host:port, ssh://user@host; the environment's (DOCKER_HOST) if there is none."""
    starts: int = Field(2 * (os.cpu_count() or 1), ge=1)
    """Containers that one engine starts at a time: a start costs it CPU, so more at once gain nothing."""
    warm: int = Field(0, ge=0)
    """Containers that each engine keeps ready, over all images."""
    max_containers: int | None = Field(None, ge=1)
    """Per engine, ready ones included. One more may run while a verdict needs a second container and all are taken."""
    memory_budget_mb: int | None = None
    """Per engine, for all containers together; each counts with `memory_mb`."""
    disk_budget_mb: int | None = None
    """Per engine, for all containers together; each counts with `disk_mb`."""
    memory_mb: int = Field(2048, ge=64)
    """Memory and swap together."""
    pids: int = Field(256, ge=16)
    cpus: float | None = Field(None, gt=0)
    file_mb: int = Field(2048, ge=1)
    """Size of one file."""
    disk_mb: int = Field(8192, ge=1)
    """What a container may write over its image; measured every few seconds."""
    deadline_s: float = Field(21_600.0, gt=0)
    """Age at which an episode's container is removed, and the longest wait for a free place."""

    @field_validator("engines")
    @classmethod
    def _addresses(cls, engines: list[str]) -> list[str]:
        for engine in engines:
            url = urlsplit(engine)
            if url.scheme not in SCHEMES or not (url.path if url.scheme == "unix" else url.hostname):
                raise ValueError(f"{engine!r} is none of unix:///path, tcp://host:port, ssh://user@host")
        if len(set(engines)) < len(engines):
            raise ValueError("an engine is named twice")
        return engines

    @model_validator(mode="after")
    def _room_for_one(self) -> DockerConfig:
        for budget, one in (("memory_budget_mb", "memory_mb"), ("disk_budget_mb", "disk_mb")):
            if getattr(self, budget) is not None and getattr(self, budget) < getattr(self, one):
                raise ValueError(
                    f"{budget} = {getattr(self, budget)} is less than one container's {one} = {getattr(self, one)}"
                )
        if self.capacity is not None and self.warm > self.capacity:
            raise ValueError(f"warm = {self.warm} is more than the {self.capacity} containers that the budgets allow")
        return self

    @property
    def capacity(self) -> int | None:
        """Containers that one engine may hold under all three budgets; None: any number."""
        counts = [
            self.max_containers,
            None if self.memory_budget_mb is None else self.memory_budget_mb // self.memory_mb,
            None if self.disk_budget_mb is None else self.disk_budget_mb // self.disk_mb,
        ]
        return min((count for count in counts if count is not None), default=None)

    def container(self, image: str, folder: str, run_id: str, episode: str) -> dict[str, Any]:
        """Arguments of the engine's create call; the limits are those of its host configuration."""
        # A ready container waits for at most one deadline, an episode's lives for at most one more.
        life = 2 * self.deadline_s
        return {
            "image": image,
            # When the engine restarts, standard input ends for good; process 1 then keeps the container for its next shell.
            "entrypoint": ["bash", "-c", f"{WATCHED_SUPERVISOR}; exec <&- >&-; sleep {life:.0f}"],
            "command": [],
            "stdin_open": True,
            "working_dir": folder,
            "labels": {
                "sao.run": run_id,
                "sao.host": socket.gethostname(),
                "sao.owner": f"{os.getpid()}:{start_time(os.getpid())}",
                "sao.episode": episode,
                "sao.deadline": str(int(time.time() + life)),
            },
            "host_config": {
                "network_mode": "none",
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges"],
                "mem_limit": f"{self.memory_mb}m",
                "memswap_limit": f"{self.memory_mb}m",
                "pids_limit": self.pids,
                "nano_cpus": None if self.cpus is None else int(self.cpus * 1e9),
                "ulimits": [{"Name": "fsize", "Soft": self.file_mb << 20, "Hard": self.file_mb << 20}],
                "log_config": {"Type": "none"},  # the output is ours alone; a log would fill the disk
            },
        }
