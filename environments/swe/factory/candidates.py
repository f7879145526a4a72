"""Candidates of one project: found, screened in one container run, and made into rows with images.

Flows in: a recipe, images, sandboxes. Flows out: `Candidate`s whose `make` gives a row to validate, or why there is none.
Screening happens in the project's image, before anything is built for the candidate: most rejections cost one run.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import random
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from environments.swe.factory.hiding import hide
from environments.swe.factory.images import Images
from environments.swe.factory.mutants import Mutant, mutants
from environments.swe.factory.recipes import Recipe
from environments.swe.factory.releases import Pair, pair
from environments.swe.factory.running import Limits, Run, run_tests
from environments.swe.factory.sources import Tree, fetch_sdist, under, unpack
from environments.swe.factory.statements import bug_report, changelog_entry, release_request
from environments.swe.factory.tasks import Change, make_row, pytest_args, split_tests
from environments.swe.factory.validate import SEEDS
from environments.swe.rows import SweRow
from harness.errors import SandboxError
from harness.protocols import Sandbox, SandboxProvider
from harness.task import Task

MAX_FAILING = 0.1
"""Of a release's own suite: more means that the project does not work in this image."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a candidate has become."""

    row: SweRow | None = None
    """None: there is no task in it."""
    reason: str = ""
    screened: Run | None = None
    """The run of the state without the gold patch, under the first of the validation's seeds."""


@dataclass(slots=True)
class Project:
    """A recipe and where to work on it."""

    recipe: Recipe
    images: Images
    sandboxes: SandboxProvider
    limits: Limits
    cache: Path
    hidden: bool = True

    def tree(self, version: str) -> Tree:
        """The sources of a release."""
        return unpack(fetch_sdist(self.recipe.name, version, self.recipe.releases[version], self.cache))

    @asynccontextmanager
    async def sandbox(self, image: str) -> AsyncIterator[Sandbox]:
        """A container for a few runs."""
        sandbox = await self.sandboxes.acquire(Task(f"factory-{self.recipe.name}", (), image=image))
        try:
            yield sandbox
        finally:
            await asyncio.shield(sandbox.close())


async def _nothing() -> Made:
    return Made(reason="project")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to try."""

    instance_id: str
    project: str
    kind: str
    detail: str
    make: Callable[[], Awaitable[Made]] = _nothing


@dataclass(frozen=True, slots=True)
class Baseline:
    """A release as it is: its image, and the suite on it."""

    version: str
    tree: Tree
    image: str
    run: Run
    arguments: list[str]
    seconds: float


async def baseline(project: Project, version: str) -> Baseline:
    """Build the release and run its suite, with executed lines recorded; what fails anyway is deselected."""
    recipe, tree = project.recipe, project.tree(version)
    image = await asyncio.to_thread(project.images.project, recipe, version, tree)
    plain = pytest_args(recipe, [], project.limits.test_s)
    async with project.sandbox(image) as sandbox:
        started = asyncio.get_running_loop().time()
        run = await run_tests(sandbox, plain, seed=0, limits=project.limits)
        seconds = asyncio.get_running_loop().time() - started
        slow = replace(project.limits, test_s=10 * project.limits.test_s, run_s=10 * project.limits.run_s)
        traced = await run_tests(sandbox, plain, seed=0, limits=slow, cover=recipe.sources)
    failing = sorted(test for test, outcome in run.outcomes.items() if outcome not in ("passed", "skipped", "xfail"))
    if run.exit_code not in (0, 1) or len(failing) > MAX_FAILING * len(run.outcomes):
        raise SandboxError(
            f"{recipe.name} {version}: its suite does not run: {run.exit_code} {failing[:3]} {run.output[-300:]}"
        )
    run.lines = traced.lines
    return Baseline(version, tree, image, run, pytest_args(recipe, failing, project.limits.test_s), seconds)


async def mutant_candidates(project: Project, seed: int) -> list[Candidate]:
    """Bugs in executed lines of the recipe's release, in an order fixed by the seed."""
    recipe = project.recipe
    base = await baseline(project, recipe.mutate)
    found: list[tuple[str, Mutant]] = []
    for path in sorted(base.run.lines):
        if under(path, recipe.sources) and not under(path, recipe.tests) and path in base.tree:
            found += [
                (path, mutant) for mutant in mutants(base.tree[path], base.run.lines[path], f"{seed}:{recipe.name}:{path}")
            ]
    random.Random(f"{seed}:{recipe.name}").shuffle(found)

    def candidate(path: str, mutant: Mutant) -> Candidate:
        # Opaque: an id is seen by many, and must not say where the bug is.
        digest = hashlib.sha256(f"{path} {mutant}".encode()).hexdigest()[:8]
        instance_id = f"{recipe.name}__m-{recipe.mutate}-{digest}".lower()

        async def make() -> Made:
            return await _make_mutant(project, base, instance_id, path, mutant)

        return Candidate(instance_id, recipe.name, "mutant", f"{path}:{mutant.line} {mutant.operator}", make)

    return [candidate(path, mutant) for path, mutant in found]


