"""Given conversations as trajectories, for supervised fine-tuning: loss on what the assistant said, on nothing else.

Flows in: a JSON-lines file, one `{"messages": [...], "tools": [...]}` per line in the chat format of the model's template.
Flows out: trajectory files. The prefix is rendered as an agent's is (`harness.session`): the opening once, then only what is
new after each assistant turn, so that the tokens are those that the policy will see in RL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.chat import Chat
from harness.errors import ConfigError
from harness.trajectory import Trajectory, TrajectoryBuilder


class Conversation(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(extra="forbid")
    messages: Annotated[list[dict[str, Any]], Field(min_length=2)]
    tools: list[dict[str, Any]] = []


def conversations(file: Path, chat: Chat, folder: Path) -> list[Path]:
    """Write one trajectory per line into `folder`. Raises `ConfigError` naming the line that is not a conversation."""
    try:
        lines = file.read_text().split("\n")  # splitlines() would also cut at U+2028, which JSON allows inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`sft.conversations`: cannot read {file}: {error}", hint="give a JSON-lines file") from error
    paths = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            trajectory = tokenise(Conversation(**json.loads(line)), chat, f"conversation-{number}")
        except (ValueError, TypeError, ValidationError, ConfigError) as error:
            raise ConfigError(
                f"`sft.conversations`: {file}:{number}: {_first_line(error)}",
                hint='a line is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}',
            ) from error
        paths.append(folder / f"{trajectory.episode_id}.0.parquet")
        trajectory.save(paths[-1])
    if not paths:
        raise ConfigError(f"`sft.conversations`: {file} has no conversation", hint="give a JSON-lines file")
    return paths


def tokenise(conversation: Conversation, chat: Chat, name: str) -> Trajectory:
    """Assistant turns, each with its stop token, are actions (log-prob 0, version 0); everything else is observation.

    Raises `ValueError` if no assistant turn follows another role, or if two assistant turns are neighbours.
    """
    messages, tools = conversation.messages, conversation.tools
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        raise ValueError("the conversation needs an assistant turn after the opening")
    if any(b - a == 1 for a, b in zip(turns, turns[1:], strict=False)):
        raise ValueError("two assistant turns follow each other")
    builder = TrajectoryBuilder()
    builder.observe(chat.opening(messages[: turns[0]], tools))
    for turn, after in zip(turns, [*turns[1:], len(messages)], strict=True):
        said = chat.answer(messages[:turn], messages[turn], tools)
        builder.act(said, [0.0] * len(said), [0] * len(said))
        if turn + 1 < after:
            builder.observe(chat.continuation(messages[:turn], messages[turn + 1 : after], tools))
    return builder.build(name, name, info={"source": "conversations"})


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"`{'.'.join(str(part) for part in first['loc'])}`: {first['msg']}"
    return str(error.message if isinstance(error, ConfigError) else error).splitlines()[0]
