"""A matrix file: what it says, in which order its cells run, and one clear error for what cannot run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from evals.experiment.matrix import SAO, load_matrix
from harness.configfile import load_config, presets
from harness.errors import ConfigError
from tests.unit.experiment_support import BASE, matrix

ROOT = Path(__file__).parents[2]
STUDY = {"name": "s", "arms": ["sao"], "steps": 3}


def test_the_words_of_an_arm() -> None:
    made = matrix(
        arms={"slow": ["trainer.optimizer.lr=1e-5"], "grpo": ["mine.toml"]},
        seeded=["seed", "environment.seed"],
        study=[STUDY | {"arms": ["sao", "slow", "grpo", "grpo_dis"]}],
    )
    tail = ["seed=7", "environment.seed=7", "steps=9"]
    assert made.words("sao", 7, 9) == [*BASE, *tail], "the base as it is"
    assert made.words("slow", 7, 9) == [*BASE, "trainer.optimizer.lr=1e-5", *tail]
    assert made.words("grpo_dis", 7, 9) == [*BASE, "grpo_dis", *tail], "a preset"
    assert made.words("grpo", 7, 9) == [*BASE, "mine.toml", *tail], "what the matrix says goes before a preset of that name"
    config = load_config(made.words("slow", 7, 9))
    assert (config.seed, config.steps, config.trainer.optimizer.lr) == (7, 9, 1e-5)
    assert config.environment.table()["seed"] == 7


def test_cells_run_seed_by_seed() -> None:
    """A matrix that is stopped half way has whole comparisons."""
    studies = [{"name": "a", "arms": ["sao", "grpo_dis"], "steps": 3}, {"name": "b", "arms": ["sao"], "steps": 5}]
    cells = matrix(seeds=[4, 1], study=studies).cells()
    assert [cell.name for cell in cells] == ["a/sao-4", "a/grpo_dis-4", "b/sao-4", "a/sao-1", "a/grpo_dis-1", "b/sao-1"]
    assert cells[2].words == (*BASE, "seed=4", "steps=5")


def test_the_miniature_of_the_paper_can_run() -> None:
    made = load_matrix(ROOT / "configs" / "miniature.toml")
    assert {study.paper for study in made.study} >= {"main", "ablations"} and len(made.seeds) >= 3
    assert all(SAO in study.arms for study in made.study)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("x = ", "not valid TOML"),
        ("", r"m\.toml\.base` is missing"),
        ('base = ["configs/corridor.toml"]', r"study` is missing"),
        ("BASE\nseeds = []\nSTUDY", r"seeds` = \[\]"),
        ("BASE\nseed = [1]\nSTUDY", "is not a setting"),
        ("BASE\nseeds = [1, 1]\nSTUDY", "names something twice"),
        ("BASE\nSTUDY\nSTUDY", "names something twice"),
        ('BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao", "sao"]', "names something twice"),
        (
            'BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]\nsuites = ["sums", "mine/sums.toml"]',
            r"suites, by the name of the file: .*names something twice",
        ),
        (
            'BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]\nsuites = ["aime_2025"]',
            r"study 's', arm 'sao': `limits.max_context` = 131072: the model knows 64 positions",
        ),
        ('BASE\n[arms]\nlong = ["steps=9"]\nSTUDY', r"long: 'steps=9' is the matrix's own"),
        ('BASE\n[arms]\nlong = ["seed=9"]\nSTUDY', r"long: 'seed=9' is the matrix's own"),
        ('BASE\n[[study]]\nname = "s"\nsteps = 0\narms = ["sao"]', r"steps` = 0"),
        ('BASE\n[[study]]\nname = "s"\nsteps = 3\narms = []', r"arms` = \[\]"),
        ('BASE\n[[study]]\nname = "../s"\nsteps = 3\narms = ["sao"]', r"name` = '\.\./s'"),
        ('BASE\n[arms]\n"../up" = []\nSTUDY', "should match pattern"),
        (
            'BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao", "grpo_diss"]',
            "'grpo_diss' is neither in .arms. nor a preset",
        ),
        ('BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]\npaper = "table9"', "paper"),
        ('BASE\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]\nsuites = ["aime_2024"]', "suite 'aime_2024' is not known"),
        ('BASE\n[arms]\nbad = ["algorithm.batch=0"]\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao", "bad"]', "arm 'bad': "),
        ('base = ["nowhere.toml"]\nSTUDY', "study 's', arm 'sao': cannot read 'nowhere.toml'"),
        ('BASE\nseeded = ["sed"]\nSTUDY', "`sed` is not a setting"),
    ],
)
def test_one_clear_error(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "m.toml"
    if text is not None:
        study = '[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]'
        path.write_text(text.replace("BASE", 'base = ["configs/corridor.toml"]').replace("STUDY", study))
    with pytest.raises(ConfigError, match=message) as caught:
        load_matrix(path)
    assert caught.value.hint


def test_a_misspelt_field_of_a_study_is_told_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('base = ["configs/corridor.toml"]\n[[study]]\nname = "s"\nsteps = 3\narms = ["sao"]\ntitel = "T"')
    with pytest.raises(ConfigError, match=r"`m\.toml\.study\.0\.titel` is not a setting") as caught:
        load_matrix(path)
    assert "title" in caught.value.hint


# --- the paper's numbers ---------------------------------------------------------------------------------------------

PAPER = {
    "main": {
        "base": [14.6, 10.5, 17.3, 7.8],
        "sft": [80.4, 53.3, 75.2, 53.3],
        "grpo": [84.2, 54.8, 76.0, 55.8],
        "grpo_dis": [93.5, 70.8, 84.0, 70.0],
        "sao_dis_only": [94.2, 71.5, 86.7, 71.3],
        "sao": [97.3, 74.8, 88.3, 74.0],
    },
    "swe": {"base": [23.0], "grpo_dis": [27.0], "sao": [29.8]},
    "ablations": {
        "sao": [97.3, 74.8],
        "wo_faster_value": [95.0, 69.75],
        "wo_frozen_attn": [90.62, 74.5],
        "vapo_literal": [91.3, 69.0],
        "running_mean_8": [79.8, 55.3],
    },
    "step": {"step_avg": [85.8, 60.5], "step_last": [87.3, 62.8], "sao": [89.8, 66.8]},
}
"""algorithm.md 5.2 and 2.3, typed again."""
COLUMNS = {
    "main": ["aime_2025", "beyond_aime", "hmmt_nov_2025", "imo_answerbench"],
    "swe": ["swe_verified"],
    "ablations": ["aime_2025", "beyond_aime"],
    "step": ["aime_2025", "beyond_aime"],
}


def test_the_papers_numbers_are_the_papers() -> None:
    stored = tomllib.loads((ROOT / "evals" / "experiment" / "paper.toml").read_text())
    assert {name: table["rows"] for name, table in stored.items()} == PAPER
    assert {name: table["columns"] for name, table in stored.items()} == COLUMNS
    assert {arm for rows in PAPER.values() for arm in rows} - {"base", "sft", SAO} <= set(presets()), "arms that can be run"
    steps = [round(PAPER["main"]["sao"][i] - PAPER["main"]["grpo_dis"][i], 1) for i in range(4)]
    assert steps == [3.8, 4.0, 4.3, 4.0], "SAO minus GRPO+DIS, as the paper says it"
