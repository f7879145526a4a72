"""The whole configuration of a run as pydantic models. An unknown key is an error, never ignored.

Flows in: the tables of `harness.configfile`. Flows out: a `Config`. Plug-in tables (`environment`, `agent`, `sandbox`, `loss`,
`advantage`) keep their own keys, which the plug-in's own model validates before anything starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.engines.vllm_launch import described
from harness.errors import ConfigError
from harness.modelfolder import weight_files
from harness.registry import Kind, find, load_object, plugin_config
from harness.task import Limits

Location = Annotated[str, AfterValidator(os.path.abspath)]
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


class VllmConfig(Section):
    """vLLM's servers (`harness/engines/vllm_launch.py`), each in vLLM's own environment."""

    replicas: int = Field(1, ge=1)
    kv: Literal["keep", "recompute"] = "keep"
    """Whether running requests keep their old keys and values across an update."""
    server: dict[str, Any] = {}
    """More fields of `harness.engines.vllm_launch.VllmServer`: python, platform, dtype, tensor_parallel, .."""


class EngineConfig(Section):
    """The inference engine: `torch` is the embedded one; a `url` names a server that speaks the same contract."""

    id: Literal["torch", "vllm"] = "torch"
    url: str | None = None
    """For vLLM, of one or more servers (with spaces between) that somebody else started and that serve the initial weights."""
    max_batch: int = Field(32, ge=1)
    """Sequences decoded together, by the embedded engine or by each vLLM replica."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of noise on the embedded engine's logits, nats: an engine unlike the trainer, for experiments."""
    start_s: float = Field(300.0, gt=0)
    """Seconds that a start may take."""
    vllm: VllmConfig | None = None
    """Options of vLLM, for `id = "vllm"`."""


class RolloutConfig(Section):
    """How many episodes run, and how far ahead of the trainer."""

    concurrency: int = Field(256, ge=1)
    """Episodes in flight at most."""
    eta: float = Field(8.0, ge=0)
    """Staleness budget in trainer steps: running + queued <= (eta + 1) * batch. 0 is synchronous."""
    publish_every: int = Field(1, ge=1)
    """Policy steps between publications of new weights; more than 1 delays them."""
    max_attempts: int = Field(3, ge=1)
    """Tries of a task whose episode was lost to infrastructure."""
    tool_calls: Literal["hermes", "qwen3_coder", "glm", "plain_json"] = "hermes"
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
    """The value model: a copy of the policy's backbone with a scalar head. Only for advantage estimators that read values."""

    init: Location | None = None
    """Location of a pre-trained critic; None starts from the policy, with value pre-training if `[value]` is given."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)
    head_lr_mult: float = Field(1.0, gt=0)
    """The head's learning rate relative to the backbone's, in pre-training too; 10 or more for tiny models."""
    updates: int = Field(2, ge=1)
    """K: critic optimizer steps per policy step, on the same batch with fixed targets."""
    advantage_values: Literal["pre", "post"] = "post"
    """Values for the advantages: before or after this batch's updates."""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of the critic's target; the policy's is in `[advantage]`."""
    trainable: Literal["mlp_only", "no_attn", "all"] = "mlp_only"
    """Which parameters RL trains: MLP/experts and head, all but the attention, or all."""
    value_clip: float | None = Field(None, gt=0)
    """PPO's clip of the value loss around the values before the updates, reward units; None: plain squared error."""
    policy_freeze_steps: int = Field(10, ge=0)
    """Batches at the start on which only the critic is updated."""


class AlgorithmConfig(Section):
    """What one step does with a batch; the policy loss and the advantage estimator have tables of their own."""

    batch: int = Field(128, ge=1)
    """Trajectories per policy step."""
    group: int = Field(1, ge=1)
    """Episodes per prompt; a batch is made of complete groups."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per step of the recursion."""
    advantage_norm: Literal["none", "global_mean_std", "global_std_only"] = "none"
    """Whitening over the action tokens of the global batch."""
    loss_norm: Literal["token_global", "token_kept", "seq_mean", "seq_sum_const"] | None = None
    """What the summed policy loss is divided by (`trainer.normalise`); None: as the loss's own paper does."""
    truncation: Literal["zero", "bootstrap", "mask"] = "zero"
    """A truncated trajectory ends with value 0, with the critic's value after its last token, or is left out of all losses."""
    control: Literal["none", "flip_sign", "shuffle_rewards"] = "none"
    """Controls that must not learn: negate the advantage, or shuffle rewards between the episodes of a batch."""


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
    compiled_gae: bool = False
    """Solve skip-observation GAE in C++, compiled at the start; needs a C++ compiler."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints; a crash loses at most these."""
    keep_checkpoints: int = Field(2, ge=1)


