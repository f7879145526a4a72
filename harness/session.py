"""The token session: chat messages in, a reply out, and every token of it recorded exactly. The only writer of trajectories.

The first request renders the model's template. Every later one that extends a conversation seen before adds only its new
messages, behind the tokens that were really sampled. The agent's echo of the assistant turns is ignored: what the policy said
is known in tokens. A request that extends none (rewritten history, a sub-agent) starts a new segment, whose prompt is an
observation. With a folder, each turn is on disk before it is answered, and another process can go on with the session.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from harness.chat import Chat, split_reasoning
from harness.errors import EngineError, EpisodeEnd, InvariantError
from harness.journal import Count, Journal, Rendering, Turn
from harness.parsers import Parser
from harness.protocols import GenerateRequest, Generation, InferenceEngine, Message, Reply, SamplingContract
from harness.segment import Segment, Tools, find
from harness.task import Limits, Termination
from harness.trajectory import Trajectory


class TokenSession:
    """The model of one episode. Calls are answered one after another."""

    def __init__(
        self,
        chat: Chat,
        engine: InferenceEngine,
        parser: Parser,
        limits: Limits,
        episode_id: str,
        sampling: SamplingContract | None = None,
        seed: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._chat, self._engine, self._parser, self._limits = chat, engine, parser, limits
        self._episode_id, self._seed, self._folder = episode_id, seed, folder
        self._sampling = sampling or SamplingContract()
        header = {"episode": episode_id, "seed": seed, "sampling": asdict(self._sampling)}
        self._journal = None if folder is None else Journal(folder / "session.jsonl", header)
        self._segments: list[Segment] = []
        self._facts: Counter[str] = Counter()
        self._turns = 0
        self._ended: Termination | None = None
        self._lock = asyncio.Lock()

    @property
    def episode_id(self) -> str:
        """Unique within the run."""
        return self._episode_id

    @property
    def folder(self) -> Path | None:
        """Where the session and its agent keep their state; None: nowhere."""
        return self._folder

    @property
    def turns(self) -> int:
        """Model calls answered."""
        return self._turns

    @property
    def ended(self) -> Termination | None:
        """The limit that the last request ran into; None if it was answered."""
        return self._ended

    def count(self, fact: str, n: int = 1) -> None:
        """Add to a counter that is stored with the episode's trajectories."""
        if self._journal is not None:
            self._journal.append(Count(fact, n))
        self._facts[fact] += n

    def restore(self) -> None:
        """Take up what an earlier process recorded in the folder, if it did. A fresh session only.

        Raises `InvariantError` if the file cannot be read or is of another episode, seed or sampling contract.
        """
        if self._journal is None or self._segments or self._facts:
            raise InvariantError("only a fresh session with a folder can be restored")
        for entry in self._journal.load():
            if isinstance(entry, Count):
                self._facts[entry.fact] += entry.n
                continue
            try:
                self._record(entry)
            except (InvariantError, IndexError, TypeError, ValueError, OverflowError) as error:
                raise InvariantError(
                    f"{self._folder}: turn {self._turns} of the stored session is not as it was recorded: {error}",
                    hint="remove the episode's folder to play it anew",
                ) from error

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """One model call on the whole conversation so far.

        The last request of any conversation, repeated, gets the same reply again. Raises `EpisodeEnd` at a limit (after
        recording a turn that was cut), `EngineError` with nothing recorded when the engine fails or sampled otherwise than it
        was asked to, and `ConfigError` for messages that the template refuses.
        """
        async with self._lock:
            try:
                reply = await self._answer(list(messages), list(tools))
            except EpisodeEnd as end:
                self._ended = end.termination
                raise
            self._ended = None
            return reply

    async def _answer(self, request: list[Message], tools: Tools) -> Reply:
        for segment in reversed(self._segments):
            if segment.repeats(request, tools):
                return segment.answer()
        found = find(self._segments, request, tools)
        if found is None:
            added, tools = copy.deepcopy((request, tools))
            return await self._sample(Segment(tools), added, self._chat.opening(added, tools), "short")
        added = copy.deepcopy(request[len(found.request) :])
        new, rendering = found.continuation(self._chat, added)
        return await self._sample(found, added, new, rendering)

    async def _sample(self, segment: Segment, added: list[Message], new: list[int], rendering: Rendering) -> Reply:
        if self._turns >= self._limits.max_turns:
            raise EpisodeEnd(Termination.MAX_TURNS)
        prompt = segment.builder.tokens + new
        n_prompt, room = len(prompt), self._limits.max_context - len(prompt)
        if room < 1:
            raise EpisodeEnd(Termination.MAX_CONTEXT)
        opened = self._chat.opens_thinking(prompt)
        generation = await self._engine.generate(
            GenerateRequest(
                token_ids=prompt,
                max_tokens=min(room, self._limits.max_tokens_per_turn),
                stop_token_ids=self._chat.stop_ids,
                sampling=self._sampling,
                seed=None if self._seed is None else self._seed + self._turns,
                request_id=f"{self._episode_id}/{self._turns}",
                routed=segment.builder.routed,
            )
        )
        _check(generation, self._sampling)
        end = None
        if generation.finish_reason == "length":
            cut = n_prompt + len(generation.token_ids) >= self._limits.max_context
            end = Termination.MAX_CONTEXT if cut else Termination.MAX_TOKENS_PER_TURN
        known = segment in self._segments
        turn = Turn(
            segment=self._segments.index(segment) if known else len(self._segments),
            messages=added,
            tools=None if known or (self._segments and self._segments[-1].tools == segment.tools) else segment.tools,
            observed=new,
            sampled=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            reply=self._reply(generation, n_prompt, opened, segment.tools),
            end=end,
            rendering=rendering,
            confirmed=generation.sampling is not None,
            digest=segment.digest_with(new, generation.token_ids),
        )
        if self._journal is not None:
            self._journal.append(turn)
        recorded = self._record(turn)
        if generation.experts is not None:
            recorded.builder.route(generation.experts)
        return recorded.answer()

    def _reply(self, generation: Generation, n_prompt: int, opened: bool, tools: Tools) -> Reply:
        reasoning, rest = split_reasoning(self._chat.text_of(generation.token_ids), opened)
        content, calls = self._parser(rest, self._turns, tools)
        return Reply(content, calls, generation.finish_reason, reasoning, n_prompt, len(generation.token_ids))

    def _record(self, turn: Turn) -> Segment:
        """Take a turn in: one that was just played, or one of an earlier process."""
        if not 0 <= turn.segment <= len(self._segments):
            raise IndexError(f"there is no segment {turn.segment}")
        if turn.segment == len(self._segments):
            segment = Segment(self._segments[-1].tools if turn.tools is None and self._segments else turn.tools or [])
            segment.record(turn)
            self._segments.append(segment)
            self._facts["forks"] += turn.segment > 0
        else:
            segment = self._segments[turn.segment]
            segment.record(turn)
        if turn.rendering != "short":
            self._facts[f"{turn.rendering}_renderings"] += 1
        self._turns += 1
        self._ended = turn.end
        return segment

    def trajectories(self, task_id: str, info: dict[str, Any]) -> tuple[Trajectory, ...]:
        """The segments so far, each with at least one action token, as trajectories without reward.

        Added to `info`: `sampling` (its hash), `sampling_used` (each setting, the seed, and whether the engine confirmed them
        for every turn), `calls` (see `Segment`), `facts` (counters of the whole session).
        """
        sampled = [s for s in self._segments if s.builder.n_turns]
        return tuple(
            s.builder.build(self._episode_id, task_id, segment=number, info={**info, **self._info(s)})
            for number, s in enumerate(sampled)
        )

    def _info(self, segment: Segment) -> dict[str, Any]:
        return {
            "sampling": sampling_hash(self._sampling),
            "sampling_used": {**asdict(self._sampling), "seed": self._seed, "confirmed": segment.confirmed},
            "calls": [list(call) for call in segment.calls],
            "facts": {fact: n for fact, n in self._facts.items() if n},
        }


def sampling_hash(sampling: SamplingContract) -> str:
    """A short name of a sampling contract; the trainer refuses a batch with another one."""
    text = json.dumps([float(value) for value in astuple(sampling)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check(generation: Generation, asked: SamplingContract) -> None:
    """Raises `EngineError` if the lists do not match, or if the engine says that it sampled in another way."""
    lengths = len(generation.token_ids), len(generation.logprobs), len(generation.versions)
    if len(set(lengths)) != 1:
        raise EngineError("the engine answered {} tokens, {} log-probs, {} versions".format(*lengths))
    if generation.sampling is not None and generation.sampling != asked:
        wanted, used = asdict(asked), asdict(generation.sampling)
        wrong = ", ".join(f"{name}={used[name]} instead of {wanted[name]}" for name in wanted if used[name] != wanted[name])
        raise EngineError(f"the engine sampled with {wrong}", hint="start the engine without sampling defaults of its own")
