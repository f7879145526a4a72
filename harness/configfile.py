"""From files and words to a `Config`: TOML files and presets laid over each other, dotted overrides, and back to TOML.

Flows in: `run.toml grpo_dis steps=10`. Flows out: a validated `Config`, saved resolved in the run folder. A preset is a small
TOML file in `harness/presets/`. Laying one table over another merges key by key, with two exceptions: a plug-in table of
another `id` replaces the one below, since the old one's options mean nothing to it, and `table = false` takes a table away.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from harness.config import Config
from harness.errors import ConfigError
from harness.registry import config_error, nearest

PRESETS = Path(__file__).parent / "presets"
REMOVABLE = ("critic", "value", "sft")


def presets() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_config(words: str | Path | Sequence[str | Path], more: Sequence[str] = (), *, model: bool = True) -> Config:
    """Lay files, presets and `key=value` words over each other in order, then `more` words; validate (see `made`)."""
    data: dict[str, Any] = {}
    for word in [words] if isinstance(words, (str, Path)) else words:
        layer = _override(word) if isinstance(word, str) and _is_override(word) else _read(word)
        data = overlay(data, layer)
    return made(overlay(data, overrides(more)), model=model)


def made(data: dict[str, Any], *, model: bool = True) -> Config:
    """The validated configuration of nested tables; without `model`, one of an evaluation whose model is elsewhere.

    Raises `ConfigError`.
    """
    try:
        config = Config(**_removed(data))
    except ValidationError as error:
        raise config_error(error, Config) from None
    config.check(model=model)
    return config


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as one table. Raises `ConfigError`."""
    data: dict[str, Any] = {}
    for word in words:
        data = overlay(data, _override(word))
    return data


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`; neither is changed."""
    out = dict(below)
    for key, value in above.items():
        under = out.get(key)
        out[key] = value
        if isinstance(under, dict) and isinstance(value, dict) and value.get("id") in (None, under.get("id", value.get("id"))):
            out[key] = overlay(under, value)
    return out


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _is_override(word: str) -> bool:
    return "=" in word and not os.path.isfile(word)  # Path.is_file raises for a value longer than a file name


def _read(word: str | Path) -> dict[str, Any]:
    path = PRESETS / f"{word}.toml" if str(word) in presets() else Path(word)
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"cannot read {str(word)!r}: it is neither a file nor a preset",
            hint=f"{nearest(str(word), presets())}; a setting is key=value",
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {str(word)!r}: {error.strerror}", hint="give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{word}: not valid TOML: {error}", hint="correct the file") from None


def _override(item: str) -> dict[str, Any]:
    """`a.b=value` as nested tables; the value is TOML, a bare word is a string."""
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {item!r} is not key=value", hint="for example rollout.concurrency=32")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _removed(data: dict[str, Any]) -> dict[str, Any]:
    """`table = false` as None."""
    return {key: None if value is False and key in REMOVABLE else value for key, value in data.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
