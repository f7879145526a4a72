"""One process is a world of one rank; its models are tiny, so one thread is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer import support


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    """A gloo world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: tiny Qwen3-MoE."""
    return support.write_model(tmp_path_factory.mktemp("moe"), support.policy("qwen3_moe"))


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: tiny dense Qwen3 with a tied head."""
    return support.write_model(tmp_path_factory.mktemp("dense"), support.policy("qwen3"))
