"""`sao init env NAME`: a package with an environment that works, to be edited.

Flows in: a name and the folder to make it in. Flows out: the path of a new folder, filled from `templates/` and with a copy of
the tiny policy, so that it can be moved.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from pathlib import Path
from string import Template

from harness.errors import ConfigError
from harness.registry import BUILTIN

TEMPLATES = Path(__file__).parent / "templates"
WARM = Path(__file__).resolve().parents[2] / "configs" / "quickstart-warm"
"""The tiny model of a checkout; an installed package has none."""
POLICY = "tiny-policy"
"""Where its copy lies; no Python package can be called so."""


def init_environment(name: str, where: Path) -> Path:
    """Write `where/name`. Raises `ConfigError` for a name that cannot be a package's, or a folder that is there."""
    _check_name(name)
    folder = where / name
    if folder.exists():
        raise ConfigError(f"{folder} exists", hint="take another name, or move it away")
    words = {
        "name": name,
        "Class": "".join(part.title() for part in name.split("_")),
        "policy": POLICY,
    }
    for source in sorted(TEMPLATES.rglob("*.tmpl")):
        target = folder / str(source.relative_to(TEMPLATES)).removesuffix(".tmpl").replace("NAME", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(source.read_text()).substitute(words))
    if WARM.is_dir():
        shutil.copytree(WARM, folder / POLICY)
    return folder


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a Python package", hint="use lower-case letters, digits and '_', a letter first"
        )
    if name in BUILTIN["environment"]:
        raise ConfigError(f"there is an environment {name!r} already", hint="take another name")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"there is a module {name!r} already, which the new one would hide", hint="take another name")
