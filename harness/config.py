"""The whole configuration of a run: pydantic models, TOML files, dotted overrides. An unknown key is an error, never ignored.

Flows in: a TOML file and `key=value` overrides. Flows out: a `Config`, saved as `config.toml` in the run folder. Plug-in tables
(`environment`, `agent`, `sandbox`) keep their own keys, which the plug-in's own model validates before anything starts.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness.errors import ConfigError
from harness.registry import config_error, find, load_object, plugin_config
from harness.task import Limits

Folder = Annotated[str, AfterValidator(os.path.abspath)]
"""A path that is saved absolute, so that a run can be resumed from anywhere."""


class Section(BaseModel):
    """A table of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Plugin(BaseModel):
    """A plug-in table: `id` and the plug-in's own keys."""

    model_config = ConfigDict(extra="allow")
    id: str

    def table(self) -> dict[str, Any]:
        """All keys, with `id`."""
        return {"id": self.id, **(self.model_extra or {})}


class LimitsConfig(Section):
    """What one episode may use (`harness.task.Limits`)."""

    max_turns: int = Field(50, ge=1)
    max_context: int = Field(131_072, ge=2)
    max_tokens_per_turn: int = Field(8_192, ge=1)
    wall_s: float = Field(3_600.0, gt=0)

    def limits(self) -> Limits:
        """As the plain dataclass that plug-ins see."""
        return Limits(**self.model_dump())


class EngineConfig(Section):
    """The inference engine. `torch` is the embedded one; a `url` names a server that speaks the same contract."""

    url: str | None = None
    max_batch: int = Field(32, ge=1)
    """Sequences decoded together by the embedded engine."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    start_s: float = Field(300.0, gt=0)
    """Seconds that a start may take."""


class RolloutConfig(Section):
    """How many episodes run, and how far ahead of the trainer."""

    concurrency: int = Field(256, ge=1)
    """Episodes in flight at most."""
    eta: float = Field(8.0, ge=0)
    """Staleness budget in trainer steps: running + queued <= (eta + 1) * batch. 0 is synchronous."""
    max_attempts: int = Field(3, ge=1)
    """Tries of a task whose episode was lost to infrastructure."""
    tool_calls: Literal["hermes"] = "hermes"
    """How the model writes tool calls."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0)
    """Global gradient norm."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of the learning rate, in steps."""


class CriticConfig(Section):
    """The value model: a copy of the policy's backbone with a scalar head."""

    init: Folder | None = None
    """Folder of a pre-trained critic; None starts from the policy, with value pre-training if `[value]` is given."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)
    head_lr_mult: float = Field(1.0, gt=0)
    """The head's learning rate relative to the backbone's; 10 or more for tiny models."""
    updates: int = Field(2, ge=1)
    """K: critic optimizer steps per policy step, on the same batch with fixed targets."""
    trainable: Literal["mlp_only", "no_attn", "none"] = "mlp_only"
    """Which parameters RL freezes: all but MLP/experts and head, the attention only, or none."""
    policy_freeze_steps: int = Field(10, ge=0)
    """Batches at the start on which only the critic is updated."""


class AlgorithmConfig(Section):
    """SAO: skip-observation GAE and DIS."""

    batch: int = Field(128, ge=1)
    """Trajectories per policy step."""
    gamma: float = Field(1.0, gt=0, le=1)
    alpha: float = Field(1.5, gt=0)
    """lambda_policy = 1 - 1 / (alpha * number of action tokens)."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """lambda of the critic's target."""
    eps_low: float = Field(0.8, gt=0)
    """DIS keeps a token while 1 - eps_low < ratio < 1 + eps_high."""
    eps_high: float = Field(3.0, gt=0)
    advantage_values: Literal["pre", "post"] = "post"
    """Values for the advantages: before or after this batch's critic updates."""
    advantage_norm: Literal["none", "global_mean_std"] = "none"
    truncation: Literal["zero", "bootstrap"] = "zero"
    """A truncated trajectory's value after its last token: 0, or the critic's."""
    control: Literal["none", "flip_sign", "shuffle_rewards"] = "none"
    """Controls that must not learn: negate the advantage, or shuffle rewards between the trajectories of a batch."""


class TrainerConfig(Section):
    """The trainer process: torchrun ranks with FSDP2."""

    ranks: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(131_072, ge=1)
    """Tokens packed into one forward and backward pass."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type; master weights are float32."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints; a crash loses at most these."""
    keep_checkpoints: int = Field(2, ge=1)


class ValueConfig(Section):
    """Value pre-training on the initial policy's own trajectories."""

    episodes: int = Field(6_400, ge=2)
    heldout: float = Field(0.05, gt=0, lt=1)
    """Share of prompts kept for the stopping rule and the reported explained variance."""
    batch: int = Field(128, ge=1)
    epochs: int = Field(1, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)
    head_lr_mult: float = Field(1.0, gt=0)


class CorpusPhase(Section):
    """One phase of a curriculum: texts of these levels until the smoothed loss of the highest is below `loss`."""

    levels: list[int]
    loss: float = Field(gt=0)


