"""Task folders in Harbor's format: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`.

Flows in: a folder, or a folder of such folders. Flows out: `FolderTask`s. The convention for the verdict: `tests/` is copied to
/tests after the agent is done, `bash /tests/test.sh` runs there and writes /logs/verifier/reward.json (an object of numbers, or
one number), else /logs/verifier/reward.txt (one number). Single-step Linux tasks only; what this cannot play is refused.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, VerifierFault

TESTS_DIR = "/tests"
REWARD_TEXT = "/logs/verifier/reward.txt"
REWARD_JSON = "/logs/verifier/reward.json"
NETWORKS = ("no-network", "public")
MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


@dataclass(frozen=True, slots=True)
class FolderTask:
    """One task folder, read and checked."""

    id: str
    """The folder's name."""
    folder: Path
    instruction: str
    image: str | None
    """A ready image; None: `dockerfile` is to be built."""
    dockerfile: Path | None
    """Its folder is the build context."""
    tests: dict[str, bytes]
    """Files of `tests/` by path relative to it; `test.sh` among them."""
    agent_s: float | None
    """Seconds that the agent may take; None: the task does not say."""
    verifier_s: float
    build_s: float
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = True
    """Whether agent and tests may reach the network; Harbor's default is yes."""
    workdir: str | None = None
    """None: the image's own."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the container."""
    verifier_env: dict[str, str] = field(default_factory=dict)
    """Environment of the tests, beside `env`."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> bytes:
        """The bytes of `tests/test.sh`."""
        return self.tests["test.sh"]


def load(source: str | Path) -> list[FolderTask]:
    """The tasks of a folder: itself, or its subfolders that hold a `task.toml`, in order of their names."""
    root = Path(source).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{source}: there is no such folder", hint="name a task folder, or a folder of task folders")
    if (root / "task.toml").is_file():
        return [read(root)]
    folders = sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"{source}: neither it nor a folder in it holds a task.toml", hint="name a folder of task folders")
    return [read(folder) for folder in folders]


def read(folder: Path) -> FolderTask:
    """One task folder. Raises `ConfigError` with the file, the field and the next step."""
    toml = _toml(folder / "task.toml")
    _refuse(folder, toml)
    env, agent, verifier = (_table(folder, toml, name) for name in ("environment", "agent", "verifier"))
    image = env.get("docker_image")
    dockerfile = folder / "environment" / "Dockerfile"
    if not image and not dockerfile.is_file():
        raise _error(folder, "neither `environment.docker_image` nor environment/Dockerfile is there", "add one of them")
    return FolderTask(
        id=folder.resolve().name,
        folder=folder,
        instruction=_instruction(folder),
        image=str(image) if image else None,
        dockerfile=dockerfile if dockerfile.is_file() and not image else None,
        tests=_tests(folder),
        agent_s=_number(folder, "agent.timeout_sec", agent.get("timeout_sec")),
        verifier_s=_number(folder, "verifier.timeout_sec", verifier.get("timeout_sec")) or 600.0,
        build_s=_number(folder, "environment.build_timeout_sec", env.get("build_timeout_sec")) or 600.0,
        cpus=_number(folder, "environment.cpus", env.get("cpus")),
        memory_mb=_size(folder, env, "memory"),
        storage_mb=_size(folder, env, "storage"),
        network=_network(folder, env),
        workdir=env.get("workdir"),
        env=_variables(folder, env, "environment"),
        verifier_env=_variables(folder, verifier, "verifier"),
        metadata=_table(folder, toml, "metadata"),
    )


def reward(text: bytes | None, json_text: bytes | None, key: str = "reward") -> float:
    """The number that the tests left: `reward.json` wins over `reward.txt`. No file or no finite number: `VerifierFault`.

    Of an object, `key` counts, or its only entry.
    """
    raw = json_text if json_text is not None else text
    if raw is None:
        raise VerifierFault(f"the tests wrote neither {REWARD_TEXT} nor {REWARD_JSON}")
    try:
        value = json.loads(raw) if json_text is not None else float(raw.decode())
        if isinstance(value, Mapping):
            value = value[key] if key in value or len(value) != 1 else next(iter(value.values()))
        if isinstance(value, bool) or not math.isfinite(number := float(value)):
            raise ValueError("not a finite number")
    except (ValueError, KeyError, TypeError) as error:
        raise VerifierFault(f"the tests wrote no reward, but {raw[:100]!r}") from error
    return number


def _error(folder: Path, message: str, hint: str) -> ConfigError:
    return ConfigError(f"{folder.name}: {message}", hint=hint)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(path.parent, f"task.toml cannot be read: {error.strerror}", "name a task folder") from error
    except ValueError as error:  # also an encoding that is not UTF-8
        raise _error(path.parent, f"task.toml is no TOML: {error}", "correct the file") from error


def _refuse(folder: Path, toml: dict[str, Any]) -> None:
    """What Harbor can play and this cannot."""
    env, verifier = _table(folder, toml, "environment"), _table(folder, toml, "verifier")
    system = str(env.get("os", "linux")).lower()
    reasons = {
        "`steps`: a task of several steps": bool(toml.get("steps")),
        f"`environment.os` = {system!r}": system != "linux",
        "`environment.gpus`: a GPU in the sandbox": bool(env.get("gpus")),
        "`environment.mcp_servers`": bool(env.get("mcp_servers")),
        "`environment.healthcheck`": bool(env.get("healthcheck")),
        "environment/docker-compose.yaml: several containers": (folder / "environment" / "docker-compose.yaml").is_file(),
        "`verifier.environment`: an image of its own for the tests": bool(verifier.get("environment")),
    }
    for reason, there in reasons.items():
        if there:
            raise _error(folder, f"{reason} is not supported", "drop the task")


def _table(folder: Path, toml: dict[str, Any], name: str) -> dict[str, Any]:
    table = toml.get(name, {})
    if not isinstance(table, dict):
        raise _error(folder, f"`{name}` = {table!r} is no table", f"write [{name}] in task.toml")
    return table


def _instruction(folder: Path) -> str:
    path = folder / "instruction.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _error(folder, f"instruction.md cannot be read: {error}", "every task needs instruction.md in UTF-8") from error
    if not text.strip():
        raise _error(folder, "instruction.md is empty", "write what the agent is to do")
    return text


def _tests(folder: Path) -> dict[str, bytes]:
    """All files of `tests/`. A link is refused: it could bring a file of this machine into the container."""
    root = folder / "tests"
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise _error(folder, f"tests/{path.relative_to(root)} is a link", "put the file itself there")
        if path.is_file():
            found[path.relative_to(root).as_posix()] = path.read_bytes()
    if not found.get("test.sh", b"").strip():
        raise _error(folder, "tests/test.sh is missing or empty", f"write the script that leaves {REWARD_TEXT}")
    return found


def _number(folder: Path, name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _error(folder, f"`{name}` = {value!r} is no positive number", "correct task.toml")
    return float(value)


def _size(folder: Path, env: dict[str, Any], name: str) -> int | None:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    old = env.get(name)
    if f"{name}_mb" in env or old is None:
        number = _number(folder, f"environment.{name}_mb", env.get(f"{name}_mb"))
        return None if number is None else math.ceil(number)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:I?B)?", str(old).strip().upper())
    if not match:
        raise _error(folder, f"`environment.{name}` = {old!r} is no size", f"write {name}_mb = 2048 in task.toml")
    return math.ceil(float(match[1]) * MB[match[2]])


def _network(folder: Path, env: dict[str, Any]) -> bool:
    mode = env.get("network_mode")
    if mode is None:
        return bool(env.get("allow_internet", True))
    if mode not in NETWORKS:
        raise _error(folder, f"`environment.network_mode` = {mode!r} is not supported", f"valid: {', '.join(NETWORKS)}")
    return bool(mode == "public")


def _variables(folder: Path, table: dict[str, Any], name: str) -> dict[str, str]:
    """Environment variables. `${NAME}` would hand this machine's secrets to a sandbox, and is refused."""
    variables = _table(folder, table, "env")
    for key, value in variables.items():
        if not isinstance(value, str) or re.search(r"\$\{\w+(:-[^}]*)?\}", value):
            raise _error(
                folder, f"`{name}.env.{key}` = {value!r} is no plain text", "write the value itself; the host's are not read"
            )
    return dict(variables)
