"""From a name to a plug-in class: a table of strings, then entry points, then `module:attr`. Imported late, in every process.

Another package adds a name with an entry point in the group `sao.<kind>`, for example

    [project.entry-points."sao.environment"]
    my_env = "my_pkg.envs:MyEnv"
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from harness.accepts import accepts
from harness.errors import ConfigError, SaoError

Kind = Literal["environment", "agent", "sandbox", "evaluation", "loss", "advantage"]

BUILTIN: dict[Kind, dict[str, str]] = {
    "environment": {
        "toy_repair": "environments.toy_repair.environment:ToyRepair",
        "sums": "environments.sums:Sums",
        "corridor": "environments.corridor.environment:Corridor",
        "mixture": "environments.mixture:Mixture",
        "python_tir": "environments.python_tir.environment:PythonTir",
        "online_writing": "environments.online_writing.environment:OnlineWriting",
        "swe": "environments.swe.environment:Swe",
        "task_folders": "environments.swe.folder_environment:SweFolders",
    },
    "agent": {
        "tool_loop": "agents.tool_loop:ToolLoop",
        "openhands": "agents.openhands:OpenHands",
        "command": "agents.command:CommandAgent",
        "scripted": "agents.scripted:ScriptedAgent",
    },
    "sandbox": {
        "process": "harness.sandboxes.process:ProcessSandboxes",
        "docker": "harness.sandboxes.docker:DockerSandboxes",
        "memory": "harness.sandboxes.memory:MemorySandboxes",
    },
    "evaluation": {"heldout": "evals.heldout:evaluate"},
    "loss": {
        "dis": "trainer.losses.catalog:Dis",
        "ppo_clip": "trainer.losses.catalog:PpoClip",
        "grpo": "trainer.losses.catalog:Grpo",
        "dr_grpo": "trainer.losses.catalog:DrGrpo",
        "dapo": "trainer.losses.catalog:Dapo",
        "gspo": "trainer.losses.catalog:Gspo",
        "cispo": "trainer.losses.catalog:Cispo",
        "tis": "trainer.losses.catalog:Tis",
        "mis": "trainer.losses.catalog:Mis",
        "sequence_rejection": "trainer.losses.catalog:SequenceRejection",
    },
    "advantage": {
        "skip_observation": "trainer.advantages.catalog:SkipObservation",
        "through_observation": "trainer.advantages.catalog:ThroughObservation",
        "step_average": "trainer.advantages.catalog:StepAverage",
        "step_last": "trainer.advantages.catalog:StepLast",
        "grpo": "trainer.advantages.catalog:Grpo",
        "rloo": "trainer.advantages.catalog:Rloo",
        "dr_grpo": "trainer.advantages.catalog:DrGrpo",
        "running_mean_prompt": "trainer.advantages.catalog:RunningMeanPrompt",
        "running_mean_global": "trainer.advantages.catalog:RunningMeanGlobal",
        "spo": "trainer.advantages.catalog:Spo",
        "batch_norm": "trainer.advantages.catalog:BatchNorm",
        "reinforce_pp": "trainer.advantages.catalog:ReinforcePP",
        "reinforce_pp_baseline": "trainer.advantages.catalog:ReinforcePPBaseline",
    },
}

OWN_WORDS = ("value_error", "assertion_error")
"""Errors of pydantic whose message is the validator's own, so that the type of the field would say nothing."""


def nearest(name: str, valid: list[str]) -> str:
    """A hint that names the closest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean `{close[0]}`?" if close else f"valid: {', '.join(sorted(valid))}"


def load_object(path: str) -> Any:
    """The object at `module:attr`. Raises `ConfigError` when either is missing."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a stranger's module may raise anything
        raise ConfigError(
            f"`{path}`: cannot import `{module_name}`: {type(error).__name__}: {error}", hint="install it, or correct the name"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"`{path}`: `{module_name}` has no `{attribute}`", hint=nearest(attribute, dir(module)))
    return getattr(module, attribute)


def find(kind: Kind, name: str) -> Any:
    """The plug-in class for a name, an entry point or `module:attr`."""
    if ":" in name:
        return load_object(name)
    if name in BUILTIN[kind]:
        return load_object(BUILTIN[kind][name])
    known = {point.name: point for point in entry_points(group=f"sao.{kind}")}
    if name in known:
        return load_object(known[name].value)
    hint = _as_a_class(name) or nearest(name, [*BUILTIN[kind], *known])
    raise ConfigError(f"{kind}.id = {name!r} is not known", hint=hint)


def _as_a_class(name: str) -> str:
    """A hint for the name of a module without a class; empty for any other name."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything; mostly there is none
        why = f"; importing `{name}` raised {type(error).__name__}: {error}"
        return f"a class is named as module:Class{why}" if "." in name.strip(".") else ""
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "Config")]
    if classes:
        return f"a class is named as module:Class; that module has {', '.join(f'`{name}:{each}`' for each in classes)}"
    return f"a class is named as module:Class; `{name}` has no class with a `Config`" if "." in name else ""


def plugin_config(kind: Kind, table: dict[str, Any], prefix: str = "", beside: Sequence[str] = ()) -> tuple[Any, BaseModel]:
    """The class named by `table["id"]` and its own validated configuration from the rest of the table. `beside`: keys of the
    table that are not the plug-in's, for the hint of an unknown one."""
    options = {key: value for key, value in table.items() if key != "id"}
    cls = find(kind, str(table["id"]))
    if not hasattr(cls, "Config"):
        raise ConfigError(f"{kind}.id = {table['id']!r} is no plug-in: it has no `Config`", hint="name a plug-in class")
    try:
        return cls, cls.Config(**options)
    except ValidationError as error:
        raise config_error(error, cls.Config, prefix or kind, beside) from None


def environment(table: dict[str, Any], prefix: str = "") -> Any:
    """The environment that a table describes. What its constructor raises is a `ConfigError` that names it."""
    cls, options = plugin_config("environment", table, prefix)
    try:
        return cls(options)
    except SaoError:
        raise
    except Exception as error:  # a stranger's constructor may raise anything
        raise ConfigError(
            f"environment {table['id']!r} cannot be made: {type(error).__name__}: {error}",
            hint="its constructor takes one argument, the Config; what it reads must exist",
        ) from error


def config_error(error: ValidationError, model: type[BaseModel], prefix: str = "", beside: Sequence[str] = ()) -> ConfigError:
    """The first problem of a pydantic error as one line with field, value and next step. `beside`: see `plugin_config`."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in (*([prefix] if prefix else []), *first["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        names = [*_fields_at(model, first["loc"][:-1]), *(beside if len(first["loc"]) == 1 else ())]
        return ConfigError(f"`{path}` is not a setting{more}", hint=nearest(str(first["loc"][-1]), names))
    if first["type"] == "missing":
        return ConfigError(f"`{path}` is missing{more}", hint="add it to the configuration file, or pass it as key=value")
    valid = "" if first["type"] in OWN_WORDS else accepts(model, first["loc"])
    hint = f"valid: {valid}" if valid else "correct the value"
    return ConfigError(f"`{path}` = {first['input']!r}: {first['msg']}{more}", hint=hint)


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in (part for part in loc if isinstance(part, str)):  # a place in a list is of the list's kind
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if current is None:
            return []
    return list(current.model_fields)
