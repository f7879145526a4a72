"""The compiled GAE against the torch path, and what a user without a compiler reads."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.errors import ConfigError
from trainer.advantages import compiled, gae
from trainer.advantages.whiten import whiten

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler on PATH (Debian: apt-get install g++)")


def case(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[str, object]]:
    """Arguments and options of a random ragged case; empty rows, rows without actions and NaN on observations occur."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.choice([0, 1, rng.randint(2, 9), rng.randint(10, 400)]) for _ in range(rng.randint(1, 9))]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    n = int(cu[-1])
    mask = torch.rand(n, generator=torch_rng) < rng.choice([0.0, 0.25, 0.5, 1.0])
    values = torch.where(mask, torch.randn(n, generator=torch_rng), rng.choice([math.nan, math.inf, 9.9e9]))
    rewards = torch.where(mask & (torch.rand(n, generator=torch_rng) < 0.1), 1.0, 0.0)
    per_row = 1.0 - torch.rand(len(lengths), generator=torch_rng, dtype=torch.float64).square()
    return (values, rewards, mask, cu), {
        "gamma": rng.choice([1.0, 0.99, 0.5]),
        "lam": rng.choice([per_row, 1.0, 0.0]),
        "bootstrap": rng.choice([None, torch.randn(len(lengths), generator=torch_rng)]),
    }


@needs_compiler
@pytest.mark.parametrize("seed", range(200))
def test_equals_the_torch_path(seed: int) -> None:
    arguments, options = case(seed)
    advantages, returns = compiled.solve(*arguments, **options)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages, gae.skip_observation_gae(*arguments, **options), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returns, gae.value_targets(*arguments, **options), atol=1e-6, rtol=1e-6)
    assert torch.equal(compiled.skip_observation_gae(*arguments, **options), advantages)

    mask = arguments[2]
    for centre in (True, False):
        poisoned = torch.where(mask, advantages, math.nan)
        expected = whiten(poisoned, mask, centre=centre)
        assert compiled.whiten_(poisoned, mask, centre=centre) is poisoned
        torch.testing.assert_close(poisoned, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@needs_compiler
def test_threads_and_layout_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (values, rewards, mask, cu), options = case(3)
    alone = compiled.solve(values, rewards, mask, cu, **options)
    monkeypatch.setattr(compiled, "TOKENS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    values = torch.stack([values, values], 1)[:, 0].requires_grad_()  # strided, with gradient
    again = compiled.solve(values, rewards.double(), mask, cu.int(), **options)
    for a, b in zip(alone, again, strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


@needs_compiler
def test_refuses_what_would_be_lost_or_read_out_of_bounds() -> None:
    values, mask, cu = torch.zeros(2), torch.tensor([True, False]), torch.tensor([0, 2])
    for reward in (1.0, math.nan):
        with pytest.raises(ValueError, match="observation token"):
            compiled.solve(values, torch.tensor([0.0, reward]), mask, cu, gamma=1.0, lam=0.9)
    for edges in ([0, 3], [1, 2], [0, 2, 1, 2], [0, -1, 2]):
        with pytest.raises(ValueError, match="from 0 to N"):
            compiled.solve(values, torch.zeros(2), mask, torch.tensor(edges), gamma=1.0, lam=0.9)
    with pytest.raises(ValueError, match=r"\[N\]"):
        compiled.solve(values, torch.zeros(1), mask, cu, gamma=1.0, lam=0.9)
    with pytest.raises(ValueError, match=r"\[N\]"):
        compiled.whiten_(values, mask[:1])


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user who never compiled anything; the folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    compiled.load.cache_clear()
    yield tmp_path / "cache" / "sao-harness"
    compiled.load.cache_clear()


def test_without_a_compiler_the_error_says_what_to_do(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(ConfigError, match="none on PATH") as caught:
        compiled.load()
    assert "g++" in caught.value.hint


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"no such dialect\")'")
    with pytest.raises(ConfigError, match="no such dialect"):
        compiled.load()
    assert not list(fresh.iterdir()), "half a library stays"
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(ConfigError, match="nonexistent") as caught:
        compiled.load()
    assert "CXX" in caught.value.hint


@needs_compiler
def test_compiled_once_per_user(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.load()
    assert [path.suffix for path in fresh.iterdir()] == [".so"]
    compiled.load.cache_clear()
    monkeypatch.setenv("PATH", str(fresh))
    compiled.load()


def test_nothing_imports_it_unasked() -> None:
    code = "import sys, trainer.step, trainer.worker; assert 'trainer.advantages.compiled' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
