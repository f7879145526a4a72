"""What a session has recorded, on disk after every turn: one JSON line each, so that another process can go on with it.

Flows in: the turns and counters of a `TokenSession`, each written before the agent sees the reply. Flows out: the same, in
order, after a crash. A line that was being written when the process died is dropped: nobody was answered from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, InfrastructureError, InvariantError
from harness.protocols import Message, Reply, ToolCall
from harness.task import Termination

FORMAT = 1
Rendering = Literal["short", "full", "unproven"]
"""How the new messages were rendered: behind the opening alone, behind the whole history, or behind the opening without the
proof that was due, because the template refuses the whole history."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call as it was recorded; everything that a session knows of it."""

    segment: int
    """Index of the conversation; the number of conversations so far opens another."""
    messages: list[Message]
    """What the request added to the one before, the echo of the assistant's turn included."""
    tools: list[dict[str, Any]] | None
    """Of a turn that opens a conversation; None: the tools of the conversation opened before."""
    observed: list[int]
    """Token ids put behind what was there: not sampled."""
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]
    reply: Reply
    end: Termination | None
    """The limit that cut the turn."""
    rendering: Rendering
    confirmed: bool
    """The engine said how it had sampled, and it was what was asked."""
    digest: str
    """`token_digest` of the conversation up to and with this turn."""


@dataclass(frozen=True, slots=True)
class Count:
    """A counter that moved."""

    fact: str
    n: int


def token_bytes(tokens: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(tokens, "<i4").tobytes()


def token_digest(tokens: Sequence[int] | npt.NDArray[np.int32]) -> str:
    """A short name of a token sequence: the first 16 hexadecimal digits of the sha256 of its `token_bytes`."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()[:16]


class Journal:
    """One session's file. `header` says whose it is; a file with another one is refused."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._header = {"format": FORMAT, **header}
        self._size: int | None = None
        """Bytes that are known to be whole lines; None: the file is not ours yet."""

    def append(self, entry: Turn | Count) -> None:
        """Write one line and hand it to the operating system. If that fails, the next call writes over what came of it.

        Raises `InvariantError` if an earlier process left a file that was not read, `ConfigError` for what is not JSON, and
        `InfrastructureError` if it cannot be written.
        """
        data = _line({type(entry).__name__.lower(): _fields(entry)})
        try:
            if self._size is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(exist_ok=False)
                self._size = 0
            if self._size == 0:
                data = _line(self._header) + data
            with self._path.open("ab") as file:
                file.truncate(self._size)
                file.write(data)
        except FileExistsError as error:
            raise InvariantError(f"{self._path} is there already", hint="restore the session, or remove its folder") from error
        except OSError as error:
            raise InfrastructureError(f"{self._path}: cannot write: {error.strerror}") from error
        self._size += len(data)

    def load(self) -> list[Turn | Count]:
        """The entries of an earlier process; none where there is no file. Later ones are appended behind them.

        Cuts off a torn last line. Raises `InvariantError` if anything else is not as it was written.
        """
        try:
            data = self._path.read_bytes()
            self._size = data.rfind(b"\n") + 1
            os.truncate(self._path, self._size)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InfrastructureError(f"{self._path}: cannot read: {error.strerror}") from error
        lines = data[: self._size].split(b"\n")[:-1]
        entries: list[Turn | Count] = []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number > 1:
                    entries.append(_entry(record))
                elif record != self._header:
                    raise ValueError("it is of another episode, seed or sampling contract, or of another version")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise InvariantError(
                    f"{self._path}:{number}: not a line of this session: {error}",
                    hint="remove the episode's folder to play it anew",
                ) from error
        return entries


def _line(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a message or tool is not JSON: {error}", hint="send messages in the OpenAI shape") from error


def _fields(entry: Turn | Count) -> dict[str, Any]:
    record = {field.name: getattr(entry, field.name) for field in fields(entry)}
    if isinstance(entry, Turn):
        record["reply"] = asdict(entry.reply)
    return record


def _entry(record: dict[str, Any]) -> Turn | Count:
    ((kind, values),) = record.items()
    if kind == "count":
        return Count(str(values["fact"]), int(values["n"]))
    if kind != "turn":
        raise ValueError(f"{kind!r} is neither a turn nor a counter")
    reply, end = values["reply"], values["end"]
    if values["rendering"] not in get_args(Rendering):
        raise ValueError(f"{values['rendering']!r} is no rendering")
    calls = tuple(ToolCall(**call) for call in reply["tool_calls"])
    return Turn(
        **values
        | {
            "messages": [dict(message) for message in values["messages"]],
            "logprobs": [float(x) for x in values["logprobs"]],
            "versions": [int(x) for x in values["versions"]],
            "reply": Reply(**reply | {"tool_calls": calls}),
            "end": None if end is None else Termination(end),
        }
    )
