"""Which projects the factory knows: pinned releases, where their sources and tests are, what they need.

Flows in: a TOML file. Flows out: `Recipes`. Every download is pinned by name, version and sha256.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import ConfigError

DEFAULT = Path(__file__).with_name("recipes.toml")


class Recipe(BaseModel):
    """One project."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    """Its name in the package index: the key of its table."""
    licence: str
    module: str
    """Top-level import name: it may lie nowhere in the image but in the repository, else the answer leaks."""
    sources: list[str] = Field(min_length=1)
    """Folders or files of the code that mutants and gold patches change."""
    tests: list[str] = Field(min_length=1)
    """Folders or files of the suite."""
    requirements: list[str] = []
    """What the project and its tests import; each one is in `wheels`."""
    deselect: list[str] = []
    """Tests that fail on the unchanged release for reasons of the machine."""
    pytest_args: list[str] = []
    generated: list[str] = []
    """Released files that the build backend rewrites; they are put back, because the commit is the release."""
    mutate: str
    """The release whose sources are mutated."""
    releases: dict[str, str] = Field(min_length=1)
    """Version -> sha256 of the sdist, oldest first; neighbours are tried as release pairs."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Neighbouring releases."""
        versions = list(self.releases)
        return list(zip(versions, versions[1:], strict=False))


class Recipes(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid")

    tools: list[str]
    """Wheels of every image: pytest and what it needs."""
    build_tools: list[str]
    """Wheels that only the editable install sees."""
    wheels: dict[str, str]
    """`name==version` -> sha256; every one is pure Python."""
    projects: dict[str, Recipe]

    def pins(self, names: list[str]) -> list[str]:
        """Requirement lines with hashes for these distributions."""
        by_name = {pin.partition("==")[0]: f"{pin} --hash=sha256:{digest}" for pin, digest in self.wheels.items()}
        missing = sorted(set(names) - set(by_name))
        if missing:
            raise ConfigError(f"recipes: {missing} are not in [wheels]", hint="add them with version and sha256")
        return [by_name[name] for name in names]


def load_recipes(path: Path = DEFAULT) -> Recipes:
    """Read and check a recipe file."""
    try:
        recipes = Recipes.model_validate(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"recipes {path}: {error}") from error
    named = {name: recipe.model_copy(update={"name": name}) for name, recipe in recipes.projects.items()}
    for name, recipe in named.items():
        recipes.pins(recipe.requirements)
        if recipe.mutate not in recipe.releases:
            raise ConfigError(f"recipes: {name} mutates {recipe.mutate}, which is not among its releases")
    return recipes.model_copy(update={"projects": named})
