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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who may run beside whom (`pytest -n 2 --dist loadgroup`): one worker has all that may see containers come and go, one
    has the vLLM servers, the longest first; everything else is shared out by file.

    In one process vLLM comes last, so that its 4 GiB per server are not there while the others run.
    """
    order = {"sandboxes": 0, "vllm": 1}
    groups = {item: _group(item) for item in items}
    if any(hasattr(item.config, "workerinput") for item in items[:1]):
        items.sort(key=lambda item: order.get(groups[item], 2))
    else:
        items.sort(key=lambda item: (groups[item] == "vllm", "server" in getattr(item, "fixturenames", ())))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ())
    if "fleet" in names or "server" in names or item.get_closest_marker("vllm"):
        return "vllm"
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return "sandboxes" if folder in {"agents", "contracts", "e2e", "kit", "swe", "tir"} else item.path.name
