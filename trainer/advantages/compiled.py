"""Skip-observation GAE (A and G in one pass) and whitening in C++: an option that gives what `gae` and `whiten` give.

`gae.cpp` is built once by the system's compiler into the user's cache folder and called through ctypes. Nothing imports this
module unless asked to.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import ConfigError
from trainer.advantages.whiten import EPS

SOURCE = Path(__file__).with_name("gae.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
TOKENS_PER_THREAD = 65_536
"""Fewer take less time than starting a thread."""


def skip_observation_gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    returns: Tensor | None = None,
) -> Tensor:
    """As `trainer.advantages.gae.skip_observation_gae`; `returns`, [N] fp32 on the CPU, is filled with G = A + V.

    Values and rewards are read as fp32, everything else is fp64. Tensors of other devices are copied to the CPU and back.
    """
    n, rows = len(values), len(cu_seqlens) - 1
    v, u, action, cu = _raw(values), _raw(rewards), _raw(mask, torch.bool), _raw(cu_seqlens, torch.int64)
    if not (v.shape == u.shape == action.shape == (n,)) or cu[0] != 0 or cu[-1] != n or (cu.diff() < 0).any():
        raise ValueError("values, rewards and mask must be [N], and cu_seqlens must rise from 0 to N")
    lams, last = (
        _raw(torch.as_tensor(0.0 if x is None else x, dtype=torch.float64).expand(rows), torch.float64)
        for x in (lam, bootstrap)
    )
    advantages = torch.empty(n)
    before = (x.data_ptr() for x in (v, u, action, cu))
    after = (x.data_ptr() for x in (lams, last, advantages))
    threads = max(1, min(torch.get_num_threads(), rows, n // TOKENS_PER_THREAD))
    if load().gae(*before, rows, gamma, *after, None if returns is None else returns.data_ptr(), threads):
        raise ValueError("a reward sits on an observation token; put it on the last action token of its turn")
    return advantages.to(values.device)


def solve(values: Tensor, *arguments: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(advantages A, lambda-returns G), [N] fp32 each; arguments as `skip_observation_gae`."""
    returns = torch.empty(len(values))
    return skip_observation_gae(values, *arguments, **options, returns=returns), returns.to(values.device)


def whiten_(adv: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, *, centre: bool = True) -> Tensor:
    """As `trainer.advantages.whiten.whiten`, a collective like it, but in place; `adv` is [N] fp32. Returns `adv`."""
    x, action = _raw(adv), _raw(mask, torch.bool)
    if x.shape != action.shape or x.dim() != 1:
        raise ValueError("advantages and mask must be [N]")
    raw = x.data_ptr(), action.data_ptr(), len(x)

    def moments(around: float) -> list[float]:
        sums = torch.empty(3, dtype=torch.float64)
        load().moments(*raw, around, sums.data_ptr())
        if dist.is_available() and dist.is_initialized():
            sums = sums.to(adv.device)
            dist.all_reduce(sums, group=group)
        numbers: list[float] = sums.tolist()
        return numbers

    number, total, _ = moments(0.0)
    if number < 2:
        return adv
    mean = total / number
    variance = moments(mean)[2] / (number - 1)
    scale = 1.0 if not centre and variance < EPS else (variance + EPS) ** -0.5
    load().standardise(*raw, mean if centre else 0.0, scale)
    return adv if x.data_ptr() == adv.data_ptr() else adv.copy_(x)


@functools.cache
def load() -> Any:
    """The C functions, compiled if this user has not done so before. Raises `ConfigError` if that is impossible."""
    key = hashlib.sha256(repr((SOURCE.read_text(), FLAGS, platform.platform())).encode()).hexdigest()[:16]
    library = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sao-harness" / f"gae-{key}.so"
    if not library.exists():
        _compile(library)
    functions = ctypes.CDLL(str(library))
    pointer, integer, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    functions.gae.argtypes = [*[pointer] * 4, integer, double, *[pointer] * 4, integer]
    functions.gae.restype = ctypes.c_bool
    functions.moments.argtypes = [pointer, pointer, integer, double, pointer]
    functions.standardise.argtypes = [pointer, pointer, integer, double, double]
    functions.moments.restype = functions.standardise.restype = None
    return functions


def _compile(library: Path) -> None:
    """Write the library whole or not at all; of two processes that do so at once both succeed."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if not compiler:
        raise ConfigError(
            "the compiled GAE needs a C++ compiler and there is none on PATH",
            hint="install one (Debian: apt-get install g++), name it in CXX, or leave the compiled GAE off",
        )
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [*shlex.split(compiler), *FLAGS, str(SOURCE), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(built, library)
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"`{shlex.join(error.cmd)}` failed: {error.stderr[-500:]}", hint="it must be a C++17 compiler"
        ) from None
    except OSError as error:
        raise ConfigError(f"the compiled GAE cannot be built: {error}", hint="check CXX and XDG_CACHE_HOME") from error


def _raw(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.detach().to("cpu", dtype).contiguous()
