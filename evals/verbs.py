"""`sao eval` and `sao experiment` behind the command line: from their arguments to an exit code.

Flows in: parsed arguments, and how the command line runs a coroutine. Flows out: what is printed, and 0, or 1 if something is
missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from evals import report
from evals.compare import Comparison, compare
from evals.evaluate import OFFICIAL, Plan, evaluate, prepare, store, stored
from evals.experiment.matrix import load_matrix
from evals.experiment.report import write_report
from evals.experiment.runner import make_folder, outcome, run_matrix
from evals.models import find_model
from evals.result import Result, load
from evals.suites import load_suite, suites
from harness.configfile import dump_config
from harness.errors import ConfigError
from harness.rundir import RunDir

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


def evaluation(
    words: list[str],
    *,
    model: str | None,
    runs: int | None,
    problems: int | None,
    resume: Path | None,
    dry_run: bool,
    as_json: bool,
    run: Runner,
) -> int:
    """Play a suite with a model, or go on with an evaluation, and report."""
    if resume is not None:
        if words or model or runs or problems:
            raise ConfigError("--resume takes suite, model and settings from the evaluation", hint="drop the other arguments")
        plan = stored(resume)
        folder, config = RunDir.resume(resume, model=plan.endpoint is None)
        if dry_run:
            folder.close()
            sys.stdout.write(dump_config(config))
            return 0
    else:
        if not words or model is None:
            known = ", ".join(suites())
            raise ConfigError("a suite and a --model are needed", hint=f"sao eval SUITE --model RUN; suites: {known}")
        config, plan = prepare(load_suite(words[0]), find_model(model), words[1:], runs, problems)
        if dry_run:
            sys.stdout.write(_described(plan))
            sys.stdout.write(dump_config(config))
            return 0
        folder = RunDir.create(config, f"eval-{plan.suite}")
        store(folder, plan)
    sys.stderr.write(f"run: {folder.path}\n")
    try:
        result: Result = run(evaluate(folder, config, plan))
    except KeyboardInterrupt:
        sys.stderr.write(f"everything is recorded; go on with: sao eval --resume {folder.path}\n")
        raise
    write(result, folder.path, "report")
    official = folder.path / OFFICIAL
    if as_json:
        facts = json.loads(official.read_text()) if official.is_file() else None
        sys.stdout.write(json.dumps({**report.as_json(result), "official": facts, "run": str(folder.path)}) + "\n")
    else:
        sys.stdout.write(report.text(result))
        if official.is_file():
            for name, facts in json.loads(official.read_text()).items():
                said = ", ".join(f"{len(ids)} {what}" for what, ids in facts.items())
                sys.stdout.write(f"official verdicts, {name}: {said}\n")
        sys.stdout.write(f"report: {folder.path / 'report.html'}\n")
    missing = len(result.problems) * result.runs - len(result.judged)
    if missing:
        last = next((sample.error for sample in reversed(result.samples) if sample.error), "never played")
        sys.stderr.write(f"the last that was lost: {last}\n")
        sys.stderr.write(f"{missing} samples are missing; play them again with: sao eval --resume {folder.path}\n")
    return 1 if missing else 0


def _described(plan: Plan) -> str:
    """As comments above the configuration."""
    asked = "all problems" if plan.problems is None else f"{plan.problems} problems at most"
    lines = [f"suite {plan.suite}: {asked} of {plan.split}, {plan.runs} runs each", f"model {plan.model}"]
    lines += [f"endpoint.{key} = {json.dumps(value)}" for key, value in (plan.endpoint or {}).items()]
    return "".join(f"# {line}\n" for line in lines)


def comparison(paths: list[str], *, out: Path | None, as_json: bool) -> int:
    """Two results side by side."""
    found = compare(*(load(Path(path)) for path in paths))
    if out is not None:
        write(found, out, "comparison")
    sys.stdout.write(json.dumps(report.as_json(found)) + "\n" if as_json else report.text(found))
    return 0


def write(of: Result | Comparison, folder: Path, name: str) -> None:
    """Markdown and HTML."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(report.markdown(of))
        (folder / f"{name}.html").write_text(report.html(of))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", hint="give another folder") from error


def experiment(path: Path, out: Path | None, jobs: int, *, report_only: bool, run: Runner) -> int:
    """Run what is missing of a matrix, then write its report; `out` defaults to `runs/<name of the file>`."""
    matrix = load_matrix(path)
    root = (out or Path("runs") / path.stem).resolve()
    make_folder(root)
    try:
        outcomes = [outcome(root, cell) for cell in matrix.cells()] if report_only else run(run_matrix(matrix, root, jobs))
    except KeyboardInterrupt:
        sys.stderr.write("everything is recorded; the same command goes on\n")
        raise
    written, outcomes = write_report(matrix, outcomes, root)
    sys.stdout.write(f"{written}\n")
    return 0 if all(o.state == "done" for o in outcomes) else 1
