"""The `sao` command: verbs, one clear message for whatever a user can cause, exit code 0 / 1 (failed) / 2 (bad input) / 130
(stopped).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harness import __version__
from harness.config import Config
from harness.configfile import dump_config, load_config
from harness.doctor import check_imports, doctor, engine_doctor
from harness.errors import ConfigError, SaoError
from harness.ledger import Ledger
from harness.registry import BUILTIN, find, load_object
from harness.rundir import RunDir


def main() -> None:
    """Entry point."""
    parser = _parser()
    args, rest = parser.parse_known_args()
    if rest and (not hasattr(args, "config") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse leaves over what stands behind a flag
        args.config += rest
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    sys.path.append(str(Path.cwd()))  # `module:Class` of a package that stands here and is not installed
    try:
        check_imports()
        sys.exit(args.verb(args) or 0)
    except SaoError as error:
        _complain(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno is None:
            raise
        _complain(SaoError(str(error), hint="free disk space or correct permissions; a run goes on with --resume"))
        sys.exit(1)
    except sqlite3.OperationalError as error:
        _complain(SaoError(f"the ledger cannot be written: {error}", hint="free disk space, then go on with --resume"))
        sys.exit(1)


def _complain(error: SaoError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sao", description="Single-rollout asynchronous RL for coding agents.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, verb: Callable[[argparse.Namespace], Any], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(verb=verb)
        return sub

    for name, verb, text in (
        ("train", _train, "The main job: warm start, value pre-training, asynchronous SAO, held-out result."),
        ("sft", _sft, "Only the supervised warm start; prints the model folder."),
        ("pretrain-value", _pretrain_value, "Only value pre-training; prints the critic folder."),
    ):
        sub = add(name, verb, text)
        sub.add_argument(
            "config", nargs="*", help="TOML files, presets and key=value words, laid over each other in this order"
        )
        sub.add_argument("--dry-run", action="store_true", help="validate, print the resolved configuration, start nothing")
        if name == "train":
            sub.add_argument("--resume", metavar="RUN", help="go on with a run folder")
    engine = add("engine", _engine, "Start vLLM's servers for runs to use, and start again what ends.")
    engine.add_argument("config", nargs="*", help="TOML files, presets and key=value words; the table [engine] counts")
    status = add("status", _status, "Episodes of a run by outcome, and why any were dropped.")
    status.add_argument("run")
    verify = add("verify", _verify, "Prove the invariants of a run's tokens, objective and ledger from its files alone.")
    verify.add_argument("run", type=Path)
    verify.add_argument("--json", action="store_true", help="one JSON object instead of a line per invariant")
    regrade = add("regrade", _regrade, "Judge a run's stored patches again, each in a fresh sandbox.")
    regrade.add_argument("run")
    regrade.add_argument("--concurrency", type=_positive, default=4, help="sandboxes at a time")
    regrade.add_argument("--limit", type=_positive, help="only the first episodes")
    tasks = add("tasks", _tasks, "SWE tasks from public releases: build, rebuild their images, check a task file.")
    tasks.add_argument("action", choices=["build", "rebuild", "check"])
    tasks.add_argument("path", type=Path, help="build, rebuild: a folder; check: a JSON-lines file")
    tasks.add_argument("settings", nargs="*", metavar="key=value", help="build, rebuild: for example base=IMAGE")
    tasks.add_argument("--workers", type=_positive, default=2, help="check: rows at a time")
    model = add("model", _model, "A model folder from an installed Python package; nothing is downloaded.")
    model.add_argument("name", choices=["smollm2"])
    model.add_argument("path", type=Path, help="a new folder")
    model.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights in the file")
    kit = add("init", _init, "A new package with an environment of your own, to edit.")
    kit.add_argument("kind", choices=["env"])
    kit.add_argument("name", help="of the package and its folder: lower-case letters, digits and '_'")
    suite = add("check", _check, "The contract suite of an environment: played for real, one verdict per check.")
    suite.add_argument("environment", help="a name, or module:Class")
    suite.add_argument("settings", nargs="*", metavar="key=value", help="options of the environment, sandbox.id=docker, ..")
    suite.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    suite.add_argument("--without-solver", action="store_true", help="pass also if the environment offers no solver")
    judged = add("eval", _eval, "A suite of problems played by a model whose weights do not move, or two results compared.")
    judged.add_argument("config", nargs="*", metavar="SUITE", help="a name, a .toml, or a file of rows; then key=value words")
    judged.add_argument("--model", help="a run, a checkpoint, a model folder, or http://HOST/v1#NAME")
    judged.add_argument("--runs", type=_positive, help="samples of each problem (default: the suite's)")
    judged.add_argument("--problems", type=_positive, help="only the first so many (default: the suite's)")
    judged.add_argument("--resume", type=Path, metavar="RUN", help="play what is missing of an evaluation")
    judged.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two evaluations of one suite; nothing is played")
    judged.add_argument("--out", type=Path, help="with --compare: a folder for the report as Markdown and HTML")
    judged.add_argument("--dry-run", action="store_true", help="validate, print the resolved configuration, start nothing")
    judged.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    matrix = add("experiment", _experiment, "Arms x seeds as one resumable command, and the paper's tables from their runs.")
    matrix.add_argument("matrix", type=Path, help="a TOML file, for example configs/miniature.toml")
    matrix.add_argument("--out", type=Path, help="its folder; the same again runs what is missing (default: runs/<name>)")
    matrix.add_argument("--jobs", type=_positive, default=1, help="runs at a time on this machine")
    matrix.add_argument("--report", action="store_true", help="run nothing, only write the report anew")
    clean = add("clean", _clean, "Remove what dead runs left: containers, processes, folders.")
    clean.add_argument("--run", help="only this run's, even if it lives")
    check = add("doctor", _doctor, "What works on this machine, and how to get what does not.")
    check.add_argument("--engine", nargs="+", metavar="CONFIG", help="check the engine of this configuration instead")
    return parser


def _load(args: argparse.Namespace) -> Config:
    if not args.config:
        raise ConfigError("no configuration given", hint="for example `sao train configs/quickstart.toml`")
    return load_config(args.config)


def _open(args: argparse.Namespace, name: str, needs: str | None = None) -> tuple[RunDir, Config, bool] | None:
    """The run folder to work in, or None after a dry run."""
    resume = getattr(args, "resume", None)
    if resume is not None:
        if args.config:
            raise ConfigError(
                f"--resume takes its configuration from the run, not {args.config[0]!r}", hint="drop the argument"
            )
        folder, config = RunDir.resume(Path(resume))
        if args.dry_run:
            folder.close()
            print(dump_config(config), end="")
            return None
        return folder, config, True
    config = _load(args)
    if needs is not None and getattr(config, needs) is None:
        raise ConfigError(f"the configuration has no [{needs}] table", hint="add one, see configs/quickstart-scratch.toml")
    if args.dry_run:
        print(dump_config(config), end="")
        return None
    return RunDir.create(config, name), config, False


def _train(args: argparse.Namespace) -> int:
    from harness.loop import train
    from harness.run import Run

    opened = _open(args, "train")
    if opened is None:
        return 0
    folder, config, resumed = opened
    print(f"run: {folder.path}", file=sys.stderr)

    async def job() -> dict[str, Any]:
        async with Run(folder, config, resumed=resumed) as run:
            return await train(run)

    try:
        summary = _run(job())
    except KeyboardInterrupt:
        print(f"everything is recorded; go on with: sao train --resume {folder.path}", file=sys.stderr)
        raise
    _print_summary(summary)
    return 0


def _engine(args: argparse.Namespace) -> int:
    from harness.engines.serve import processes_of, serve

    config = _load(args)
    processes_of(config, Path)  # a mistake leaves no folder behind
    folder = RunDir.create(config, "engine")
    print(f"logs: {folder.path / 'logs'}", file=sys.stderr)
    _run(serve(processes_of(config, folder.log), lambda line: print(line, flush=True)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.engine is None:
        return doctor()
    config = load_config(args.engine)
    folder = RunDir.create(config, "doctor")
    print(f"logs: {folder.path / 'logs'}", file=sys.stderr)
    return _run(engine_doctor(config, folder.log))


def _sft(args: argparse.Namespace) -> int:
    from harness.run import Run
    from harness.stages import check_gate, warm_start

    opened = _open(args, "sft", "sft")
    if opened is None:
        return 0
    folder, config, _ = opened

    async def job() -> Path:
        async with Run(folder, config) as run:
            model = await warm_start(run)
            await run.launch_engine()
            await check_gate(run)
            return model

    print(_run(job()))
    return 0


def _pretrain_value(args: argparse.Namespace) -> int:
    from harness.run import Run
    from harness.stages import pretrain_value, warm_start

    opened = _open(args, "pretrain-value", "value")
    if opened is None:
        return 0
    folder, config, _ = opened

    async def job() -> Path | None:
        async with Run(folder, config) as run:
            await warm_start(run)
            stored = config.value is not None and config.value.run is not None
            await (run.launch_learner() if stored else run.launch())
            return await pretrain_value(run)

    print(_run(job()))
    return 0


def _run[T](job: Awaitable[T]) -> T:
    """asyncio.run with SIGTERM treated like Ctrl-C."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await job

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The harness's own error out of a task group, else the first one."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((e for e in flat if isinstance(e, SaoError)), flat[0])


