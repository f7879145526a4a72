"""Presets: each loads over any file and changes what it says and nothing else; layers and removed tables keep their rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config import Config
from harness.configfile import dump_config, load_config, overlay, presets
from harness.errors import ConfigError
from harness.protocols import SamplingContract

ROOT = Path(__file__).parents[2]
GIVEN = {"sft_tir": ["sft.conversations=talks.jsonl"]}
"""What a preset leaves to the user."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest valid file."""
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(f'[model]\npath = "{model}"\n[environment]\nid = "toy_repair"\n[sandbox]\nid = "memory"\n')
    return path


def flat(config: Config) -> dict[str, Any]:
    """Dotted names of all resolved settings; an absent table is None."""

    def walk(prefix: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {k: v for key, below in value.items() for k, v in walk(f"{prefix}.{key}".lstrip("."), below).items()}

    return walk("", config.model_dump(mode="json"))


def changes(before: Config, after: Config) -> dict[str, Any]:
    """What `after` sets otherwise; "-" where it lacks a setting. Of a table that it lacks, only the table."""
    old, new = flat(before), flat(after)
    lacks = tuple(f"{key}." for key, value in new.items() if value is None)
    return {key: new.get(key, "-") for key in old | new if new.get(key, "-") != old.get(key, "-") and not key.startswith(lacks)}


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_and_loads_back_as_itself(base: Path, model: Path, tmp_path: Path, preset: str) -> None:
    quickstart: list[str | Path] = [ROOT / "configs/quickstart.toml", f"model.path={model}"]
    for below in ([base], quickstart):
        config = load_config([*below, preset, *GIVEN.get(preset, [])])
        saved = tmp_path / "config.toml"
        saved.write_text(dump_config(config))
        again = load_config(saved)
        assert again == config
        assert dump_config(again) == dump_config(config)


PAPER = {
    "algorithm.batch": 128,
    "algorithm.group": 1,
    "algorithm.gamma": 1.0,
    "algorithm.loss_norm": "token_global",
    "algorithm.advantage_norm": "none",
    "algorithm.truncation": "zero",
    "algorithm.control": "none",
    "limits.max_context": 131_072,
    "limits.max_turns": 50,
    "rollout.eta": 8.0,
    "loss.id": "dis",
    "loss.eps_low": 0.3,
    "loss.eps_high": 5.0,
    "advantage.id": "skip_observation",
    "advantage.alpha": 1.5,
    "trainer.optimizer.lr": 1e-6,
    "trainer.optimizer.warmup_steps": 0,
    "trainer.optimizer.betas": [0.9, 0.98],
    "trainer.optimizer.weight_decay": 0.1,
    "trainer.optimizer.clip": 1.0,
    "critic.init": None,
    "critic.optimizer.lr": 5e-6,
    "critic.optimizer.warmup_steps": 10,
    "critic.optimizer.betas": [0.9, 0.98],
    "critic.optimizer.weight_decay": 0.1,
    "critic.optimizer.clip": 1.0,
    "critic.head_lr_mult": 1.0,
    "critic.updates": 2,
    "critic.advantage_values": "post",
    "critic.lam": 1.0,
    "critic.trainable": "mlp_only",
    "critic.value_clip": None,
    "critic.policy_freeze_steps": 10,
    "value.episodes": 6_400,
}


@pytest.mark.parametrize(
    ("preset", "own"),
    [("sao_reasoning", {}), ("sao_coding", {"loss.eps_low": 0.8, "loss.eps_high": 3.0, "limits.max_turns": 300})],
)
def test_the_papers_settings(base: Path, preset: str, own: dict[str, Any]) -> None:
    """algorithm.md 11, last paragraph: every setting of the algorithm, none besides."""
    seen = flat(load_config([base, preset]))
    expected = PAPER | own
    assert {key: seen[key] for key in expected} == expected
    tables = ("algorithm.", "loss.", "advantage.", "critic.")
    assert {key for key in seen if key.startswith(tables)} == {key for key in expected if key.startswith(tables)}
    contract = SamplingContract()
    assert (contract.temperature, contract.top_p) == (1.0, 1.0)


def test_coding_and_reasoning_differ_in_the_band_and_the_turns(base: Path) -> None:
    differ = changes(load_config([base, "sao_reasoning"]), load_config([base, "sao_coding"]))
    assert differ == {"loss.eps_low": 0.8, "loss.eps_high": 3.0, "limits.max_turns": 300}


NO_CRITIC = {"critic": None, "value": None, "advantage.alpha": "-"}
CLIP = {"loss.eps_low": 0.2, "loss.eps_high": 0.28, "loss.old": "trainer"}
GROUP = {"advantage.id": "grpo", "advantage.std": "population", "algorithm.group": 8}
FULL = {"critic.updates": 1, "critic.trainable": "all"}
SPO = {"d_half": 0.06, "rho_min": 0.875, "rho_max": 0.96, "v0": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": NO_CRITIC | GROUP | CLIP | {"loss.id": "grpo"},
    "grpo_dis": NO_CRITIC | GROUP,
    "running_mean_128": NO_CRITIC | {"advantage.id": "running_mean_global", "advantage.window": 128},
    "running_mean_8": NO_CRITIC | {"advantage.id": "running_mean_prompt", "advantage.window": 8, "advantage.initial": 0.5},
    "sao_dis_only": FULL,
    "sao_dis_only_d2": FULL | {"advantage.id": "through_observation"},
    "sao_minus_dis": CLIP | {"loss.id": "ppo_clip"},
    "single_dis_batchnorm": NO_CRITIC | {"advantage.id": "batch_norm"},
    "spo": NO_CRITIC
    | {"advantage.id": "spo", "algorithm.advantage_norm": "global_mean_std"}
    | {f"advantage.{key}": value for key, value in SPO.items()},
    "step_avg": {"advantage.id": "step_average"},
    "step_last": {"advantage.id": "step_last"},
    "through_obs": {"advantage.id": "through_observation"},
    "vapo_literal": FULL | CLIP | {"loss.id": "ppo_clip", "advantage.alpha": 0.05},
    "wo_faster_value": {"critic.updates": 1},
    "wo_frozen_attn": {"critic.trainable": "all"},
}


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_an_arm_changes_what_it_is_about_and_nothing_else(base: Path, arm: str) -> None:
    assert changes(load_config([base, "sao_reasoning"]), load_config([base, "sao_reasoning", arm])) == ARMS[arm]


def test_the_warm_start_only_adds_its_table(base: Path) -> None:
    differ = changes(load_config([base, "sao_reasoning"]), load_config([base, "sao_reasoning", "sft_tir", *GIVEN["sft_tir"]]))
    assert {key.split(".")[0] for key in differ} == {"sft"}
    wanted = {
        "epochs": 3,
        "observation_weight": 0.0,
        "optimizer.lr": 1e-5,
        "conversations": str(Path("talks.jsonl").absolute()),
    }
    assert {key: differ[f"sft.{key}"] for key in wanted} == wanted


def test_every_preset_is_tested() -> None:
    assert set(presets()) == {*ARMS, "sao_reasoning", "sao_coding", "sft_tir"}


@pytest.mark.parametrize("arm", ["grpo", "grpo_dis", "spo"])
def test_an_arm_keeps_the_band_of_the_configuration_below(base: Path, arm: str) -> None:
    loss = load_config([base, "sao_coding", arm]).loss.table()
    assert (loss["id"], loss["eps_low"]) == (("grpo", 0.2) if arm == "grpo" else ("dis", 0.8))


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 3, "c": 4}),
        ({"t": {"x": 1, "y": 2}}, {"t": {"y": 3}}, {"t": {"x": 1, "y": 3}}),
        ({"t": {"id": "p", "x": 1}}, {"t": {"id": "q"}}, {"t": {"id": "q"}}),
        ({"t": {"id": "p", "x": 1}}, {"t": {"id": "p", "y": 2}}, {"t": {"id": "p", "x": 1, "y": 2}}),
        ({"t": {"id": "p", "x": 1}}, {"t": {"y": 2}}, {"t": {"id": "p", "x": 1, "y": 2}}),
        ({"t": {"x": 1}}, {"t": {"id": "p"}}, {"t": {"x": 1, "id": "p"}}),
        ({"s": {"t": {"id": "p", "x": 1}}}, {"s": {"t": {"id": "q"}, "z": 1}}, {"s": {"t": {"id": "q"}, "z": 1}}),
        ({"t": {"x": 1}}, {"t": False}, {"t": False}),
        ({"t": False}, {"t": {"x": 1}}, {"t": {"x": 1}}),
        ({"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
    ],
)
def test_overlay_by_hand(below: dict[str, Any], above: dict[str, Any], expected: dict[str, Any]) -> None:
    kept = repr((below, above))
    assert overlay(below, above) == expected
    assert repr((below, above)) == kept


