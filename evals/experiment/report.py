"""The report of an experiment: the paper's tables in its layout, curves, and what was really run.

Flows in: a matrix and how its cells stand. Flows out: `report.md` and SVG files beside it. Numbers are means over seeds with
their 95 % bootstrap interval; differences are paired by seed. The paper's numbers stand beside ours where the setting is the
paper's, and in a table of their own, under their own heading, where it is a miniature.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.experiment.curves import Curve, load_curve
from evals.experiment.figures import PANELS, draw
from evals.experiment.matrix import SAO, Matrix, Study
from evals.experiment.runner import Outcome, folder_of, make_folder, suite_name
from evals.statistics import paired
from harness.errors import ConfigError

PAPER = Path(__file__).parent / "paper.toml"
Arms = dict[str, dict[int, Curve]]
"""Curves by arm and seed."""


def write_report(matrix: Matrix, outcomes: Sequence[Outcome], root: Path) -> tuple[Path, list[Outcome]]:
    """Write everything below `root/report`; the Markdown file, and how the cells stand when their files have been read."""
    folder = root / "report"
    make_folder(folder)
    read = [_read(outcome, root) for outcome in outcomes]
    outcomes = [outcome for outcome, _ in read]
    parts = [f"# {matrix.title}", "", _standing(matrix, outcomes)]
    for study in matrix.study:
        arms = _arms(study, read)
        if arms:
            parts += [_study(matrix, study, arms), *_figures(study, arms, folder)]
    if matrix.setting == "miniature":
        parts += _paper_apart(matrix)
    path = folder / "report.md"
    path.write_text("\n".join(parts) + "\n")
    return path, outcomes


def _read(outcome: Outcome, root: Path) -> tuple[Outcome, Curve | None]:
    """What a cell's newest run was like; it has failed if that cannot be read."""
    if outcome.run is None:
        return outcome, None
    judged = sorted((folder_of(root, outcome.cell) / "evals").glob("eval-*/result.json"))
    try:
        curve = load_curve(outcome.run, [path.parent for path in judged])
    except ConfigError as error:
        return replace(outcome, state="failed", error=f"error: {error.message}; {error.hint}"), None
    if outcome.state == "done" and not curve.steps:
        return replace(outcome, state="failed", error=f"error: {outcome.run} has no metrics"), None
    return outcome, curve if curve.steps else None


def _arms(study: Study, read: Sequence[tuple[Outcome, Curve | None]]) -> Arms:
    """What has been run of a study, in the order of its arms."""
    arms: Arms = {}
    for arm in study.arms:
        for outcome, curve in read:
            if (outcome.cell.study, outcome.cell.arm) == (study.name, arm) and curve is not None:
                arms.setdefault(arm, {})[outcome.cell.seed] = curve
    return arms


def _standing(matrix: Matrix, outcomes: Sequence[Outcome]) -> str:
    counts = {state: sum(o.state == state for o in outcomes) for state in ("done", "stopped", "failed", "held", "missing")}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    lines = [f"Cells: {said}. Seeds: {', '.join(map(str, matrix.seeds))}. Setting: {matrix.setting}.", ""]
    for outcome in outcomes:
        if outcome.state != "done":
            lines.append(
                f"- `{outcome.cell.name}` is {outcome.state}" + (f": `{_last(outcome.error)}`" if outcome.error else "")
            )
    return "\n".join([*lines, ""])


def _last(error: str) -> str:
    """The line that says what is wrong, or the last one."""
    lines = error.strip().splitlines()
    return next((line for line in lines if line.startswith("error:")), lines[-1]).replace("`", "'")


def _study(matrix: Matrix, study: Study, arms: Arms) -> str:
    lines = [f"## {study.title or study.name}", "", f"{study.steps} policy steps.", ""]
    paper = tomllib.loads(PAPER.read_text()).get(study.paper or "", {})
    columns: dict[str, Callable[[Curve], float]] = {"held-out success": _success}
    columns |= {name: _on(name) for name in map(suite_name, study.suites)}
    beside = matrix.setting == "paper"
    lines += _table(
        ["arm", *columns],
        [
            [arm, *(_cell(runs, of) + _theirs(paper, arm, name, beside) for name, of in columns.items())]
            for arm, runs in arms.items()
        ],
    )
    if beside and paper:
        lines += ["In brackets: the paper's number, in per cent.", ""]
    lines += _differences(arms, columns)
    lines += [
        "Training: means of the last 30 steps, of the reward also over the run, which tells fast from slow; collapsed: runs "
        "whose reward fell below half of its peak for good.",
        "",
    ]
    lines += _table(
        [
            "arm",
            "seeds",
            "reward",
            "over the run",
            "peak",
            "collapsed (at step)",
            "EV",
            "critic gradient",
            "clip ratio",
            "staleness",
            "entropy",
        ],
        [[arm, str(len(runs)), *_training(list(runs.values()))] for arm, runs in arms.items()],
    )
    lines += ["What it cost, mean per run.", ""]
    lines += _table(
        ["arm", "trajectories", "prompts in a batch", "action tokens", "seconds"], [[a, *_cost(r)] for a, r in arms.items()]
    )
    return "\n".join(lines)


