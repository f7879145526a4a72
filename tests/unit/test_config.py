"""Configuration: a wrong key, type, path or plug-in is one clear error; what was resolved loads back as itself."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from harness.config import Config, Plugin
from harness.configfile import dump_config, load_config
from harness.errors import ConfigError
from harness.registry import BUILTIN, find, load_object, plugin_config

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    for name in MODEL_FILES:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest valid file."""
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[environment]\nid = "toy_repair"\n[agent]\nid = "tool_loop"\n[sandbox]\nid = "memory"\n'
    )
    return path


def refused(base: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(base, list(overrides))
    assert caught.value.hint, "every refusal says what to do next"
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("override", "name", "near"),
    [
        ("step=3", "step", "steps"),
        ("rolout.eta=1", "rolout", "rollout"),
        ("rollout.concurency=3", "rollout.concurency", "concurrency"),
        ("critic.optimizer.lrr=1e-3", "critic.optimizer.lrr", "lr"),
        ("value.epoch=2", "value.epoch", "epochs"),
        ("sft.optimizer.warmup=1", "sft.optimizer.warmup", "warmup_steps"),
        ("model.pth='x'", "model.pth", "path"),
        ("limits.max_turn=1", "limits.max_turn", "max_turns"),
        ("eval.task=1", "eval.task", "tasks"),
        ("environment.sed=1", "environment.sed", "seed"),
        ("agent.nudgee='x'", "agent.nudgee", "nudge"),
        ("sandbox.memry=1", "sandbox.memry", "valid"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(base: Path, override: str, name: str, near: str) -> None:
    error = refused(base, override)
    assert f"`{name}` is not a setting" in error.message
    assert near in error.hint


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("steps=many", "steps"),
        ("steps=-1", "steps"),
        ("steps=1.5", "steps"),
        ("rollout.eta=-1", "rollout.eta"),
        ("rollout.concurrency=0", "rollout.concurrency"),
        ("rollout.concurrency=[1]", "rollout.concurrency"),
        ("critic.advantage_values=between", "critic.advantage_values"),
        ("critic.optimizer.betas=[0.9]", "critic.optimizer.betas"),
        ("trainer.optimizer.lr=nan", "trainer.optimizer.lr"),
        ("trainer.optimizer.lr=inf", "trainer.optimizer.lr"),
        ("rollout.eta=inf", "rollout.eta"),
        ("limits.wall_s=inf", "limits.wall_s"),
        ("limits.wall_s=0", "limits.wall_s"),
        ("model.stop=5", "model.stop"),
        ("model=5", "model"),
        ("environment=toy_repair", "environment"),
        ("environment.seed=x", "environment.seed"),
        ("environment.train_tasks=0", "environment.train_tasks"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_given(base: Path, override: str, name: str) -> None:
    assert f"`{name}" in refused(base, override).message


def test_several_mistakes_are_counted(base: Path) -> None:
    assert "and 2 more" in refused(base, "steps=-1", "seed=x", "nope=1").message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=nowhere", "no such folder"),
        ("model.scratch={}", "exactly one"),
        ("environment.id=toy_repare", "toy_repare"),
        ("agent.id=tool_lop", "tool_lop"),
        ("sandbox.id=dokker", "dokker"),
        ("eval.id=heldoutt", "heldoutt"),
        ("sft.sandbox.id=dokker", "dokker"),
        ("sft.sandbox={id='process', foo=1}", "`sft.sandbox.foo` is not a setting"),
        ("sft.script='no.such.module:x'", "no.such.module"),
        ("sft.gate='harness.task:nope'", "nope"),
        ("environment.id=':x'", ":x"),
        ("environment.id='.a:b'", ".a:b"),
        ("environment.id='json:dumps'", "json:dumps"),
        ("environment.id='json:'", "json:"),
    ],
)
def test_plug_ins_and_models_are_checked_before_anything_starts(base: Path, override: str, says: str) -> None:
    assert says in refused(base, override).message


def test_neither_model_source(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[environment]\nid = "toy_repair"\n')
    assert "exactly one" in refused(path).message


def test_scratch_without_a_warm_start(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[environment]\nid = "toy_repair"\n[model.scratch]\nhidden_size = 8\n')
    assert "[sft]" in refused(path).hint


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_model_folder_lacks_a_file(base: Path, tmp_path: Path, name: str) -> None:
    for other in set(MODEL_FILES) - {name}:
        (tmp_path / other).write_text("{}")
    said = refused(base, f"model.path='{tmp_path}'").message
    assert name in said and "there is n" in said


def test_the_environment_must_be_named(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[model]\npath = "{model}"\n')
    assert "`environment` is missing" in refused(path).message
    path.write_text(f'[model]\npath = "{model}"\n[environment]\nseed = 1\n')
    assert "`environment.id` is missing" in refused(path).message


@pytest.mark.parametrize("text", ["x = ", "[a", "a = 1\na = 2", "\x00", "steps 3"])
def test_not_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert str(path) in refused(path).message


def test_not_a_file(tmp_path: Path) -> None:
    assert "neither a file nor a preset" in refused(tmp_path / "none.toml").message
    assert "directory" in refused(tmp_path).message
    (tmp_path / "latin.toml").write_bytes(b"x = '\xff'")
    assert "latin.toml" in refused(tmp_path / "latin.toml").message


@pytest.mark.parametrize("override", ["steps", "=3", "--steps", "seed.x=1", "steps.a.b=1", "a..b=1", ".=1", ""])
def test_overrides_that_are_none(base: Path, override: str) -> None:
    refused(base, override)


def test_a_value_may_be_longer_than_a_file_name(base: Path) -> None:
    nudge = "x" * 300
    assert load_config([base, f"agent.nudge={nudge}"]).agent.table()["nudge"] == nudge


def test_override_syntax(base: Path) -> None:
    config = load_config(
        base,
        [
            "steps=7",
            "rollout.eta=0.5",
            "run_dir=some/where else",
            "model.stop=['<|im_end|>', '=']",
            "value.epochs=2",
            "critic.optimizer={lr=1e-3}",
            "engine.url=http://x:1/?a=b",
            "steps=8",
        ],
    )
    assert (config.steps, config.rollout.eta, config.run_dir) == (8, 0.5, "some/where else")
    assert config.model.stop == ["<|im_end|>", "="]
    assert config.value is not None
    assert config.value.epochs == 2
    assert config.critic.optimizer.lr == 1e-3
    assert config.engine.url == "http://x:1/?a=b"


def same(config: Config, folder: Path) -> None:
    path = folder / "config.toml"
    path.write_text(dump_config(config))
    again = load_config(path)
    assert again == config
    assert dump_config(again) == dump_config(config)


def test_the_shipped_quickstart_loads_back_as_itself(tmp_path: Path, model: Path) -> None:
    root = Path(__file__).parents[2]
    same(load_config(root / "configs/quickstart.toml", [f"model.path='{model}'"]), tmp_path)


FLOAT = st.floats(1e-6, 1e3, allow_nan=False)


@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(-(2**40), 2**40),
            "steps": st.integers(0, 10**6),
            "run_dir": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(lambda s: {"raw": s}),
            "rollout.eta": FLOAT,
            "trainer.optimizer.lr": FLOAT,
            "critic.optimizer.betas": st.tuples(FLOAT, FLOAT).map(list),
            "value.heldout": st.floats(0.01, 0.99),
            "value.optimizer.warmup_steps": st.integers(0, 99),
            "sft.decay": st.floats(0, 1),
            "sft.sandbox.id": st.sampled_from(["process", "memory"]).map(lambda s: {"raw": s}),
            "environment.seed": st.integers(0, 10**6),
            "agent.nudge": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(lambda s: {"raw": s}),
            "algorithm.advantage_norm": st.just({"raw": "global_mean_std"}),
        },
    )
)
def test_dump_and_load_are_inverse(base: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    def text(value: Any) -> str:
        import tomli_w

        return tomli_w.dumps({"x": value["raw"] if isinstance(value, dict) else value}).removeprefix("x = ").strip()

    if any(key.startswith("sft.") for key in changes):
        changes = changes | {"sft.run": {"raw": "demos"}}
    config = load_config(base, [f"{key}={text(value)}" for key, value in changes.items()])
    same(config, tmp_path_factory.mktemp("again"))


def test_scratch_fields_survive(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[environment]\nid = "toy_repair"\n[sft]\nrun = "demos"\n[model.scratch]\nmodel_type = "m"\ntokenizer = "a:b"\n'
        "hidden_size = 8\nrope = {theta = 1e2}\nlist = [1, 2]\n"
    )
    same(load_config(path), tmp_path)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_theta": 1e6}}, 1024),
        ({}, None),
    ],
)
def test_an_episode_fits_the_positions_of_the_model(tmp_path: Path, fields: dict[str, Any], most: int | None) -> None:
    for name in MODEL_FILES:
        (tmp_path / name).write_text(json.dumps(fields) if name == "config.json" else "{}")
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{tmp_path}"\n[environment]\nid = "toy_repair"\n[sandbox]\nid = "memory"\n')
    load_config(file, [f"limits.max_context={most or 10**9}"])
    if most is not None:
        error = refused(file, f"limits.max_context={most + 1}")
        assert f"the model knows {most} positions" in error.message and str(most) in error.hint
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json" in refused(file).message


def distinct(model: type[BaseModel], seen: set[type[BaseModel]]) -> int:
    """Settings that a user can meet: the fields of each kind of section, counted once."""
    if model in seen:
        return 0
    seen.add(model)
    total = 0
    for field in model.model_fields.values():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        total += 1 if section is None else distinct(section, seen)
    return total


def test_there_are_fewer_than_eighty_settings() -> None:
    assert distinct(Config, set()) < 80


def test_every_setting_forbids_unknown_keys_or_is_a_plug_in_table() -> None:
    def walk(model: type[BaseModel]) -> None:
        assert model is Plugin or model.model_config.get("extra") == "forbid", model
        for field in model.model_fields.values():
            for kind in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    walk(kind)

    walk(Config)


# --- registry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in BUILTIN.items() for n in names])
def test_every_built_in_name_exists(kind: Any, name: str) -> None:
    found = find(kind, name)
    assert callable(found)
    if kind != "evaluation":
        assert found.Config.model_config.get("extra") == "forbid", "a plug-in's unknown options are errors too"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path for strangers' packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_module_attr_and_its_options(package: Path) -> None:
    (package / "stranger_a.py").write_text(
        "from pydantic import BaseModel, ConfigDict\n"
        "class Mine:\n    class Config(BaseModel):\n        model_config = ConfigDict(extra='forbid')\n        size: int = 3\n"
    )
    cls, options = plugin_config("environment", {"id": "stranger_a:Mine", "size": 4})
    assert (cls.__name__, options.size) == ("Mine", 4)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"`environment.sise` is not a setting") as caught:
        plugin_config("environment", {"id": "stranger_a:Mine", "sise": 4})
    assert "`size`" in caught.value.hint
    with pytest.raises(ConfigError, match="Mime") as caught:
        load_object("stranger_a:Mime")
    assert "`Mine`" in caught.value.hint


