"""Released sources as plain trees, fetched through the user's own pip and checked against the recipe's hashes.

Flows in: name, version, sha256. Flows out: a `Tree`. Which index pip asks, and with which certificates, is pip's own
configuration.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from harness.errors import ConfigError

Tree = dict[str, bytes]
"""Path in the repository -> content of every regular file."""
PIP_S = 600
DROPPED = ("PKG-INFO", ".gitattributes", ".git_archival.txt")
"""Build metadata, and what would make git change the bytes that it stores."""


def fetch_sdist(name: str, version: str, sha256: str, cache: Path) -> bytes:
    """The sdist's bytes: from `cache`, else by `pip download`."""
    cached = cached_sdist(name, version, sha256, cache)
    if not cached.is_file() or hashlib.sha256(cached.read_bytes()).hexdigest() != sha256:
        with tempfile.TemporaryDirectory() as folder:
            _pip_download(["--no-deps", "--no-binary", ":all:", f"{name}=={version}"], Path(folder))
            files = list(Path(folder).iterdir())
            data = files[0].read_bytes() if len(files) == 1 else b""
            found = hashlib.sha256(data).hexdigest()
            if found != sha256:
                raise ConfigError(f"{name} {version}: sha256 is {found}, the recipe says {sha256}", hint="do not use that file")
            cache.mkdir(parents=True, exist_ok=True)
            cached.write_bytes(data)
    return cached.read_bytes()


def cached_sdist(name: str, version: str, sha256: str, cache: Path) -> Path:
    """Where `fetch_sdist` keeps it."""
    return cache / f"{name}-{version}-{sha256[:12]}.tar.gz"


def unpack(data: bytes) -> Tree:
    """Regular files of an sdist without its top folder and build metadata."""
    tree: Tree = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive.getmembers():
            tarfile.data_filter(member, "/unpacked")  # raises on whatever would leave the folder
            path = "/".join(PurePosixPath(member.name).parts[1:])
            parts = path.split("/")
            generated = any(part.endswith(".egg-info") or part == "__pycache__" for part in parts)
            if not member.isfile() or generated or parts[-1] in DROPPED:
                continue
            file = archive.extractfile(member)
            assert file is not None
            tree[path] = file.read()
    return tree


def fetch_wheels(pins: list[str], python: str, cache: Path) -> Path:
    """A folder with exactly these pure wheels, for that Python (`3.12`); pip checks the hashes."""
    folder = wheel_folder(pins, python, cache)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            requirements = Path(work, "requirements.txt")
            requirements.write_text("\n".join(pins) + "\n")
            wheels = Path(work, "wheels")
            pure = ["--python-version", python, "--implementation", "py", "--abi", "none", "--platform", "any"]
            words = ["--no-deps", "--only-binary", ":all:", *pure, "--require-hashes", "-r", str(requirements)]
            _pip_download(words, wheels)
            wheels.rename(folder)
    return folder


def wheel_folder(pins: list[str], python: str, cache: Path) -> Path:
    """Where `fetch_wheels` keeps them."""
    return cache / f"wheels-{hashlib.sha256(chr(10).join([python, *pins]).encode()).hexdigest()[:16]}"


def under(path: str, roots: list[str]) -> bool:
    """Whether a path is one of these files or inside one of these folders."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _pip_download(words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip download: no answer in {PIP_S} s: {words[-1]}") from error
    if done.returncode != 0:
        hint = "the factory uses pip of this environment (`python -m pip`) and the index that it is configured with"
        raise ConfigError(f"pip download failed: {done.stderr.strip()[-800:]}", hint=hint)
