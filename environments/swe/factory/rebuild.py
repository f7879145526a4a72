"""The images of built tasks on another machine: from `dockerfiles/` and the pinned downloads, to the same commits.

Flows in: the folder that `build` made. Flows out: the images that the engine lacked.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from environments.swe.factory.build import BuildConfig
from environments.swe.factory.images import Images
from environments.swe.factory.recipes import load_recipes
from environments.swe.factory.sources import fetch_sdist, unpack
from harness.errors import ConfigError

log = logging.getLogger(__name__)


def rebuild(out: Path, config: BuildConfig) -> list[str]:
    """Build what is missing for `tasks.jsonl`; the tags built. Blocking. `check` then says whether the tasks hold here."""
    if not (out / "tasks.jsonl").is_file():
        raise ConfigError(f"{out} holds no tasks.jsonl", hint="give the folder that `sao tasks build` made")
    recipes, cache, folder = load_recipes(config.recipes), config.cache.expanduser(), out / "dockerfiles"
    contexts = [json.loads(path.read_text()) for path in sorted(folder.glob("*/context.json"))]
    sources = {facts["tag"]: facts["repo/"] for facts in contexts if "repo/" in facts}
    images, built = Images(recipes, config.base, cache, folder), list[str]()
    try:
        for line in (out / "tasks.jsonl").read_text().splitlines():
            row = json.loads(line)
            if images.have(row["image"]):
                continue
            facts = json.loads((folder / row["instance_id"] / "context.json").read_text())
            if not images.have(facts["from"]):
                source = sources[facts["from"]]
                recipe, version = recipes.projects[source["project"]], source["version"]
                tree = unpack(fetch_sdist(recipe.name, version, recipe.releases[version], cache))
                tag = images.project(recipe, version, tree)
                if tag != facts["from"]:
                    hint = "use the base image and the recipes of the build"
                    raise ConfigError(f"{row['instance_id']}: its project image is {facts['from']}, not {tag}", hint=hint)
                built.append(tag)
            built.append(images.instance_again(row["instance_id"]))
            log.info("%s built", built[-1])
    finally:
        images.close()
    return built
