"""Results of online_writing: held-out success by preferred style, and a comparison of arms from their run folders.

    python -m evals.online_writing RUN...

Flows in: run folders, each with its configuration and metrics. Flows out: Markdown on standard output: the numbers of each arm
and phase (`evals.switches`), the curves, and for two arms the differences between runs of the same seed.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from evals import heldout
from evals.statistics import Floats, paired
from evals.switches import SMOOTH, PhaseNumbers, phase_numbers
from harness.episode import Episode
from harness.errors import ConfigError, SaoError

AFTER = 8
"""Steps after a switch in which the running mean of 128 rewards, in batches of 16, still holds rewards of the phase before."""


def by_style(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The evaluation plug-in: `evals.heldout`, and `success_<style>` over the episodes whose phase prefers the style."""
    result = heldout.evaluate(episodes)
    for style in sorted({e.info["preferred"] for e in episodes if e.reward is not None}):
        rewards = [e.reward for e in episodes if e.reward is not None and e.info["preferred"] == style]
        result[f"success_{style}"] = sum(r > 0.5 for r in rewards) / len(rewards)
    return result


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. Arrays over steps; NaN where the metrics have nothing."""

    arm: str
    seed: int
    styles: tuple[str, ...]
    """Preferred, by phase."""
    starts: tuple[int, ...]
    """First step of each phase, counted from 0."""
    reward: Floats
    explained: Floats
    advantage: Floats
    """Mean A."""
    abs_advantage: Floats
    """Mean abs(A)."""
    heldout: dict[str, Any]
    """Held-out success before and after; empty if the run has not ended."""

    @property
    def phases(self) -> list[PhaseNumbers]:
        """The numbers of `evals.switches`."""
        return phase_numbers(self.reward, self.starts)


def load(folder: Path) -> Curve:
    """Raises `ConfigError` if it is no run of online_writing."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        phases = config["environment"]["phases"]
        drawn = config["algorithm"]["batch"] // config["algorithm"]["group"]
        summary = folder / "summary.json"
        ended = json.loads(summary.read_text())["heldout"] if summary.is_file() else {}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} is not a run of online_writing: {error!r}", hint="give run folders") from error

    def column(name: str) -> Floats:
        return np.array([np.nan if row.get(name) is None else row[name] for row in rows], np.float64)

    ends = [end // drawn for end in accumulate(phase["episodes"] for phase in phases)]
    return Curve(
        arm=_arm(config),
        seed=config["seed"],
        styles=tuple(phase["preferred"] for phase in phases),
        starts=(0, *ends[:-1]),
        reward=column("reward/mean"),
        explained=column("value/ev"),
        advantage=column("adv/mean"),
        abs_advantage=column("adv/abs"),
        heldout=ended,
    )


def _arm(config: dict[str, Any]) -> str:
    """How the run estimates advantages."""
    table = config["advantage"]
    if "critic" in config:
        return f"{table['id']}, K = {config['critic']['updates']}"
    return " ".join([table["id"], *(str(v) for k, v in table.items() if k != "id")])


def report(curves: Sequence[Curve]) -> str:
    """Markdown."""
    arms: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda c: c.seed):
        arms.setdefault(curve.arm, []).append(curve)
    parts = [_numbers(arms), _curves(arms)]
    if len(arms) == 2:
        parts.append(_differences(*arms.values()))
    return "\n".join(parts)


