"""`sao doctor`: what works on this machine, or what an engine can do, one line each, with the next step for what does not.

And the import-name check.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

from harness.config import Config
from harness.errors import ConfigError

FOLDERS = ("harness", "environments", "agents", "trainer", "evals")


def check_imports() -> None:
    """The five folders must be this project's. Raises `ConfigError` naming the distribution in the way."""
    home = Path(__file__).resolve().parent.parent
    for name in FOLDERS:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if origin != home:
            owners = [d for d in packages_distributions().get(name, []) if d != "sao-harness"]
            raise ConfigError(
                f"the package `{name}` is not this project's but {spec.origin if spec else 'missing'}"
                + (f", installed by {', '.join(owners)}" if owners else ""),
                hint=f"uninstall {owners[0]} from this environment" if owners else "reinstall with `make setup`",
            )


def doctor() -> int:
    """Print the report; exit code 0 when the quickstart can run."""
    ok = True
    for name, good, text, needed in _checks():
        ok &= good or not needed
        _print(name, good, text, needed)
    return 0 if ok else 1


async def engine_doctor(config: Config, logs: Callable[[str], Path]) -> int:
    """Print what the engine of a configuration can do; exit code 0 when a run can use it. `logs`: process -> its log file."""
    from harness.engines.checkup import checkup

    ok = True

    def say(name: str, good: bool, text: str) -> None:
        nonlocal ok
        ok &= good
        _print(name, good, text)

    await checkup(config, logs, say)
    return 0 if ok else 1


def _print(name: str, good: bool, text: str, needed: bool = True) -> None:
    print(f"{'ok  ' if good else 'FAIL' if needed else '-   '} {name}: {text}", flush=True)


def _checks() -> list[tuple[str, bool, str, bool]]:
    """(what, whether it works, detail or next step, whether the quickstart needs it)."""
    rows = [("python", sys.version_info >= (3, 12), platform.python_version(), True)]
    for package in ("torch", "transformers", "pyarrow", "aiohttp"):
        found = importlib.util.find_spec(package) is not None
        rows.append((package, found, version(package) if found else "missing: run `make setup`", True))
    rows.append(("bash", shutil.which("bash") is not None, shutil.which("bash") or "missing: install bash", True))
    rows.append(("processors", True, f"{os.cpu_count()}", True))
    free = shutil.disk_usage(".").free / 2**30
    rows.append(("disk", free > 2, f"{free:.0f} GiB free here" + ("" if free > 2 else "; the quickstart wants 2"), True))
    swebench = importlib.util.find_spec("swebench") is not None
    judge = version("swebench") if swebench else "missing; would judge SWE tasks: make setup-swe"
    rows.append(("swebench", swebench, judge, False))
    own = Path(sys.prefix) / "agents" / "bin" / "python"
    openhands = own.is_file() or importlib.util.find_spec("openhands") is not None
    rows.append(
        ("openhands", openhands, str(own) if openhands else "missing; would run agent.id=openhands: make setup-agents", False)
    )
    vllm = Path(sys.prefix) / "vllm" / "bin" / "python"
    rows.append(
        ("vllm", vllm.is_file(), str(vllm) if vllm.is_file() else "missing; would run engine.id=vllm: make setup-vllm", False)
    )
    for name, (good, text) in {"docker": _docker(), "gpu": _gpu(), "compiler": _compiler()}.items():
        rows.append((name, good, text, False))
    return rows


def _docker() -> tuple[bool, str]:
    import docker

    try:
        client = docker.from_env(timeout=5)
        return True, f"engine {client.version()['Version']}: sandbox.id=docker works"
    except docker.errors.DockerException:
        return (
            False,
            "not reached; would add container isolation: install docker and start it (Debian: apt-get install docker.io)",
        )


def _gpu() -> tuple[bool, str]:
    if shutil.which("nvidia-smi") is None:
        return False, "no NVIDIA driver; would add bf16 training: the quickstart runs on CPU"
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return result.returncode == 0, result.stdout.strip() or result.stderr.strip()


def _compiler() -> tuple[bool, str]:
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return (
        found is not None,
        found or "no C++ compiler; would add trainer.compiled_gae: install one (Debian: apt-get install g++)",
    )
