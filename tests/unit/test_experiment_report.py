"""What came out of a matrix: numbers of a curve, what is drawn, and a report that has every arm and seed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.experiment.curves import SERIES, collapse, load_curve
from evals.experiment.figures import draw, smooth, spread
from evals.experiment.matrix import Matrix
from evals.experiment.report import write_report
from evals.experiment.runner import FAILED, Outcome, folder_of, outcome
from evals.switches import moving_mean
from harness.errors import ConfigError
from tests.unit.experiment_support import matrix, rows, write_evaluation, write_run

REWARDS = st.lists(st.floats(0, 1, width=16), min_size=1, max_size=60).map(lambda values: np.array(values, np.float64))
GAPPY = st.lists(st.one_of(st.just(math.nan), st.floats(-5, 5, width=16)), max_size=40).map(
    lambda values: np.array(values, np.float64)
)


# --- collapse --------------------------------------------------------------------------------------------------------


def test_a_collapse_by_hand() -> None:
    """Of 1 down to 0 from step 31 on: the mean of ten is below a half when six of them are 0."""
    up, down = np.ones(30), np.zeros(30)
    assert collapse(np.concatenate([up, down])) == 36
    assert collapse(np.concatenate([up, down, up])) is None, "it has come back"
    assert collapse(np.concatenate([up, down, up, down])) == 96, "the last fall counts"
    assert collapse(np.concatenate([up, np.full(30, 0.5)])) is None, "half is not below half"
    assert collapse(np.concatenate([np.full(30, 0.2), up])) is None, "later peaks do not judge what was before"
    assert collapse(np.zeros(30)) is None and collapse(np.array([])) is None
    assert collapse(np.array([1.0] * 5)) is None


@given(REWARDS)
def test_from_a_collapse_on_the_reward_stays_down(rewards: np.ndarray) -> None:
    step = collapse(rewards)
    means = [rewards[max(0, n - 10) : n].mean() for n in range(min(10, len(rewards)), len(rewards) + 1)]
    below = [mean < 0.5 * max(means[: i + 1]) - 1e-12 for i, mean in enumerate(means)]
    if step is None:
        assert not below[-1]
    else:
        at = step - min(10, len(rewards))
        assert min(10, len(rewards)) <= step <= len(rewards)
        near = [mean <= 0.5 * max(means[: i + 1]) + 1e-12 for i, mean in enumerate(means)]
        assert all(near[at:]) and (at == 0 or not below[at - 1]), "not a step earlier"


@given(REWARDS, st.sampled_from([0.25, 2.0, 8.0]))
def test_a_collapse_is_of_no_scale(rewards: np.ndarray, scale: float) -> None:
    assert collapse(rewards * scale) == collapse(rewards)


# --- curves ----------------------------------------------------------------------------------------------------------


@given(GAPPY)
def test_what_is_smoothed_is_known(values: np.ndarray) -> None:
    line = smooth(values)
    assert len(line) == (len(moving_mean(values)) if len(values) else 0)
    if len(values) and not np.isnan(values).any():
        assert np.array_equal(line, moving_mean(values), equal_nan=True)
    known = np.flatnonzero(~np.isnan(values))
    width = min(10, len(values))
    for i, mean in enumerate(line):
        if not len(known) or i < known[0]:
            assert math.isnan(mean), "nothing is made up before the first value"
        else:
            seen = [values[known[known <= j][-1]] for j in range(i, i + width)]
            assert mean == pytest.approx(np.mean(seen), abs=1e-9)


def test_a_gap_takes_the_value_before_it() -> None:
    assert smooth(np.array([math.nan, *[1.0] * 9, math.nan, 3.0])).tolist()[1:] == pytest.approx([1.0, 1.2])


def test_where_a_run_has_ended_those_that_go_on_are_drawn() -> None:
    middle, low, high = spread([np.array([1.0, 2.0, 3.0]), np.array([3.0])])
    assert (middle.tolist(), low.tolist(), high.tolist()) == ([2.0, 2.0, 3.0], [1.0, 2.0, 3.0], [3.0, 2.0, 3.0])


def test_a_curve_by_hand(tmp_path: Path) -> None:
    cell = matrix().cells()[0]
    rewards = [0.0] * 10 + [1.0] * 40
    run = write_run(tmp_path, cell, rows(rewards, value__ev=[None, *[0.5] * 49], batch__action_tokens=[10.0] * 50), 0.75)
    judged = write_evaluation(tmp_path, cell, "sums", [1.0, 0.0, None])
    curve = load_curve(run, [judged])
    assert (curve.steps, curve.success, curve.before, curve.wall_s) == (50, 0.75, 0.2, 60.0)
    assert (curve.late("reward"), curve.peak, curve.collapsed) == (1.0, pytest.approx(1.0), None)
    assert curve.late("explained variance") == 0.5 and math.isnan(curve.series["explained variance"][0])
    assert curve.total("action tokens") == 500 and math.isnan(curve.late("entropy"))
    assert curve.suites == {"sums": 0.5}, "what is missing counts neither way"
    assert curve.series.keys() == SERIES.keys()


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path, matrix().cells()[0], [], None)
    (run / "metrics.jsonl").unlink()
    curve = load_curve(run)
    assert (curve.steps, curve.success, curve.collapsed) == (0, None, None) and math.isnan(curve.peak)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_damaged_run_is_one_clear_error(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, matrix().cells()[0], rows([1.0]))
    (run / name).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_curve(run)


# --- the report ------------------------------------------------------------------------------------------------------


def reported(made: Matrix, root: Path, outcomes: list[Outcome] | None = None) -> str:
    return write_report(made, outcomes or [outcome(root, c) for c in made.cells()], root)[0].read_text()


def table(report: str, heading: str) -> dict[str, list[str]]:
    """Rows of the first table below a line, by their first cell."""
    lines = report[report.index(heading) :].splitlines()[1:]
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    found: dict[str, list[str]] = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


def synthetic(tmp_path: Path, made: Matrix) -> None:
    """GRPO+DIS is 0.1 below SAO with each seed; with seed 1 it collapses."""
    for cell in made.cells():
        worse = cell.arm != "sao"
        rewards = np.full(40, 0.6 - 0.1 * worse)
        rewards[20:] *= 0.0 if worse and cell.seed == 1 else 1.0
        metrics = rows(rewards.tolist(), batch__action_tokens=[100.0] * 40, batch__episodes=[16.0] * 40)
        write_run(tmp_path, cell, metrics, 0.5 + 0.1 * cell.seed - 0.1 * worse)
        for suite in cell.suites:
            write_evaluation(tmp_path, cell, Path(suite).stem, [1.0, float(not worse)])


def test_every_arm_and_seed_is_in_the_report(tmp_path: Path) -> None:
    study = {
        "name": "s",
        "title": "How stable",
        "arms": ["sao", "grpo_dis"],
        "steps": 40,
        "suites": ["sums", "configs/quickstart.toml"],
    }
    made = matrix(seeds=[0, 1, 2], title="Mine", study=[study])
    synthetic(tmp_path, made)
    report = reported(made, tmp_path)
    assert report.startswith("# Mine\n") and "Cells: 6 done. Seeds: 0, 1, 2. Setting: miniature." in report
    scores = table(report, "## How stable")
    assert scores["arm"] == ["held-out success", "sums", "quickstart"]
    assert scores["sao"] == ["0.600 (0.500 to 0.700)", "1.000 (1.000 to 1.000)", "1.000 (1.000 to 1.000)"]
    assert scores["grpo_dis"][0].startswith("0.500 (") and scores["grpo_dis"][1].startswith("0.500 (")
    gaps = table(report, "Minus `sao`")
    assert gaps["grpo_dis"][:2] == ["-0.100 (-0.100 to -0.100) [3 of 3]", "-0.500 (-0.500 to -0.500) [3 of 3]"]
    late = table(report, "Training: means")
    assert late["arm"][:5] == ["seeds", "reward", "over the run", "peak", "collapsed (at step)"]
    assert late["sao"][:5] == ["3", "0.600", "0.600", "0.600", "0 of 3"]
    assert (late["grpo_dis"][0], late["grpo_dis"][4]) == ("3", "1 of 3 (26)")
    assert float(late["grpo_dis"][1]) < float(late["grpo_dis"][2]) < float(late["grpo_dis"][3]), "one fell, late"
    cost = table(report, "What it cost")
    assert cost["sao"] == ["640", "-", "4,000", "60"]
    links = {line.partition("](")[2].rstrip(")") for line in report.splitlines() if line.startswith("![")}
    assert links == {"s-reward.svg", "s-reward-by-tokens.svg"}, "series that no arm has are not drawn"
    for name in links:
        svg = (tmp_path / "report" / name).read_text()
        assert svg.lstrip().startswith("<?xml") and "</svg>" in svg
    assert reported(made, tmp_path) == report, "the same folders give the same report"


def test_what_is_not_done_is_named_with_its_last_words(tmp_path: Path) -> None:
    made = matrix()
    first, second, third, fourth = made.cells()
    write_run(tmp_path, first, rows([0.5] * 3))
    write_run(tmp_path, second, rows([0.5] * 2), None)
    folder_of(tmp_path, third).mkdir(parents=True)
    (folder_of(tmp_path, third) / FAILED).write_text("exit code 2\nerror: no `x`")
    report = reported(made, tmp_path)
    assert "Cells: 1 done, 1 stopped, 1 failed, 1 missing." in report
    assert f"- `{third.name}` is failed: `error: no 'x'`" in report
    assert f"- `{second.name}` is stopped" in report and f"- `{fourth.name}` is missing" in report
    scores = table(report, "## s")
    assert scores["sao"] == ["0.500"] and scores["grpo_dis"] == ["-"], "what has no result yet has none in the table"
    held = reported(made, tmp_path, [Outcome(first, "held"), Outcome(second, "missing")])
    assert "1 held, 1 missing" in held and "## s" not in held


def test_the_papers_numbers_stand_beside_ours_only_in_its_setting(tmp_path: Path) -> None:
    study = {"name": "s", "arms": ["sao", "grpo_dis"], "steps": 40, "suites": ["aime_2025"], "paper": "main"}
    for setting in ("paper", "miniature"):
        made = matrix(setting=setting, study=[study])
        if setting == "paper":
            synthetic(tmp_path, made)
        report = reported(made, tmp_path)
        assert ("[97.3]" in table(report, "## s")["sao"][1]) == (setting == "paper")
        assert ("In brackets: the paper's number" in report) == (setting == "paper")
        assert ("## The paper's numbers: another setting" in report) == (setting == "miniature")
    assert table(report, "Table 1")["sao"] == ["97.3", "74.8", "88.3", "74.0"]


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_damaged_cell_has_failed_and_the_others_are_reported(tmp_path: Path, name: str) -> None:
    made = matrix()
    for cell in made.cells():
        write_run(tmp_path, cell, rows([0.5] * 12))
    bad = outcome(tmp_path, made.cells()[0])
    assert bad.run is not None
    (bad.run / name).write_text("{")
    path, found = write_report(made, [outcome(tmp_path, cell) for cell in made.cells()], tmp_path)
    assert [o.state for o in found] == ["failed", "done", "done", "done"]
    assert f"- `{bad.cell.name}` is failed: `error: {bad.run}: cannot be read" in path.read_text()
    (bad.run / name).write_text("{}" if name == "summary.json" else "")
    _, found = write_report(made, [outcome(tmp_path, cell) for cell in made.cells()], tmp_path)
    assert found[0].state == ("done" if name == "summary.json" else "failed"), "a run without metrics is no run"


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    made = matrix(seeds=[0])
    for cell, success in zip(made.cells(), (0.75, 0.5), strict=True):
        write_run(tmp_path, cell, rows([0.5] * 12), success)
    assert table(reported(made, tmp_path), "Minus `sao`")["grpo_dis"][0] == "-0.250"


def test_a_long_curve_is_no_long_file(tmp_path: Path) -> None:
    sizes = []
    for steps in (100, 2_000):
        curve = load_curve(write_run(tmp_path / str(steps), matrix().cells()[0], rows([0.5, 0.7] * (steps // 2))))
        sizes.append(len(draw("t", "reward", {"sao": [curve]}) or ""))
    assert sizes[1] < 1.2 * sizes[0]


def test_nothing_to_draw_is_no_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path, matrix().cells()[0], rows([0.5] * 12))
    curve = load_curve(run)
    assert draw("t", "reward", {"sao": [curve]}) is not None
    assert draw("t", "entropy", {"sao": [curve]}) is None and draw("t", "reward", {}) is None