def _success(curve: Curve) -> float:
    return math.nan if curve.success is None else curve.success


def _on(suite: str) -> Callable[[Curve], float]:
    return lambda curve: curve.suites.get(suite, math.nan)


def _cell(runs: Mapping[int, Curve], of: Callable[[Curve], float]) -> str:
    """Mean over seeds with its interval."""
    values = [value for value in map(of, runs.values()) if not math.isnan(value)]
    if not values:
        return "-"
    mean, low, high = paired(values)
    return f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if len(values) > 1 else "")


def _theirs(paper: dict[str, Any], arm: str, column: str, beside: bool) -> str:
    """The paper's number, in brackets."""
    if not beside or arm not in paper.get("rows", {}) or column not in paper["columns"]:
        return ""
    return f" [{paper['rows'][arm][paper['columns'].index(column)]}]"


def _differences(arms: Arms, columns: Mapping[str, Callable[[Curve], float]]) -> list[str]:
    """Each arm minus SAO, over the seeds that both have."""
    if SAO not in arms or len(arms) < 2:
        return []
    ours = arms[SAO]
    kinds = {
        **columns,
        "late reward": lambda curve: curve.late("reward"),
        "reward over the run": lambda curve: curve.mean("reward"),
    }
    rows = []
    for arm, runs in arms.items():
        if arm != SAO:
            rows.append([arm, *(_gap(runs, ours, of) for of in kinds.values())])
    text = "Minus `sao`, paired by seed (95 % bootstrap interval over seeds; in brackets: seeds below `sao`)."
    return [text, "", *_table(["arm", *kinds], rows)]


def _gap(runs: Mapping[int, Curve], ours: Mapping[int, Curve], of: Callable[[Curve], float]) -> str:
    gaps = [of(runs[seed]) - of(ours[seed]) for seed in sorted(runs) if seed in ours]
    gaps = [gap for gap in gaps if not math.isnan(gap)]
    if not gaps:
        return "-"
    mean, low, high = paired(gaps)
    if len(gaps) == 1:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}) [{sum(gap < 0 for gap in gaps)} of {len(gaps)}]"


def _training(curves: Sequence[Curve]) -> list[str]:
    collapsed = [c.collapsed for c in curves if c.collapsed is not None]
    where = f" ({', '.join(map(str, sorted(collapsed)))})" if collapsed else ""
    means = [_mean([c.late(name) for c in curves]) for name in (
        "reward", "explained variance", "critic gradient norm", "clip ratio", "staleness", "entropy"
    )]  # fmt: skip
    return [
        means[0],
        _mean([c.mean("reward") for c in curves]),
        _mean([c.peak for c in curves]),
        f"{len(collapsed)} of {len(curves)}{where}",
        *means[1:],
    ]


def _cost(runs: Mapping[int, Curve]) -> list[str]:
    curves = list(runs.values())
    seconds = [math.nan if c.wall_s is None else c.wall_s for c in curves]
    values = [
        [c.total("episodes") for c in curves],
        [c.mean("prompts") for c in curves],
        [c.total("action tokens") for c in curves],
        seconds,
    ]
    return [_mean(of, digits=0) for of in values]


def _mean(values: Sequence[float], digits: int = 3) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{sum(known) / len(known):,.{digits}f}" if known else "-"


def _figures(study: Study, arms: Arms, folder: Path) -> list[str]:
    """Links to the figures, which are written."""
    lists = {arm: list(runs.values()) for arm, runs in arms.items()}
    wanted = [(name, False) for name in PANELS] + [("reward", True)]
    lines = []
    for name, over_tokens in wanted:
        title = f"{study.title or study.name}: {name}" + (" by tokens" if over_tokens else "")
        text = draw(title, name, lists, over_tokens=over_tokens)
        if text is not None:
            file = f"{study.name}-{name.replace(' ', '-')}{'-by-tokens' if over_tokens else ''}.svg"
            (folder / file).write_text(text)
            lines.append(f"![{title}]({file})")
    return [*lines, ""]


def _paper_apart(matrix: Matrix) -> list[str]:
    """The paper's tables, where ours are of another setting."""
    known = tomllib.loads(PAPER.read_text())
    wanted = list(dict.fromkeys(study.paper for study in matrix.study if study.paper))
    if not wanted:
        return []
    lines = ["## The paper's numbers: another setting", ""]
    lines += [
        "A policy of 30 billion parameters on real tasks: the miniature's signs may be compared with these, its numbers not.",
        "",
    ]
    for name in wanted:
        table = known[name]
        lines += [f"{table['title']} (per cent).", ""]
        lines += _table(["arm", *table["columns"]], [[arm, *map(str, row)] for arm, row in table["rows"].items()])
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]