def _print_summary(summary: dict[str, Any]) -> None:
    for name in ("before", "after"):
        r = summary["heldout"][name]
        if r:
            print(
                f"held-out success {name}: {r['success']:.3f}  (95 % interval {r['low']:.3f} to {r['high']:.3f}, n = {r['n']})"
            )
    print(f"{summary['wall_s']:.0f} s, policy version {summary['policy_version']}, episodes {json.dumps(summary['episodes'])}")
    print(f"run: {summary['run']}")


def _status(args: argparse.Namespace) -> int:
    path = Path(args.run)
    if not (path / "ledger.sqlite").is_file():
        raise ConfigError(f"{path} is not a run folder", hint="give the folder that the run printed")
    ledger = Ledger(path)
    print(json.dumps(ledger.counts()))
    for termination, reason, count in ledger.reasons():
        print(f"dropped {count}: {termination}: {reason}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from harness.verify import as_json, lines, verify

    checks = verify(args.run)
    if args.json:
        print(json.dumps(as_json(args.run, checks)))
    else:
        print("\n".join(lines(checks)))
    return 1 if any(check.faults for check in checks) else 0


def _regrade(args: argparse.Namespace) -> int:
    from harness.regrade import regrade

    verdicts = _run(regrade(Path(args.run), concurrency=args.concurrency, limit=args.limit))
    for verdict in verdicts:
        if not verdict.same:
            print(f"{verdict.episode}: {verdict.before} -> {verdict.after} {json.dumps(verdict.info)}")
    same = sum(verdict.same for verdict in verdicts)
    print(f"{same} of {len(verdicts)} verdicts are the same; all of them: {Path(args.run) / 'regrade.jsonl'}")
    return 0 if same == len(verdicts) else 1


def _tasks(args: argparse.Namespace) -> int:
    from harness import taskverbs

    if args.action == "build":
        report = _run(taskverbs.build(args.path, args.settings))
        print(json.dumps(report, indent=1))
        return 0
    if args.action == "rebuild":
        print("\n".join(taskverbs.rebuild(args.path, args.settings)))
        return 0
    if args.settings:
        raise ConfigError(f"`sao tasks check` takes no settings, not {args.settings[0]!r}", hint="drop it")
    rows, faults = _run(taskverbs.check(args.path, args.workers))
    for fault in faults:
        print(fault)
    print(f"{rows - len(faults)} of {rows} tasks are valid")
    return 1 if faults or not rows else 0


def _model(args: argparse.Namespace) -> int:
    load_object(f"trainer.{args.name}:convert")(args.path, args.dtype)
    print(args.path)
    return 0


def _init(args: argparse.Namespace) -> int:
    from harness.kit.init import init_environment

    print(init_environment(args.name, Path.cwd()))
    return 0


def _check(args: argparse.Namespace) -> int:
    from harness.kit.check import as_json, check, passed, table

    verdicts = check(args.environment, args.settings)
    print(json.dumps(as_json(args.environment, verdicts)) if args.json else table(verdicts))
    return 0 if passed(verdicts, without_solver=args.without_solver) else 1


def _eval(args: argparse.Namespace) -> int:
    if args.compare is not None:
        if args.config or args.model or args.resume or args.runs or args.problems or args.dry_run:
            raise ConfigError(
                "--compare plays nothing", hint="give two folders of evaluations; only --out and --json go with it"
            )
        comparison: Callable[..., int] = load_object("evals.verbs:comparison")
        return comparison(args.compare, out=args.out, as_json=args.json)
    if args.out is not None:
        raise ConfigError("--out is for --compare", hint="give run_dir=FOLDER; the report is in the folder of the evaluation")
    evaluation: Callable[..., int] = load_object("evals.verbs:evaluation")
    return evaluation(
        args.config,
        model=args.model,
        runs=args.runs,
        problems=args.problems,
        resume=args.resume,
        dry_run=args.dry_run,
        as_json=args.json,
        run=_run,
    )


def _experiment(args: argparse.Namespace) -> int:
    experiment: Callable[..., int] = load_object("evals.verbs:experiment")
    return experiment(args.matrix, args.out, args.jobs, report_only=args.report, run=_run)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _clean(args: argparse.Namespace) -> int:
    total = 0
    run_id = None if args.run is None else Path(args.run).name
    for name in BUILTIN["sandbox"]:
        try:
            total += find("sandbox", name).reap(run_id)
        except ConfigError as error:
            print(f"{name}: skipped: {error.message}", file=sys.stderr)
    print(f"removed {total}")
    return 0
