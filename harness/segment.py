"""One unbroken conversation of an episode: what it was asked, what it said, and whether a request goes on with it.

Flows in: requests (messages and tools), recorded turns. Flows out: the answer to a repeated request, the tokens that a longer
request adds, and the record (`TrajectoryBuilder`, digests of what the engine was sent).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from harness.chat import Chat
from harness.errors import ConfigError, EpisodeEnd, InvariantError
from harness.journal import Rendering, Turn, token_bytes
from harness.protocols import Message, Reply
from harness.task import Termination
from harness.trajectory import TrajectoryBuilder

Tools = list[dict[str, Any]]


class Segment:
    """A conversation with one list of tools."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.builder = TrajectoryBuilder()
        self.request: list[Message] = []
        """What was last asked, as it was asked."""
        self.calls: list[tuple[int, str, str]] = []
        """Of each action turn: prompt tokens sent, their digest, the digest with the sampled ones."""
        self.full = False
        """True once a short rendering was seen to differ: the whole history is rendered each turn."""
        self.confirmed = True
        self.reply: Reply
        self._end: Termination | None = None
        self._opening = 0
        self._turns = 0
        self._sha = hashlib.sha256()

    def repeats(self, request: list[Message], tools: Tools) -> bool:
        """True if this is what was asked last."""
        return request == self.request and tools == self.tools

    def answer(self) -> Reply:
        """The last reply; raises the `EpisodeEnd` that stood in its place."""
        if self._end is not None:
            raise EpisodeEnd(self._end)
        return self.reply

    def extended_by(self, request: list[Message], tools: Tools) -> bool:
        """True if the request starts with what was asked last and goes on behind the reply.

        Behind it is proven by an assistant message with the reply's call ids; its other content is ignored, since agents
        write it anew. An answer without content and calls may be left out.
        """
        n = len(self.request)
        if tools != self.tools or len(request) <= n or request[:n] != self.request:
            return False
        if not _is_echo(request[n]):
            return not self.reply.content.strip() and not self.reply.tool_calls
        return [call.get("id") for call in request[n].get("tool_calls") or []] == [call.id for call in self.reply.tool_calls]

    def continuation(self, chat: Chat, added: list[Message]) -> tuple[list[int], Rendering]:
        """Tokens behind the sampled turn for the messages that were added, and how they were come by.

        A template's text behind an assistant turn should not depend on what stands before that turn, so the turn is rendered
        behind the opening messages alone: the cost does not grow. That this is the text of the whole history is checked at
        continuations 2, 4, 8, .. (the first has no other history), whose cost is constant on average. If it is not, or if the
        template refuses the short history, the whole one is rendered from then on.
        """
        new = added[1:] if _is_echo(added[0]) else added
        last = self.builder.tokens[-1]

        def behind(history: list[Message]) -> list[int]:
            return chat.continuation(history, new, self.tools, last)

        if self.full:
            return behind(self.request), "full"
        try:
            short = behind(self.request[: self._opening])
        except ConfigError:  # a template that checks roles
            return behind(self.request), "full"
        if self._turns == 1 or self._turns & (self._turns - 1):
            return short, "short"
        try:
            whole = behind(self.request)
        except ConfigError:  # an echo that the template cannot read; what it says is ignored anyway
            return short, "unproven"
        return whole, "short" if whole == short else "full"

    def record(self, turn: Turn) -> None:
        """Append a turn. Raises `InvariantError`, with nothing appended, if its digest is not that of its tokens."""
        sent = self._sha.copy()
        sent.update(token_bytes(turn.observed))
        said = sent.copy()
        said.update(token_bytes(turn.sampled))
        if short_name(said) != turn.digest:
            raise InvariantError(f"the tokens of turn {self._turns} are not those of its digest {turn.digest}")
        self.builder.observe(turn.observed)
        n_prompt = len(self.builder.tokens)
        self.builder.act(turn.sampled, turn.logprobs, turn.versions)
        if turn.sampled:
            self.calls.append((n_prompt, short_name(sent), turn.digest))
        self._sha = said
        self.request += turn.messages
        self._opening = self._opening or len(self.request)
        self._turns += 1
        self.full |= turn.rendering == "full"
        self.confirmed &= turn.confirmed
        self.reply, self._end = turn.reply, turn.end

    def digest_with(self, *tokens: Sequence[int]) -> str:
        """The digest of this conversation and the given tokens behind it."""
        sha = self._sha.copy()
        for part in tokens:
            sha.update(token_bytes(part))
        return short_name(sha)


def find(segments: list[Segment], request: list[Message], tools: Tools) -> Segment | None:
    """The latest conversation that the request goes on with.

    Not one whose echo stands already, word for word, in another conversation with the same beginning: there the agent went
    back to that one's past.
    """
    for segment in reversed(segments):
        if segment.extended_by(request, tools):
            head = request[: len(segment.request) + 1]
            if not any(s is not segment and s.request[: len(head)] == head for s in segments):
                return segment
    return None


def short_name(sha: Any) -> str:
    """The form of `token_digest`."""
    return str(sha.hexdigest()[:16])


def _is_echo(message: Message) -> bool:
    return message.get("role") == "assistant"