@pytest.mark.parametrize("body", ["import nothing_of_the_kind", "def broken(:", "1 / 0", "raise ValueError('no licence')"])
def test_a_module_that_cannot_be_imported_is_named_with_its_reason(package: Path, body: str) -> None:
    name = f"stranger_{abs(hash(body))}"
    (package / f"{name}.py").write_text(body)
    with pytest.raises(ConfigError, match=name):
        load_object(f"{name}:X")
    sys.modules.pop(name, None)


def test_an_entry_point_of_another_distribution(package: Path) -> None:
    (package / "stranger_b.py").write_text("from pydantic import BaseModel\nclass Env:\n    Config = BaseModel\n")
    info = package / "stranger_b-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-b\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sao.environment]\nmine = stranger_b:Env\ngone = stranger_b:Gone\n")
    importlib.invalidate_caches()
    assert find("environment", "mine").__name__ == "Env"
    with pytest.raises(ConfigError, match="Gone"):
        find("environment", "gone")
    with pytest.raises(ConfigError) as caught:
        find("environment", "mime")
    assert "`mine`" in caught.value.hint
    with pytest.raises(ConfigError):
        find("agent", "mine")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.script=environments.toy_repair.expert:flawed_expert", "sft.run=demos"], "exactly one of `sft.script`"),
        (["critic.init=somewhere", "value.episodes=10"], "exclude each other"),
        (["engine.url=http://127.0.0.1:1", "engine.threads=2"], "`engine.threads`"),
    ],
)
def test_contradictions_are_refused(base: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(base, overrides)
