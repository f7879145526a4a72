"""Images of the factory, in three layers that share everything they can.

tools (base + git + a virtual environment with pytest) <- project (one release, editable) <- instance (one commit).

Flows in: recipes, trees. Flows out: image tags, and the build context of each so that others can build the same. The last
two need no network: wheels come from the host. An instance shows the agent the repository and nothing of the answer: one
commit, no copy of the package elsewhere, all files of the same age.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.swe.factory.diffs import AUTHOR, COMMIT_TIME, MESSAGE
from environments.swe.factory.recipes import Recipe, Recipes
from environments.swe.factory.sources import Tree, fetch_wheels
from harness.errors import ConfigError, SandboxError

PREFIX = "sao-swe"
CALL_S = 600
PYTHON = "import sys; print('%d.%d' % sys.version_info[:2])"

TOOLS = """\
FROM {base}
RUN command -v git >/dev/null \\
 || (apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*)
COPY wheels/ /opt/wheels/
RUN python3 -m venv /opt/venv \\
 && /opt/venv/bin/pip install -q --no-cache-dir --no-index --no-deps --find-links /opt/wheels {names} \\
 && rm -rf /opt/wheels
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8
WORKDIR /testbed
"""

PROJECT = """\
FROM {tools}
COPY wheels/ /opt/wheels/
COPY repo/ /testbed/
RUN pip install -q --no-cache-dir --no-index --no-deps --target /opt/build --find-links /opt/wheels {build} \\
 && {requirements}\\
    PYTHONPATH=/opt/build SETUPTOOLS_SCM_PRETEND_VERSION={version} \\
    pip install -q --no-cache-dir --no-index --no-deps --no-build-isolation --use-pep517 -e . \\
 && rm -rf /opt/build /opt/wheels /testbed/build \\
 && test -z "$(find / -xdev -path /proc -prune -o -path /testbed -prune \\
    -o \\( -path '*/{module}/__init__.py' -o -name {module}.py \\) -print)"
"""

INSTANCE = """\
FROM {project}
{copy}RUN {remove}printf '*.egg-info/\\n__pycache__/\\nbuild/\\n' > /tmp/exclude \\
 && git init -q --template= . && mkdir -p .git/info && mv /tmp/exclude .git/info/exclude \\
 && git add -Af -- . ':(exclude,glob)**/*.egg-info/**' ':(exclude,glob)**/__pycache__/**' \\
 && GIT_AUTHOR_DATE='{time} +0000' GIT_COMMITTER_DATE='{time} +0000' \\
    git -c user.name={name} -c user.email={email} commit -q -m {message} \\
 && rm -rf .git/logs .git/COMMIT_EDITMSG && git gc -q --prune=now \\
 && find . -xdev -newermt @{time} -exec touch -h -d @{time} {{}} +
"""


@dataclass(frozen=True, slots=True)
class Context:
    """A Dockerfile and the files beside it."""

    dockerfile: str
    files: Tree = field(default_factory=dict)

    def tar(self) -> bytes:
        """The same bytes for the same content, so that the engine's layer cache holds."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, data in sorted({"Dockerfile": self.dockerfile.encode(), **self.files}.items()):
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode, entry.mtime = len(data), 0o644, COMMIT_TIME
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()

    @property
    def digest(self) -> str:
        """Of everything that the engine gets."""
        return hashlib.sha256(self.tar()).hexdigest()[:12]

    def save(self, folder: Path, *, files: bool, facts: Mapping[str, Any]) -> None:
        """Write the Dockerfile, its files where they are few, and `context.json` that says where the others come from."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "Dockerfile").write_text(self.dockerfile)
        (folder / "context.json").write_text(json.dumps(facts, indent=1) + "\n")
        for path, data in self.files.items() if files else ():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    @classmethod
    def load(cls, folder: Path) -> tuple[Context, dict[str, Any]]:
        """What `save` wrote with its files, and the facts."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "repo").rglob("*") if path.is_file()}
        return cls((folder / "Dockerfile").read_text(), files), json.loads((folder / "context.json").read_text())


def instance_context(project: str, changed: Tree, removed: list[str]) -> Context:
    """The commit on top of a project image: `changed` files replaced, `removed` ones gone."""
    name, _, email = AUTHOR.partition(" <")
    dockerfile = INSTANCE.format(
        project=project,
        copy="COPY repo/ /testbed/\n" if changed else "",
        remove=f"rm -f -- {shlex.join(removed)} && " if removed else "",
        time=COMMIT_TIME,
        name=name,
        email=email.rstrip(">"),
        message=MESSAGE,
    )
    return Context(dockerfile, {f"repo/{path}": data for path, data in changed.items()})