async def _make_mutant(project: Project, base: Baseline, instance_id: str, path: str, mutant: Mutant) -> Made:
    broken = mutant.apply(base.tree[path])
    quick = replace(project.limits, test_s=5.0, run_s=min(project.limits.run_s, 20 + 5 * base.seconds))
    async with project.sandbox(base.image) as sandbox:
        await sandbox.write(posixpath.join("/testbed", path), broken)
        run = await run_tests(sandbox, base.arguments, seed=SEEDS[0], limits=quick)
    fails, passes, reason = split_tests(run, base.run)
    if reason:
        return Made(reason=reason)
    tree = {**base.tree, path: broken}
    places = {base.run.defined.get(test, ("", 0)) for test in fails} if project.hidden else set()
    if any(where not in tree for where, _ in places):
        return Made(reason="hiding")
    visible = hide(tree, places)
    messages = {test: run.messages.get(test, "") for test in fails}
    fixed = {**visible, path: base.tree[path]}
    statement = bug_report(project.recipe.name, messages)
    change = Change(visible, fixed, tree, fails, passes, statement)
    return await _row(project, base, instance_id, change, run)


def release_candidates(project: Project) -> list[Candidate]:
    """Neighbouring releases."""
    recipe = project.recipe

    def candidate(old: str, new: str) -> Candidate:
        instance_id = f"{recipe.name}__r-{old}-{new}".lower()

        async def make() -> Made:
            found = pair(recipe, project.tree(old), project.tree(new), (old, new))
            if isinstance(found, str):
                return Made(reason=found)
            return await _make_release(project, instance_id, found, old, new)

        return Candidate(instance_id, recipe.name, "release", f"{old} -> {new}", make)

    return [candidate(old, new) for old, new in recipe.pairs]


async def _make_release(project: Project, instance_id: str, found: Pair, old: str, new: str) -> Made:
    recipe, limits = project.recipe, project.limits
    image = await asyncio.to_thread(project.images.project, recipe, old, found.base)
    plain = pytest_args(recipe, [], limits.test_s)
    async with project.sandbox(image) as sandbox:
        await _put(sandbox, found.base, found.judged)
        before = await run_tests(sandbox, plain, seed=SEEDS[0], limits=limits)
        await _put(sandbox, found.base, found.fixed)
        after = await run_tests(sandbox, plain, seed=0, limits=limits)
    if after.exit_code not in (0, 1):
        return Made(reason=f"gold_fails: {after.output[-300:]}")
    fails, passes, reason = split_tests(before, after)
    if reason:
        return Made(reason=reason)
    failing = sorted(test for test, outcome in after.outcomes.items() if outcome not in ("passed", "skipped", "xfail"))
    if len(failing) > MAX_FAILING * len(after.outcomes):
        return Made(reason=f"gold_fails: {failing[0]}")
    messages = {test: before.messages.get(test, "") for test in fails}
    statement = release_request(recipe.name, new, changelog_entry(project.tree(new), new), messages)
    change = Change(found.base, found.fixed, found.judged, fails, passes, statement)
    base = Baseline(old, found.base, image, after, pytest_args(recipe, failing, limits.test_s), 0.0)
    return await _row(project, base, instance_id, change, before)


async def _row(project: Project, base: Baseline, instance_id: str, change: Change, screened: Run) -> Made:
    """The image, then the row that names it."""
    changed = {path: data for path, data in change.base.items() if base.tree.get(path) != data}
    removed = sorted(base.tree.keys() - change.base.keys())
    image = await asyncio.to_thread(project.images.instance, instance_id, base.image, changed, removed)
    return Made(make_row(project.recipe, base.version, instance_id, image, change, base.arguments), screened=screened)


async def _put(sandbox: Sandbox, old: Tree, new: Tree) -> None:
    """Write what changes between two trees, in the container's repository."""
    for path in sorted(old.keys() | new.keys()):
        where = posixpath.join("/testbed", path)
        if path not in new:
            await sandbox.exec(f"rm -f -- {shlex.quote(where)}", timeout_s=60)
        elif old.get(path) != new[path]:
            await sandbox.write(where, new[path])