class SftConfig(Section):
    """Supervised warm start: loss on the action spans of demonstrations."""

    script: str | None = None
    """Demonstrator: `module:attr` of a script (`harness.engines.scripted`), played by the agent in the environment."""
    run: Folder | None = None
    """Demonstrations already stored instead: a run folder."""
    episodes: int = Field(4_000, ge=1)
    sandbox: Plugin = Plugin(id="process")
    """Where the demonstrator acts."""
    corpus: str | None = None
    """`module:attr` of a function (random numbers, level) -> [(text, carries loss)] that teaches a skill first."""
    corpus_phases: list[CorpusPhase] = []
    """The curriculum."""
    corpus_optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3, weight_decay=0.0, warmup_steps=50)
    corpus_muon_lr: float = Field(0.02, gt=0)
    """Learning rate of Muon on the attention matrices while the skill is taught."""
    corpus_batch: int = Field(64, ge=1)
    corpus_max_steps: int = Field(1_000, ge=1)
    """If the last phase is not done by then, the gate stops the run."""
    corpus_mix: float = Field(0.3, ge=0)
    """Weight of the skill text beside the demonstrations."""
    corpus_mix_levels: list[int] = []
    corpus_mix_batch: int = Field(16, ge=1)
    observation_weight: float = Field(0.0, ge=0)
    """Loss weight of the tokens that the policy does not sample."""
    batch: int = Field(64, ge=1)
    epochs: int = Field(3, ge=1)
    decay: float = Field(0.0, ge=0, le=1)
    """Share of the steps at the end over which the learning rate falls to 0."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    gate: str | None = None
    """`module:attr` of a coroutine (engine, chat, tasks) -> facts that raises `ConfigError` if the policy lacks the skill."""


class EvalConfig(Section):
    """Held-out evaluation before and after."""

    id: str = "heldout"
    tasks: int = Field(256, ge=0)
    """Held-out tasks, one sampled episode each; 0 evaluates nothing."""


class ModelConfig(Section):
    """The policy."""

    path: Folder | None = None
    """Folder with config.json, model.safetensors, tokenizer.json and chat_template.jinja."""
    scratch: dict[str, Any] | None = None
    """Random weights instead: the fields of config.json, with `tokenizer` (`module:attr` that writes the tokenizer files)."""
    stop: list[str] = ["<|im_end|>"]
    """Tokens that end a turn."""


class Config(Section):
    """One run."""

    seed: int = 0
    steps: int = Field(1_000, ge=0)
    """Batches to consume."""
    run_dir: str = "runs"
    """New run folders are made under this folder."""
    model: ModelConfig = ModelConfig()
    environment: Plugin
    agent: Plugin = Plugin(id="tool_loop")
    sandbox: Plugin = Plugin(id="process")
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    value: ValueConfig | None = None
    sft: SftConfig | None = None
    eval: EvalConfig = EvalConfig()

    def check(self) -> None:
        """Validate what spans sections and plug-ins. Raises `ConfigError`."""
        for kind in ("environment", "agent", "sandbox"):
            plugin_config(kind, getattr(self, kind).table())
        find("evaluation", self.eval.id)
        if self.sft is not None:
            plugin_config("sandbox", self.sft.sandbox.table(), prefix="sft.sandbox")
            for path in filter(None, (self.sft.script, self.sft.corpus, self.sft.gate)):
                load_object(path)
        if (self.model.path is None) == (self.model.scratch is None):
            raise ConfigError("exactly one of `model.path` and `model.scratch` must be given", hint="set model.path=FOLDER")
        if self.model.path is not None:
            for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
                if not (Path(self.model.path) / name).is_file():
                    raise ConfigError(f"`model.path` = {self.model.path!r}: there is no {name}", hint="give a model folder")
        elif self.sft is None:
            raise ConfigError("`model.scratch` without `[sft]`: RL cannot start from random weights", hint="add an [sft] table")
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        sft, scratch = self.sft, self.model.scratch
        if sft is not None and (sft.script is None) == (sft.run is None):
            raise ConfigError(
                "exactly one of `sft.script` and `sft.run` must be given", hint="say where demonstrations come from"
            )
        if self.value is not None and self.critic.init is not None:
            raise ConfigError("`critic.init` and `[value]` exclude each other", hint="drop the one that you do not want")
        if self.engine.url is not None and (set_here := {"max_batch", "threads"} & self.engine.model_fields_set):
            raise ConfigError(
                f"`engine.{min(set_here)}` is for the embedded engine, not for `engine.url`", hint="drop one of them"
            )
        for name in ("tokenizer", "model_type"):
            if scratch is not None and name not in scratch:
                raise ConfigError(f"`model.scratch.{name}` is missing", hint="see configs/quickstart-scratch.toml")


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read TOML, apply `a.b=value` overrides (TOML values; bare words are strings), validate. Raises `ConfigError`."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", hint="give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", hint="correct the file") from None
    for item in overrides or []:
        _override(data, item)
    try:
        config = Config(**data)
    except ValidationError as error:
        raise config_error(error, Config) from None
    config.check()
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _override(data: dict[str, Any], item: str) -> None:
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {item!r} is not key=value", hint="for example rollout.concurrency=32")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    *parents, last = key.split(".")
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {item!r}: `{part}` is a value, not a table", hint="check the dotted name")
    table[last] = value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