class ValueConfig(Section):
    """Value pre-training on the initial policy's own trajectories."""

    run: Location | None = None
    """Trajectories already stored: a run folder; None plays `episodes` new ones."""
    episodes: int = Field(6_400, ge=2)
    heldout: float = Field(0.05, gt=0, lt=1)
    """Share of prompts kept for the stopping rule, the gate and the reported explained variance."""
    batch: int = Field(128, ge=1)
    epochs: int = Field(1, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)
    """Times `critic.head_lr_mult` for the head."""
    min_ev: float = 0.0
    """Gate: RL does not start on a held-out explained variance that is not above this."""
    max_bias: float = Field(0.03, gt=0)
    """Gate: nor on a held-out abs(mean(V) - mean(G)) above this, reward units."""


class CorpusPhase(Section):
    """One phase of a curriculum: texts of these levels until the smoothed loss of the highest is below `loss`."""

    levels: list[int]
    loss: float = Field(gt=0)


class SftConfig(Section):
    """Supervised warm start: loss on the action spans of demonstrations."""

    script: str | None = None
    """Demonstrator: `module:attr` of a script (`harness.engines.scripted`), played by the agent in the environment."""
    run: Location | None = None
    """Demonstrations already stored instead: a run folder."""
    conversations: Location | None = None
    """Given conversations instead: a JSON-lines file of {"messages": [...], "tools": [...]}; loss on assistant turns."""
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

    path: Location | None = None
    """Location with config.json, model.safetensors (or shards and their index), tokenizer.json and chat_template.jinja."""
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
    loss: Plugin = Plugin(id="dis")
    """The policy loss (`trainer/losses/catalog.py`)."""
    advantage: Plugin = Plugin(id="skip_observation")
    """The advantage estimator (`trainer/advantages/catalog.py`)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = CriticConfig()
    """None after `check` if the estimator reads no values."""
    trainer: TrainerConfig = TrainerConfig()
    value: ValueConfig | None = None
    sft: SftConfig | None = None
    eval: EvalConfig = EvalConfig()
    alarms: Literal["stop", "warn"] = "stop"
    """Whether a grave alarm (`harness/alarms.py`) stops the run or is only logged."""

    def check(self, *, model: bool = True) -> None:
        """Validate what spans sections and plug-ins; `model`: that there is one, too. Raises `ConfigError`."""
        kinds: tuple[Kind, ...] = ("environment", "agent", "sandbox", "loss", "advantage")
        for kind in kinds:
            name = getattr(self, kind).id
            _, options = plugin_config(kind, getattr(self, kind).table())
            setattr(self, kind, Plugin(id=name, **options.model_dump(mode="json", exclude_none=True)))
        if self.algorithm.loss_norm is None:
            self.algorithm.loss_norm = find("loss", self.loss.id).norm
        find("evaluation", self.eval.id)
        if self.sft is not None:
            plugin_config("sandbox", self.sft.sandbox.table(), prefix="sft.sandbox")
            for path in filter(None, (self.sft.script, self.sft.corpus, self.sft.gate)):
                load_object(path)
        if model:
            self._check_model()
        self._check_contradictions()

    def _check_model(self) -> None:
        if (self.model.path is None) == (self.model.scratch is None):
            raise ConfigError("exactly one of `model.path` and `model.scratch` must be given", hint="set model.path=FOLDER")
        if self.model.path is not None:
            if not Path(self.model.path).is_dir():
                hint = "give a folder with config.json, model.safetensors, tokenizer.json, chat_template.jinja"
                raise ConfigError(f"`model.path` = {self.model.path!r}: there is no such folder", hint=hint)
            for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
                if not (Path(self.model.path) / name).is_file():
                    raise ConfigError(f"`model.path` = {self.model.path!r}: there is no {name}", hint="give a model folder")
            try:
                weight_files(Path(self.model.path))
            except ConfigError as error:
                raise ConfigError(f"`model.path`: {error.message}", hint=error.hint) from error
            self._check_positions(_json(Path(self.model.path) / "config.json"))
        elif self.sft is None:
            raise ConfigError("`model.scratch` without `[sft]`: RL cannot start from random weights", hint="add an [sft] table")

    def _check_positions(self, fields: dict[str, Any]) -> None:
        """The model must know as many positions as an episode may have tokens, or its log-probs mean nothing out there."""
        known = fields.get("max_position_embeddings")
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        if known is not None and self.limits.max_context > (most := int(known * float(rope.get("factor", 1.0)))):
            raise ConfigError(
                f"`limits.max_context` = {self.limits.max_context}: the model knows {most} positions",
                hint=f"set limits.max_context={most} or less, or take a model with a longer context",
            )

    def _check_contradictions(self) -> None:
        sft, scratch = self.sft, self.model.scratch
        self._check_positions(scratch or {})
        if sft is not None and sum(x is not None for x in (sft.script, sft.run, sft.conversations)) != 1:
            raise ConfigError(
                "exactly one of `sft.script`, `sft.run` and `sft.conversations` must be given",
                hint="say where demonstrations come from",
            )
        self._check_estimator()
        if self.value is not None and self.critic is not None and self.critic.init is not None:
            raise ConfigError("`critic.init` and `[value]` exclude each other", hint="drop the one that you do not want")
        if self.engine.vllm is not None and self.engine.id != "vllm":
            raise ConfigError(
                "`engine.vllm` is given, but `engine.id` is 'torch'", hint="set engine.id=vllm, or drop the table"
            )
        if self.engine.id == "vllm":
            for name in ("threads", "noise"):
                if name in self.engine.model_fields_set:
                    raise ConfigError(f"`engine.{name}` is for the embedded engine, not for vLLM", hint="drop it")
            self.engine.vllm = self.engine.vllm or VllmConfig()
            described({"model": ".", **self.engine.vllm.server})
        elif self.engine.url is not None and (set_here := {"max_batch", "threads", "noise"} & self.engine.model_fields_set):
            raise ConfigError(
                f"`engine.{min(set_here)}` is for the embedded engine, not for `engine.url`", hint="drop one of them"
            )
        for name in ("tokenizer", "model_type"):
            if scratch is not None and name not in scratch:
                raise ConfigError(f"`model.scratch.{name}` is missing", hint="see configs/quickstart-scratch.toml")

    def _check_estimator(self) -> None:
        """An estimator gets the critic and the groups that it reads; what it would ignore is refused."""
        name, estimator = self.advantage.id, find("advantage", self.advantage.id)
        algorithm = self.algorithm
        if algorithm.batch % algorithm.group:
            raise ConfigError(
                f"`algorithm.batch` = {algorithm.batch} is not a multiple of `algorithm.group` = {algorithm.group}",
                hint="a batch is made of complete groups",
            )
        if estimator.groups and algorithm.group == 1:
            raise ConfigError(
                f"`advantage.id` = {name!r} compares episodes of one prompt, but `algorithm.group` is 1",
                hint="set algorithm.group=8",
            )
        if estimator.kind == "return" and algorithm.advantage_norm == "global_std_only":
            raise ConfigError(
                f"`advantage.id` = {name!r} whitens its returns itself, so `algorithm.advantage_norm` = 'global_std_only' "
                "cannot be honoured",
                hint="drop algorithm.advantage_norm",
            )
        if self.trainer.compiled_gae and name != "skip_observation":
            raise ConfigError(
                f"`trainer.compiled_gae` solves `skip_observation`, not `advantage.id` = {name!r}", hint="drop it"
            )
        if estimator.kind == "critic":
            if self.critic is None:
                raise ConfigError(f"`advantage.id` = {name!r} needs a critic", hint="drop `critic = false`")
            return
        given = [table for table in ("critic", "value") if table in self.model_fields_set and getattr(self, table) is not None]
        if given:
            raise ConfigError(
                f"`[{given[0]}]` is given, but `advantage.id` = {name!r} reads no critic",
                hint=f"drop it, or lay `{given[0]} = false` over it",
            )
        self.critic = None
        if algorithm.truncation == "bootstrap":
            raise ConfigError(
                f"`algorithm.truncation` = 'bootstrap' needs a critic, and `advantage.id` = {name!r} reads none",
                hint="set algorithm.truncation=zero",
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise ConfigError(f"{path}: not a model's configuration: {error}", hint="give a model folder") from None
    return fields