def test_later_words_win(base: Path) -> None:
    assert load_config([base, "algorithm.group=2", "grpo"]).algorithm.group == 8
    assert load_config([base, "grpo", "algorithm.group=2"]).algorithm.group == 2
    assert load_config([base, "grpo", "algorithm.group=2"], ["algorithm.group=4"]).algorithm.group == 4
    assert load_config([base, "sao_coding", "sao_reasoning"]) == load_config([base, "sao_reasoning"])


def test_an_option_set_before_the_plug_in_is_named_is_kept(base: Path) -> None:
    assert load_config([base, "loss.eps_low=0.5", "loss.id=dis"]).loss.table()["eps_low"] == 0.5
    assert load_config([base, "loss.id=dis", "loss.eps_low=0.5", "sao_minus_dis"]).loss.table()["eps_low"] == 0.2


def test_a_removed_table_comes_back_whole_when_given_again(base: Path) -> None:
    config = load_config([base, "sao_coding", "value=false", "value.episodes=7"])
    assert config.value is not None
    assert (config.value.episodes, config.value.heldout) == (7, 0.05)
    assert load_config([base, "sao_coding", "value=false"]).value is None
    assert load_config([base, "sao_coding", "sft_tir", "sft=false"]).sft is None


def refused(*words: str | Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert caught.value.hint, "every refusal says what to do next"
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("word", "says", "hint"),
    [
        ("sao_resoning", "'sao_resoning': it is neither a file nor a preset", "`sao_reasoning`"),
        ("xyz", "neither a file nor a preset", "sao_coding"),
        ("grpo.toml", "neither a file nor a preset", "`grpo`"),
        ("loss=false", "`loss`", ""),
        ("critic=true", "`critic`", ""),
        ("critic=0", "`critic`", ""),
        ("sandbox.id=[1]", "`sandbox.id`", ""),
    ],
)
def test_words_that_mean_nothing(base: Path, word: str, says: str, hint: str) -> None:
    error = refused(base, word)
    assert says in error.message
    assert hint in error.hint


