"""Plays a suite with a model whose weights do not move, and keeps everything in a run folder that can be resumed.

Flows in: a `Plan`. Flows out: a `Result`, in `result.json`, from the folder's ledger alone: what has a verdict is never played
again, what infrastructure has lost is played again at the next resume, and is missing until then.
"""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from evals.models import Model
from evals.progress import Progress
from evals.result import Result, Sample
from evals.suites import Suite
from harness.config import Config
from harness.configfile import made, overlay, overrides
from harness.endpoint import Endpoint, EndpointConfig
from harness.endpoint_session import EndpointSession
from harness.errors import ConfigError
from harness.ledger import Attempt, Slot
from harness.modelfolder import weights_digest
from harness.order import first
from harness.registry import config_error
from harness.rollout import collect
from harness.run import Run
from harness.rundir import RunDir
from harness.task import Split

log = logging.getLogger("sao")

PLAN, OFFICIAL = "evaluation.json", "official.json"
PURPOSE = "eval-suite"
MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Plan:
    """One evaluation; everything that a resumed one needs besides the configuration."""

    suite: str
    model: str
    identity: dict[str, Any]
    endpoint: dict[str, Any] | None
    runs: int
    split: Split
    problems: int | None
    """The first so many of the split; None: all."""
    official: bool


def prepare(suite: Suite, model: Model, words: list[str], runs: int | None, problems: int | None) -> tuple[Config, Plan]:
    """Lay suite, model and words over each other, and validate all of it. Raises `ConfigError`."""
    if runs is not None and runs > MOST_RUNS:
        raise ConfigError(f"`--runs` = {runs} of each problem", hint=f"at most {MOST_RUNS}")
    said = overrides(words)
    for name in ("path", "scratch"):
        if name in _table(said, "model"):
            raise ConfigError(f"`model.{name}` is not for an evaluation", hint="give the model as --model")
    own = {key: value for key, value in model.layers.items() if key != "agent" or "agent" not in suite.layers}
    data = overlay(overlay(_bare(suite.layers), own), said)
    endpoint = _table(data, "endpoint")
    data.pop("endpoint", None)
    if endpoint and model.endpoint is None:
        raise ConfigError(
            "`endpoint` is given, but the model is no endpoint", hint="drop it, or give --model http://HOST/v1#NAME"
        )
    config = made({**data, "steps": 0}, model=model.endpoint is None)
    if config.engine.url and model.endpoint is None:
        raise ConfigError(
            f"`engine.url` = {config.engine.url!r}: what weights it serves is not known",
            hint="drop it, and the model's own weights are served; or ask the server as --model http://HOST/v1#NAME",
        )
    asked = None if model.endpoint is None else _endpoint(model.endpoint | endpoint).model_dump()
    count = problems if problems is not None or "eval" not in data else config.eval.tasks
    if count == 0:
        raise ConfigError("`eval.tasks` = 0 asks no problem", hint="give --problems N, or eval.tasks=N")
    table = suite.table
    return config, Plan(suite.name, model.name, model.identity, asked, runs or table.runs, table.split, count, table.official)


def _bare(layers: dict[str, Any]) -> dict[str, Any]:
    """Without what only training needs, what names a model or serves it, and noise that training has by intent."""
    dropped = ("model", "sft", "value", "critic", "loss", "advantage", "algorithm", "steps", "engine")
    kept = {key: value for key, value in layers.items() if key not in dropped}
    kept["engine"] = {key: value for key, value in _table(layers, "engine").items() if key not in ("noise", "url")}
    return kept | {"model": {k: v for k, v in _table(layers, "model").items() if k == "stop"}}


def _table(layers: dict[str, Any], name: str) -> dict[str, Any]:
    table = layers.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"`{name}` = {table!r} is no table", hint=f"give its fields, as {name}.key=value")
    return table


def _endpoint(fields: dict[str, Any]) -> EndpointConfig:
    try:
        return EndpointConfig(**fields)
    except ValidationError as error:
        raise config_error(error, EndpointConfig, prefix="endpoint") from None


def store(folder: RunDir, plan: Plan) -> None:
    """Note the plan in its folder."""
    folder.write(PLAN, asdict(plan))


def stored(path: Path) -> Plan:
    """The plan of a folder. Raises `ConfigError` if it is none of an evaluation."""
    try:
        return TypeAdapter(Plan).validate_json((path / PLAN).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} is no evaluation: {error}", hint="give the folder that `sao eval` printed") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{path} is no evaluation: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            hint="give the folder that `sao eval` printed",
        ) from error


