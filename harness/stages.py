"""What stands around RL, each a verb of its own: warm start by SFT, value pre-training, held-out evaluation.

Flows in: a `Run`. Flows out: a model folder, a critic folder, numbers. Every stage is skipped on resume when its result exists.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from harness.chat import Chat
from harness.conversations import conversations
from harness.engines.scripted import ScriptedEngine
from harness.episode import Episode
from harness.errors import ConfigError, InfrastructureError
from harness.ledger import Slot
from harness.order import TaskOrder, first
from harness.registry import find, load_object
from harness.rollout import collect
from harness.run import Run, log

VALUE_GATE_HINT = "give it more episodes or epochs (`[value]`), or lower the gate: value.min_ev, value.max_bias"


async def warm_start(run: Run) -> Path:
    """The policy's folder: the one configured, or the product of SFT with its gates. Raises `ConfigError` when a gate fails."""
    settings = run.config.sft
    done = run.folder.path / "model"
    if settings is None or (done / "model.safetensors").is_file():
        run.model = run.model if settings is None else done
        return run.model
    files = _tokenizer_files(run)
    chat = Chat(files, run.config.model.stop)
    paths = await _demonstrations(run, chat)
    log.info("supervised warm start on %d demonstrations", len(paths))
    await run.launch_learner()
    scratch = dict(run.config.model.scratch or {})
    scratch.pop("tokenizer", None)
    scratch.setdefault("vocab_size", chat.tokenizer.get_vocab_size())
    report = await run.learner.call(
        "sft",
        start={"path": run.config.model.path, "fields": scratch, "files": str(files)},
        paths=[str(p) for p in paths],
        settings=settings.model_dump(),
        out=str(done),
        seed=run.config.seed,
    )
    run.ledger.retire("demonstration")
    run.model = done
    run.folder.write("sft.json", report)
    log.info("warm start: %s", _short(report))
    return run.model


async def check_gate(run: Run) -> None:
    """Ask the gate of `[sft]` whether the running policy has the skill. Raises `ConfigError` if not."""
    settings = run.config.sft
    if settings is None or settings.gate is None or run.ledger.get("gate") is not None:
        return
    facts = await load_object(settings.gate)(run.engine, run.chat, run.tasks("train"))
    run.ledger.put("gate", facts)
    log.info("gate passed: %s", _short(facts))


def _tokenizer_files(run: Run) -> Path:
    if run.config.model.path is not None:
        return Path(run.config.model.path)
    writer = (run.config.model.scratch or {}).get("tokenizer")
    if writer is None:
        raise ConfigError("`model.scratch.tokenizer` is missing", hint="name the function that writes the tokenizer files")
    folder = run.folder.path / "model"
    load_object(writer)(folder)
    return folder


async def _demonstrations(run: Run, chat: Chat) -> list[Path]:
    settings = run.config.sft
    assert settings is not None
    if settings.run is not None:
        return stored(settings.run, "sft.run")
    if settings.conversations is not None:
        return conversations(Path(settings.conversations), chat, run.ledger.trajectories)
    if settings.script is None:
        raise ConfigError("`[sft]` names neither `script` nor `run`", hint="say where demonstrations come from")
    engine = ScriptedEngine(chat, load_object(settings.script), run.config.seed)
    stage = await run.demonstrator(engine, chat, settings.sandbox.table())
    tasks = run.tasks("train")
    order = TaskOrder(tasks, run.config.seed, shuffled=True)
    chosen = [next(order) for _ in range(settings.episodes)]
    done = run.ledger.done("demonstration")
    await collect(
        stage,
        [(Slot(n, i), tasks[i]) for n, i in enumerate(chosen) if i not in done],
        run.ledger,
        "demonstration",
        version=0,
        concurrency=run.config.rollout.concurrency,
        attempts=run.config.rollout.max_attempts,
        generation=run.generation,
    )
    return [run.ledger.path(p.id, s) for p in run.ledger.pending("demonstration") for s in range(p.segments)]