def test_a_layer_that_is_no_toml_is_named(base: Path, tmp_path: Path) -> None:
    layer = tmp_path / "layer.toml"
    layer.write_text("[loss\n")
    assert str(layer) in refused(base, "grpo", layer).message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["grpo", "algorithm.group=1"], "`algorithm.group` is 1"),
        (["advantage.id=rloo"], "`algorithm.group` is 1"),
        (["advantage.id=reinforce_pp_baseline"], "`algorithm.group` is 1"),
        (["grpo", "algorithm.batch=100"], "`algorithm.batch` = 100 is not a multiple of `algorithm.group` = 8"),
        (["algorithm.group=3"], "`algorithm.batch` = 128 is not a multiple"),
        (["grpo", "critic.updates=1"], "`[critic]` is given, but `advantage.id` = 'grpo' reads no critic"),
        (["sao_coding", "grpo", "wo_faster_value"], "`[critic]` is given"),
        (["spo", "value.episodes=9"], "`[value]` is given, but `advantage.id` = 'spo' reads no critic"),
        (["sao_coding", "advantage.id=batch_norm"], "`[critic]` is given"),
        (["grpo", "algorithm.truncation=bootstrap"], "`algorithm.truncation` = 'bootstrap' needs a critic"),
        (["critic=false"], "`advantage.id` = 'skip_observation' needs a critic"),
        (["sao_coding", "critic=false"], "needs a critic"),
        (["through_obs", "trainer.compiled_gae=true"], "`trainer.compiled_gae` solves `skip_observation`"),
        (["grpo", "trainer.compiled_gae=true"], "`trainer.compiled_gae` solves `skip_observation`"),
        (["spo", "advantage.id=reinforce_pp", "algorithm.advantage_norm=global_std_only"], "whitens its returns itself"),
        (["sao_reasoning", "advantage.lam=0.9"], "give either `alpha` (length-adaptive lambda) or `lam`"),
        (["sao_reasoning", "advantage.lm=0.9"], "`advantage.lm` is not a setting"),
        (["grpo", "loss.eps_hih=0.9"], "`loss.eps_hih` is not a setting"),
        (["sft_tir"], "exactly one of `sft.script`, `sft.run` and `sft.conversations`"),
        (["sft_tir", "sft.conversations=a.jsonl", "sft.run=b"], "exactly one of"),
    ],
)
def test_contradictions_are_refused_in_one_line(base: Path, words: list[str], says: str) -> None:
    assert says in refused(base, *words).message


def test_a_fixed_lambda_switches_the_length_adaptive_one_off(base: Path, tmp_path: Path) -> None:
    config = load_config([base, "advantage={id='skip_observation', lam=0.95}"])
    assert config.advantage.table() == {"id": "skip_observation", "lam": 0.95}
    saved = tmp_path / "config.toml"
    saved.write_text(dump_config(config))
    assert load_config(saved) == config


@pytest.mark.parametrize(("loss", "norm"), [("grpo", "seq_mean"), ("dr_grpo", "seq_sum_const"), ("tis", "token_global")])
def test_a_loss_brings_its_own_denominator_unless_one_is_given(base: Path, loss: str, norm: str) -> None:
    assert load_config([base, f"loss.id={loss}"]).algorithm.loss_norm == norm
    assert load_config([base, f"loss.id={loss}", "algorithm.loss_norm=token_kept"]).algorithm.loss_norm == "token_kept"