async def evaluate(folder: RunDir, config: Config, plan: Plan) -> Result:
    """Play what is missing and write `result.json`. Raises `InfrastructureError` when nothing but losses come in."""
    async with Run(folder, config, resumed=True) as run, AsyncExitStack() as stack:
        run.ledger.recover(batches=0, version=0)  # what a killed process was playing
        run.ledger.put("records", plan.endpoint is None)
        judge = _official_judge(run) if plan.official else None
        tasks = run.tasks(plan.split)
        chosen = list(range(len(tasks))) if plan.problems is None else first(tasks, plan.problems)
        if not chosen:
            raise ConfigError(f"suite {plan.suite!r} has no {plan.split} tasks", hint="correct the suite's [environment]")
        slots = [Slot(draw, i, member) for draw, (member, i) in enumerate((m, i) for m in range(plan.runs) for i in chosen)]
        known = run.ledger.attempts(PURPOSE)
        missing = [s for s in slots if (place := (s.index, s.member)) not in known or known[place].reward is None]
        if missing:
            if plan.endpoint is None:
                _same_weights(plan, run.model)
                await run.launch_engine()
                stage = run.stage()
            else:
                asked = EndpointConfig(**plan.endpoint)
                endpoint = await stack.enter_async_context(Endpoint(asked, config.rollout.concurrency))
                stage = run.stage_with(partial(EndpointSession, endpoint, config.limits.limits()))
            with Progress(plan.suite, len(slots), len(slots) - len(missing)) as progress:
                await collect(
                    stage,
                    ((slot, tasks[slot.index]) for slot in missing),
                    run.ledger,
                    PURPOSE,
                    version=0,
                    concurrency=config.rollout.concurrency,
                    attempts=config.rollout.max_attempts,
                    generation=run.generation,
                    seed=config.seed,
                    keep=False,
                    records=plan.endpoint is None,
                    heed=progress.heed,
                )
        known = run.ledger.attempts(PURPOSE)
        result = Result(
            suite=plan.suite,
            model=plan.model,
            runs=plan.runs,
            problems=tuple(tasks[i].id for i in chosen),
            settings=_settings(config, plan),
            samples=tuple(_sample(known[place]) for s in slots if (place := (s.index, s.member)) in known),
        )
        result.save(folder.path)
        if judge is not None and (missing or not (folder.path / OFFICIAL).is_file()):
            await _official(judge, run, plan, folder)
        return result


def _same_weights(plan: Plan, model: Path) -> None:
    """Raises `ConfigError` if the folder holds other weights than when the evaluation began."""
    began, found = plan.identity.get("sha256"), weights_digest(model)
    if found != began:
        raise ConfigError(
            f"{model} has changed: its weights have sha256 {found}, and this evaluation was begun with {began}",
            hint="evaluate the new weights by themselves, with --model instead of --resume",
        )


def _settings(config: Config, plan: Plan) -> dict[str, Any]:
    """What a score depends on besides suite and model; two results that differ in it are told apart by it."""
    names: dict[str, Any] = dict.fromkeys(("seed", "environment", "agent", "sandbox", "limits"), True)
    if plan.endpoint is None:
        names |= {"model": {"stop"}, "rollout": {"tool_calls"}, "engine": {"id", "noise"}}
    asked = config.model_dump(mode="json", exclude_none=True, include=names)
    return {**asked, "split": plan.split, "identity": plan.identity, "endpoint": plan.endpoint}


def _sample(attempt: Attempt) -> Sample:
    lost = attempt.reward is None
    return Sample(
        problem=attempt.task_id,
        run=attempt.member,
        reward=attempt.reward,
        termination=attempt.termination or "aborted",
        turns=attempt.turns or 0,
        tokens=attempt.tokens or 0,
        action_tokens=attempt.action_tokens or 0,
        seconds=attempt.seconds or 0.0,
        error=(attempt.reason or "") if lost else "",
    )


def _official_judge(run: Run) -> Any:
    """The environment, if it has an official judge, and that is installed. Raises `ConfigError`."""
    judge: Any = run.environment
    if not hasattr(judge, "official"):
        raise ConfigError(
            f"environment {run.config.environment.id!r} has no official judge", hint="drop `official` from the suite"
        )
    judge.official_ready()
    return judge


async def _official(judge: Any, run: Run, plan: Plan, folder: RunDir) -> None:
    """Ask the official judge about the same artifacts, run by run; its verdicts are in `official.json`."""
    left = run.ledger.artifacts_of(PURPOSE)
    tasks = run.tasks(plan.split)
    verdicts: dict[str, Any] = {}
    for member in sorted({m for _, m in left}):
        indices = [index for index, m in left if m == member]
        artifacts = {tasks[index].id: left[index, member] for index in indices}
        place = folder.path / "official" / f"run-{member}"
        verdicts[f"run {member}"] = await judge.official([tasks[index] for index in indices], artifacts, place)
    folder.write(OFFICIAL, verdicts)
    log.info("official verdicts: %s", json.dumps({m: {k: len(v) for k, v in facts.items()} for m, facts in verdicts.items()}))