async def pretrain_value(run: Run) -> Path | None:
    """The critic's folder: the one configured, the product of value pre-training, or (with neither) the policy itself.

    None if the arm has no critic. Raises `ConfigError` if the critic fails its gate; its folder and record stay.
    """
    if run.config.critic is None:
        return None
    settings, given = run.config.value, run.config.critic.init
    out = run.folder.path / "critic"
    if given is not None or settings is None:
        return run.model if given is None else Path(given)
    if (out / "model.safetensors").is_file():
        return out
    paths = await _value_data(run) if settings.run is None else stored(settings.run, "value.run")
    record = await run.learner.call(
        "pretrain_value",
        model=str(run.model),
        paths=[str(p) for p in paths],
        settings=settings.model_dump() | {"head_lr_mult": run.config.critic.head_lr_mult},
        out=str(out),
        seed=run.config.seed,
    )
    run.ledger.retire("value")
    run.folder.write("value.json", record)
    log.info("value pre-training: held-out explained variance %s, data %s", record["report"]["value/ev"], record["data_sha256"])
    if not record["gate"]["passed"]:
        raise ConfigError(f"the critic in {out} failed its gate: {record['gate']['reason']}", hint=VALUE_GATE_HINT)
    return out


async def _value_data(run: Run) -> list[Path]:
    """Episodes of the initial policy on training tasks, one per task while they last; of a stream, on its first tasks."""
    settings = run.config.value
    assert settings is not None
    tasks = run.tasks("train")
    order = TaskOrder(tasks, run.config.seed + 1)
    chosen = [next(order) for _ in range(settings.episodes)]
    done = run.ledger.done("value")
    await collect(
        run.stage(),
        [(Slot(n, i), tasks[i]) for n, i in enumerate(chosen) if i not in done],
        run.ledger,
        "value",
        version=0,
        concurrency=run.config.rollout.concurrency,
        attempts=run.config.rollout.max_attempts,
        generation=run.generation,
    )
    return [run.ledger.path(p.id, s) for p in run.ledger.pending("value") for s in range(p.segments)]


def stored(folder: str, field: str) -> list[Path]:
    """The trajectories of another run's folder. Raises `ConfigError` if there are none."""
    paths = sorted((Path(folder) / "trajectories").glob("*.parquet"))
    if not paths:
        raise ConfigError(f"`{field}` = {folder!r} has no trajectories", hint="give a run folder")
    return paths


async def evaluate(run: Run, name: str) -> dict[str, Any]:
    """Held-out evaluation of the engine's present weights, once per `name`."""
    known = run.ledger.get(f"eval/{name}")
    if known is not None or run.config.eval.tasks == 0:
        return dict(known or {})
    tasks = run.tasks("heldout")
    episodes = await collect(
        run.stage(),
        [(Slot(n, i), tasks[i]) for n, i in enumerate(first(tasks, run.config.eval.tasks))],
        run.ledger,
        f"eval-{name}",
        version=run.version,
        concurrency=run.config.rollout.concurrency,
        attempts=run.config.rollout.max_attempts,
        generation=run.generation,
        seed=run.config.seed,
        keep=False,
    )
    result = await _judged(run, episodes)
    if hasattr(tasks, "shares"):
        sources = {e.task_id.partition("/")[0] for e in episodes}
        parts = {name: [e for e in episodes if e.task_id.startswith(f"{name}/")] for name in sorted(sources)}
        result["sources"] = {name: await _judged(run, part) for name, part in parts.items()}
    lost = [e for e in episodes if e.reward is None]
    if 2 * len(lost) > len(episodes):
        raise InfrastructureError(
            f"evaluation {name!r}: {len(lost)} of {len(episodes)} episodes were lost; the last: {lost[-1].error}",
            hint="mend the cause, then --resume",
        )
    run.ledger.put(f"eval/{name}", result)
    log.info("held-out %s: %s", name, _short(result))
    return result


async def _judged(run: Run, episodes: list[Episode]) -> dict[str, Any]:
    result = find("evaluation", run.config.eval.id)(episodes)
    return dict(await result if inspect.isawaitable(result) else result)


def _short(facts: dict[str, Any]) -> str:
    plain = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items() if not isinstance(v, (list, dict))}
    return json.dumps(plain)
