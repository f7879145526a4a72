"""Beside the fleet (`tests/conftest.py`): one real vLLM server of another shape. A start takes one to five minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.engine_support import write_policy
from tests.vllm.support import MOE, Fleet, Server, serving
from trainer.model import build_policy


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny mixture of experts with a tied head: what both of vLLM's faults on CPUs need."""
    folders = [write_policy(tmp_path_factory.mktemp(f"moe-{seed}"), seed, MOE) for seed in (1, 2)]
    with serving(folders, [build_policy(folder) for folder in folders], tmp_path_factory.mktemp("moe"), (0,)) as (server,):
        yield server


@pytest.fixture
def mended(fleet: Fleet) -> Iterator[None]:
    """The test may harm the fleet; afterwards it is whole again."""
    yield
    fleet.run(fleet.mend())
