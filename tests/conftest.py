"""Shared fixtures. The repository goes onto the path because pytest's importlib mode does not put it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from environments.toy_repair import tokenizer
from harness.chat import Chat

if TYPE_CHECKING:
    from tests.vllm.support import Fleet
    from trainer.model import Policy

settings.register_profile("sao", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sao")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.write(folder)
    return folder


@pytest.fixture(scope="session")
def chat(model_folder: Path) -> Chat:
    """The tiny model's tokenizer and template."""
    return Chat(model_folder, ["<|im_end|>"])


# --- engines: one set of policies, one fleet of vLLM servers ---------------------------------------------------------


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four policies of one shape, which every engine can serve."""
    from tests.contracts.engine_support import write_policy

    return [write_policy(tmp_path_factory.mktemp(f"policy-{i}"), seed=i) for i in range(4)]


@pytest.fixture(scope="session")
def policies(models: list[Path]) -> list[Policy]:
    """The same, in the trainer."""
    from trainer.model import build_policy

    return [build_policy(model) for model in models]


@pytest.fixture(scope="session")
def fleet(models: list[Path], policies: list[Policy], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two real vLLM servers; the second one keeps its address when it is started again."""
    from harness.engines.vllm_launch import free_port
    from tests.vllm.support import Fleet, serving

    with serving(models, policies, tmp_path_factory.mktemp("fleet"), (0, free_port())) as servers:
        yield Fleet(servers)


def pytest_configure(config: pytest.Config) -> None:
    """Tests that need real vLLM servers without naming their fixture."""
    config.addinivalue_line("markers", "vllm: needs the fleet of vLLM servers")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs real vLLM servers comes last, so that these 4 GiB each are not there while the others run."""

    def turn(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return 2 if "server" in names else 1 if "fleet" in names or item.get_closest_marker("vllm") else 0

    items.sort(key=turn)
