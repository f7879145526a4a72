"""The online_writing environment: one request, one reply, two binary judgements, reward r = r_style * r_quality.

The reader's preference is not in the prompt: it is learnt from the reward, and learnt anew after each switch. A reply that a
limit cuts off has reward 0 without being read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field, model_validator

from environments.online_writing import lexicon, symbols
from environments.online_writing.expert import right_symbols, right_text
from environments.online_writing.llm_judge import LlmJudge, LlmJudgeConfig
from environments.online_writing.stream import Form, Phase, WritingTasks, paper_phases
from environments.online_writing.verdict import Judge, Style, Verdict
from harness.engines.scripted import Script, in_turn
from harness.protocols import ANSWER, LiveTask, Sandbox, Tool
from harness.task import Score, Split, Task


class OnlineWritingConfig(BaseModel):
    """Options of online_writing."""

    model_config = ConfigDict(extra="forbid")

    form: Form = "symbols"
    """Tier A, for the tiny policy with `environments.online_writing.tokenizer`, or tier B, English for an instruct model."""
    seed: int = 0
    """Tasks differ by seed; the prompts of the two splits do not."""
    phases: list[Phase] = Field(default_factory=paper_phases, min_length=1)
    """Their episodes are counted as they are drawn. They should last longer than the training: behind the last phase the first
    one begins again, and (eta + 1) batches are drawn ahead."""
    heldout_tasks: int = Field(600, ge=1)
    judge: LlmJudgeConfig | None = None
    """A model that judges tier B; None: the lexicon."""

    @model_validator(mode="after")
    def _readable(self) -> OnlineWritingConfig:
        if self.judge is not None and self.form == "symbols":
            raise ValueError("a model cannot judge symbols: drop `judge`, or set form=texts")
        return self


class OnlineWriting:
    """See the module docstring."""

    Config = OnlineWritingConfig

    def __init__(self, config: OnlineWritingConfig) -> None:
        self.config = config
        self._judge: Judge = _at_once(symbols.judge if config.form == "symbols" else lexicon.judge)
        self._score_s = 30.0
        if config.judge is not None:
            judge = LlmJudge(config.judge)
            self._judge, self._score_s = judge, judge.longest_s

    def tasks(self, split: Split) -> Sequence[Task]:
        """A lazy sequence; that of training is a stream."""
        config = self.config
        size = sum(phase.episodes for phase in config.phases) if split == "train" else config.heldout_tasks
        return WritingTasks(config.form, split, config.seed, config.phases, size)

    async def begin(self, task: Task, sandbox: Sandbox) -> LiveTask:
        """There is nothing to prepare."""
        return WritingTask(task, sandbox, self._judge, self._score_s)

    def solver(self, task: Task) -> Script:
        """A good reply in the preferred style, by symbols or lexicon."""
        write = right_symbols if self.config.form == "symbols" else right_text
        return in_turn(write(task.data["topic"], task.data["preferred"]))


class WritingTask:
    """One request."""

    tools: Sequence[Tool] = ()

    def __init__(self, task: Task, sandbox: Sandbox, judge: Judge, score_s: float) -> None:
        self._task, self._sandbox, self._judge = task, sandbox, judge
        self.score_s = score_s

    async def score(self) -> Score:
        """1 if the reply is good and in the style that its phase prefers. `info` has the phase and both judgements."""
        data = self._task.data
        try:
            reply = (await self._sandbox.read(ANSWER)).decode(errors="replace")
        except FileNotFoundError:  # the reply was cut off
            verdict = Verdict(style=False, quality=False)
        else:
            verdict = await self._judge(reply, data["topic"], data["preferred"])
        info = {"phase": data["phase"], "preferred": data["preferred"], "written": verdict.written}
        return Score(verdict.reward, info=info | {"style": verdict.style, "quality": verdict.quality})


def _at_once(judge: Callable[[str, str, Style], Verdict]) -> Judge:
    async def judged(reply: str, topic: str, preferred: Style) -> Verdict:
        return judge(reply, topic, preferred)

    return judged
