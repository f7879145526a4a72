"""Shared fixtures. The repository goes onto the path because pytest's importlib mode does not put it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

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
    """Tests that need real vLLM servers without naming their fixture, and tests that take minutes."""
    config.addinivalue_line("markers", "vllm: needs the fleet of vLLM servers")
    config.addinivalue_line("markers", "long: minutes by itself; CI, which has an hour, leaves it out")


TOGETHER = {"agents", "contracts", "e2e", "kit", "swe", "tir"}
"""Folders of tests that may see containers and processes come and go: one worker has them all."""


def group(nodeid: str) -> str:
    """Tests of one group run in one process, one after the other."""
    path = nodeid.partition("::")[0]
    parts = Path(path).parts
    folder = parts[parts.index("tests") + 1] if "tests" in parts else ""
    if folder == "vllm" or (folder in TOGETHER and "vllm" in nodeid):
        return "vllm"
    return "sandboxes" if folder in TOGETHER else path


class Groups(LoadScopeScheduling):
    """`pytest -n 2 --dist loadscope`, with our groups for scopes; the markers of pytest-xdist do not know pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Asked once, by the process that hands out the tests."""
    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups are handed out in this order: the longest first. In one process vLLM comes last, so that its 4 GiB per server are
    not there while the others run.
    """
    workers = hasattr(config, "workerinput")
    order = {"sandboxes": 0, "vllm": 1} if workers else {"vllm": 1}
    items.sort(key=lambda item: (order.get(group(item.nodeid), 2 if workers else 0), _own_server(item)))


def _own_server(item: pytest.Item) -> bool:
    """Whether it wants a third vLLM server, beside the fleet."""
    return "server" in getattr(item, "fixturenames", ())
