"""Shared fixtures. The repository goes onto the path because pytest's importlib mode does not put it there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from environments.toy_repair import tokenizer
from harness.chat import Chat

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