class Images:
    """Builds them; blocking (call it in a thread)."""

    def __init__(self, recipes: Recipes, base: str, cache: Path, out: Path) -> None:
        import docker
        import requests

        self._errors = (docker.errors.DockerException, requests.exceptions.RequestException)
        try:
            self._client: Any = docker.from_env(timeout=CALL_S)
        except self._errors as error:
            hint = "the factory builds images: install and start it"
            raise ConfigError(f"Docker cannot be reached: {error}", hint=hint) from error
        self._recipes, self._base, self._cache, self._out = recipes, base, cache, out
        self._python, self._tools = "", ""

    def close(self) -> None:
        """Let go of the engine."""
        self._client.close()

    def tools(self) -> str:
        """The image with pytest; its tag."""
        if not self._tools:
            self._python = self._python_of_base()
            pins = self._recipes.pins(self._recipes.tools)
            context = Context(TOOLS.format(base=self._base, names=" ".join(self._recipes.tools)), self._wheels(pins))
            self._tools = self.build(f"{PREFIX}/tools:{context.digest}", context, {"sao.factory": "tools"}, network=None)
            context.save(self._out / "tools", files=False, facts={"tag": self._tools, "wheels/": pins, "python": self._python})
        return self._tools

    def project(self, recipe: Recipe, version: str, tree: Tree) -> str:
        """The image of one release, installed from /testbed; its tag."""
        tools = self.tools()
        names = [*self._recipes.build_tools, *recipe.requirements]
        pins = self._recipes.pins(names)
        install = "pip install -q --no-cache-dir --no-index --no-deps --find-links /opt/wheels " + " ".join(recipe.requirements)
        dockerfile = PROJECT.format(
            tools=tools,
            build=" ".join(self._recipes.build_tools),
            requirements=f"{install} && " if recipe.requirements else "",
            version=version,
            module=recipe.module,
        )
        dockerfile += "".join(f"COPY repo/{path} /testbed/{path}\n" for path in recipe.generated)
        files = {**self._wheels(pins), **{f"repo/{path}": data for path, data in tree.items()}}
        context = Context(dockerfile, files)
        labels = {"sao.factory": "project", "sao.project": recipe.name, "sao.version": version}
        tag = self.build(f"{PREFIX}/{recipe.name.lower()}:{version}-{context.digest}", context, labels)
        source = {"project": recipe.name, "version": version, "sha256": recipe.releases.get(version, "")}
        facts = {"tag": tag, "repo/": source, "wheels/": pins, "python": self._python}
        context.save(self._out / f"{recipe.name}-{version}", files=False, facts=facts)
        return tag

    def instance(self, instance_id: str, project: str, changed: Tree, removed: list[str]) -> str:
        """The image of one task; its tag."""
        context = instance_context(project, changed, removed)
        tag = f"{project.partition(':')[0]}:{instance_id.lower()}"
        self.build(tag, context, {"sao.factory": "instance", "sao.instance": instance_id})
        context.save(self._out / instance_id, files=True, facts={"tag": tag, "from": project})
        return tag

    def instance_again(self, instance_id: str) -> str:
        """The image of a task from its saved context, on a machine that has the project's image; its tag."""
        context, facts = Context.load(self._out / instance_id)
        return self.build(facts["tag"], context, {"sao.factory": "instance", "sao.instance": instance_id})

    def have(self, tag: str) -> bool:
        """Whether the engine has that image."""
        try:
            return bool(self._client.images.list(name=tag))
        except self._errors as error:
            raise SandboxError(f"image {tag}: {error}") from error

    def build(self, tag: str, context: Context, labels: dict[str, str], network: str | None = "none") -> str:
        """Build and tag. Raises `SandboxError` with the end of the log."""
        log: list[str] = []
        try:
            stream = self._client.api.build(
                fileobj=io.BytesIO(context.tar()),
                custom_context=True,
                tag=tag,
                labels=labels,
                network_mode=network,
                rm=True,
                forcerm=True,
                decode=True,
            )
            for record in stream:
                log.append(record.get("stream", ""))
                if "error" in record:
                    raise SandboxError(f"image {tag}: {record['error']}: {''.join(log)[-1500:]}")
        except self._errors as error:
            raise SandboxError(f"image {tag}: {error}") from error
        return tag

    def remove(self, tag: str) -> None:
        """Forget an image whose task was rejected."""
        try:
            self._client.api.remove_image(tag)
        except self._errors as error:
            raise SandboxError(f"image {tag}: {error}") from error

    def _wheels(self, pins: list[str]) -> Tree:
        folder = fetch_wheels(pins, self._python, self._cache)
        return {f"wheels/{file.name}": file.read_bytes() for file in sorted(folder.iterdir())}

    def _python_of_base(self) -> str:
        try:
            output = self._client.containers.run(
                self._base, ["python3", "-c", PYTHON], entrypoint="", network_mode="none", remove=True
            )
        except self._errors as error:
            hint = "give a base image with Python"
            raise ConfigError(f"image {self._base} cannot run python3: {error}", hint=hint) from error
        return str(output.decode().strip())