def _numbers(arms: dict[str, list[Curve]]) -> str:
    lines = [
        "Means over seeds (standard deviation).",
        "",
        "| arm | seeds | phase | area of 60 steps | lowest | lag | plateau | EV before, after | mean A, abs A after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in arms.items():
        advantages = [run.advantage for run in runs], [run.abs_advantage for run in runs]
        for n in range(min(len(run.phases) for run in runs)):
            phases = [run.phases[n] for run in runs]
            start, style = runs[0].starts[n], runs[0].styles[n]
            window = slice(start, start + AFTER)
            before = [_mean(run.explained[max(0, start - AFTER) : start]) for run in runs]
            after = [_mean(run.explained[window]) for run in runs]
            lags = [phase.lag for phase in phases]
            reached = [lag for lag in lags if lag is not None]
            lag = "-" if n == 0 else f"{np.mean(reached):.0f}" if reached else "never"
            never = f" ({len(lags) - len(reached)} never)" if n and 0 < len(reached) < len(lags) else ""
            cells = [
                f"{n + 1} {style}",
                _spread([p.area for p in phases], 1),
                _spread([p.lowest for p in phases]),
                lag + never,
                _spread([p.plateau for p in phases]),
                f"{_number(_mean(before))}, {_number(_mean(after))}",
                ", ".join(_number(_mean([_mean(a[window]) for a in of])) for of in advantages),
            ]
            lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_heldout(arms)])


def _heldout(arms: dict[str, list[Curve]]) -> list[str]:
    """Held-out success by the style of the phase, before and after training."""
    lines = ["Held-out success by preferred style, before -> after training (temperature 1).", ""]
    for arm, runs in arms.items():
        ended = [run.heldout for run in runs if run.heldout]
        names = sorted({key for h in ended for key in h["after"] if key.startswith("success_")})
        cells = [
            f"{name.removeprefix('success_')} {_mean([h['before'][name] for h in ended]):.2f} -> "
            f"{_mean([h['after'][name] for h in ended]):.2f}"
            for name in names
        ]
        lines.append(f"- {arm}: {'; '.join(cells) or 'no run has ended'}")
    return [*lines, ""]


def _curves(arms: dict[str, list[Curve]]) -> str:
    """Mean reward over seeds and 10 steps."""
    steps = min(len(run.reward) for runs in arms.values() for run in runs)
    starts = next(iter(arms.values()))[0].starts
    lines = ["Mean reward by steps.", "", f"| steps | {' | '.join(arms)} |", "|---" * (1 + len(arms)) + "|"]
    for first in range(0, steps - SMOOTH + 1, SMOOTH):
        means = [_mean([_mean(run.reward[first : first + SMOOTH]) for run in runs]) for runs in arms.values()]
        switch = " (switch)" if first in starts[1:] else ""
        lines.append(f"| {first + 1}-{first + SMOOTH}{switch} | {' | '.join(f'{m:.2f}' for m in means)} |")
    return "\n".join([*lines, ""])


def _differences(one: list[Curve], other: list[Curve]) -> str:
    """Of the runs of the same seed."""
    seeds = {run.seed: run for run in other}
    pairs = [(run, seeds[run.seed]) for run in one if run.seed in seeds]
    if not pairs:
        return "No seed has a run of both arms.\n"
    lines = [
        f"{one[0].arm} minus {other[0].arm}, paired over {len(pairs)} seeds (95 % bootstrap interval); seeds in its favour.",
        "",
        "| phase | area of 60 steps | in favour | plateau | in favour |",
        "|---|---|---|---|---|",
    ]
    kinds: list[Callable[[PhaseNumbers], float]] = [lambda p: p.area, lambda p: p.plateau]
    for n in range(min(len(run.phases) for pair in pairs for run in pair)):
        cells = []
        for digits, kind in zip((1, 3), kinds, strict=True):
            gaps = [kind(a.phases[n]) - kind(b.phases[n]) for a, b in pairs]
            mean, low, high = paired(gaps)
            cells.append(f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})")
            cells.append(f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}")
        lines.append(f"| {n + 1} {one[0].styles[n]} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _mean(values: Sequence[float] | Floats) -> float:
    """Of what is there; NaN of nothing."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{np.mean(values):.{digits}f} ({np.std(values, ddof=min(1, len(values) - 1)):.{digits}f})"


def main(folders: Sequence[str]) -> int:
    """Print the report; 2 with one message if a folder is no run."""
    try:
        if not folders:
            raise ConfigError("no run is given", hint="python -m evals.online_writing RUN...")
        sys.stdout.write(report([load(Path(folder)) for folder in folders]))
    except SaoError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
