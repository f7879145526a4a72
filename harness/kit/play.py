"""Play scripted episodes of an environment, the real way: `run_episode`, the tool loop, tokens, a sandbox. Nothing is learned.

Flows in: an environment, its options, a sandbox table, limits. Flows out: `Played`, one per episode.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.chat import Chat
from harness.engines.scripted import Script, ScriptedEngine, in_turn
from harness.episode import Episode, Stage, run_episode
from harness.kit.watch import Notes, Trouble, WatchedEnvironment, WatchedProvider
from harness.parsers import hermes
from harness.protocols import Environment, SandboxProvider
from harness.registry import environment, plugin_config
from harness.session import TokenSession
from harness.task import Limits, Split, Task

ALONE = 4
"""Tasks that are played one by one."""
GRACE_S = 10.0
"""How long after its last limit an episode may still take to end."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass
class Played:
    """One episode: how it ended, or what broke the harness, or neither if it never ended."""

    task: Task
    notes: Notes
    turns: int
    seconds: float
    episode: Episode | None = None
    broken: str = ""
    raised: str = ""
    """What the solver raised, if it did."""

    @property
    def verdict(self) -> tuple[Any, ...]:
        """What must be the same whenever the same is played."""
        e, score = self.episode, self.notes.score
        turn_rewards = sorted(getattr(score, "turn_rewards", {}).items())
        return (None, None, [], 0) if e is None else (e.termination.value, e.reward, turn_rewards, self.turns)


@dataclass
class Subject:
    """What is checked, and what its checks share."""

    spec: str
    options: dict[str, Any]
    sandbox: dict[str, Any]
    environment: Environment
    sandboxes: SandboxProvider
    chat: Chat
    limits: Limits
    agent: Any
    kept: dict[str, Any] = field(default_factory=dict)
    """Results that several checks read."""
    _count: int = 0

    def tasks(self, split: Split, most: int) -> list[Task]:
        """The first tasks of a split, made once."""
        if split not in self.kept:
            self.kept[split] = self.environment.tasks(split)
        tasks = self.kept[split]
        return [tasks[i] for i in range(min(most, len(tasks)))]

    def some(self) -> list[Task]:
        """The tasks that are played one by one, one of them held out."""
        return [*self.tasks("train", ALONE - 1), *self.tasks("heldout", 1)]

    @property
    def solvable(self) -> bool:
        """Whether the environment offers a scripted solver."""
        return hasattr(self.environment, "solver")

    def best(self, task: Task) -> Script:
        """The environment's own solver; silence if it has none."""
        environment: Any = self.environment
        made: list[Script] = []

        def script(conversation: str, rng: random.Random) -> str:
            if not made:  # here, so that what `solver` raises is noted as what its script raises
                made.append(environment.solver(task))
            return made[0](conversation, rng)

        return script if self.solvable else in_turn()

    async def play(self, task: Task, script: Script, trouble: Trouble | None = None, **limits: Any) -> Played:
        """One episode. Whatever it does, this comes back."""
        self._count += 1
        notes = Notes(trouble)
        sessions: list[TokenSession] = []
        played = Played(task, notes, 0, 0.0)
        engine = ScriptedEngine(self.chat, _noted(script, played))
        bound = replace(self.limits, **limits)

        def session(episode_id: str, seed: int | None) -> TokenSession:
            sessions.append(TokenSession(self.chat, engine, hermes, bound, episode_id, seed=seed))
            return sessions[0]

        environment = WatchedEnvironment(self.environment, notes, bound.wall_s if trouble else None)
        provider: Any = WatchedProvider(self.sandboxes, notes)
        stage = Stage(environment, self.agent, provider, bound, session)  # type: ignore[arg-type]
        start = time.monotonic()
        job = asyncio.create_task(run_episode(stage, task, f"check-{self._count}", seed=0))
        await asyncio.wait({job}, timeout=4 * bound.wall_s + GRACE_S)  # acquire, begin, act, score
        if not job.done() and notes.score_s > bound.wall_s:
            await asyncio.wait({job}, timeout=notes.score_s)
        played.seconds = time.monotonic() - start
        if not job.done():
            job.cancel()
        else:
            try:
                played.episode = job.result()
            except Exception as error:  # noqa: BLE001 - whatever an environment makes the harness raise
                played.broken = f"{type(error).__name__}: {error}"
        played.turns = sessions[0].turns if sessions else 0
        return played


def _noted(script: Script, played: Played) -> Script:
    def noted(conversation: str, rng: random.Random) -> str:
        try:
            turn = script(conversation, rng)
            if not isinstance(turn, str):
                raise TypeError(f"its script gave {type(turn).__name__}, not text")
        except Exception as error:
            played.raised = f"{type(error).__name__}: {error}"
            raise
        return turn

    return noted


def subject(spec: str, options: dict[str, Any], sandbox: dict[str, Any], limits: Limits, folder: Path, run_id: str) -> Subject:
    """Validate the names and options. Raises `ConfigError`. `folder`: an empty one, for the tokenizer."""
    made = environment({"id": spec, **options})
    provider, provider_config = plugin_config("sandbox", sandbox)
    agent, agent_config = plugin_config("agent", {"id": "tool_loop"})
    return Subject(
        spec, options, sandbox, made, provider(provider_config, run_id), byte_chat(folder), limits, agent(agent_config)
    )


def byte_chat(folder: Path, special: Sequence[str] = SPECIAL) -> Chat:
    """A tokenizer of single bytes with a plain chat template, written to `folder`: any text goes through it exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Chat(folder, ["<|im_end|>"])
