"""A session on disk: written before it is answered, taken up by another process, torn and foreign files."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.chat import Chat
from harness.errors import ConfigError, EpisodeEnd, InfrastructureError, InvariantError
from harness.journal import token_digest
from harness.protocols import GenerateRequest, Message, Reply, SamplingContract
from harness.session import TokenSession
from harness.task import Termination
from tests.support import USER, PlayedEngine, Raw, session_of, tool_call

ROOT = Path(__file__).parents[2]
TOOLS = [{"type": "function", "function": {"name": "edit", "description": "", "parameters": {}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(session: TokenSession, *messages: Message, tools: Any = ()) -> Reply:
    return asyncio.run(session.complete(messages, tools))


def whole(session: TokenSession) -> list[Any]:
    """Every byte of the record."""
    arrays = ("tokens", "turn_ids", "rollout_logprobs", "policy_versions")
    return [([getattr(t, a).tobytes() for a in arrays], t.info) for t in session.trajectories("t", {})]


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]


def restored(chat: Chat, engine: PlayedEngine, folder: Path, **more: Any) -> TokenSession:
    session = session_of(chat, engine, folder=folder, **more)
    session.restore()
    return session


def test_a_digest_is_that_of_the_little_endian_bytes() -> None:
    assert token_digest([1, 258]) == "fb8bbe2ad3ab5292"
    assert token_digest(np.array([1, 258], np.int32)) == token_digest((1, 258)) == token_digest(np.array([1, 258], ">i4"))
    assert token_digest([]) == "e3b0c44298fc1c14"
    with pytest.raises(OverflowError):
        token_digest([2**31])


def test_a_restored_session_answers_and_goes_on_as_if_nothing_had_happened(chat: Chat, tmp_path: Path) -> None:
    """Two conversations, calls, thoughts, half surrogates, odd floats, counters."""
    first = Raw([5, 6, chat.stop_ids[0]], logprobs=[-1 / 3, -1e-30, -0.0], versions=[1, 1, 2])
    script = [first, "<think>hm</think>" + tool_call("edit", '{"a": "é"}') * 2, "two", "three", "four"]

    def play(folder: Path | None, die: bool) -> tuple[list[Any], list[GenerateRequest]]:
        engine = PlayedEngine(chat, list(script))
        session = session_of(chat, engine, folder=folder, seed=3)

        def again() -> None:
            nonlocal session
            if die and folder is not None:
                session = restored(chat, engine, folder, seed=3)

        again()
        session.count("nudges", 2)
        main = [user("cut \ud83d"), ask(session, user("cut \ud83d"), tools=TOOLS).message(), user("naïve\u2028")]
        again()
        called = ask(session, *main, tools=TOOLS)
        again()
        assert ask(session, *main, tools=TOOLS) == called
        ask(session, user("sub"))
        again()
        assert session.turns == 3
        echo = {"role": "assistant", "tool_calls": [{"id": c.id} for c in called.tool_calls]}
        ask(session, *main, echo, user("x"), tools=TOOLS)
        again()
        ask(session, user("sub"), {"role": "assistant", "content": "two"}, user("y"))
        session.count("nudges")
        again()
        return whole(session), engine.requests

    plain = play(None, die=False)
    assert play(tmp_path / "living", die=False) == plain
    assert play(tmp_path / "dying", die=True) == plain
    assert plain[0][0][1]["facts"] == {"nudges": 3, "forks": 1}
    assert (tmp_path / "living" / "session.jsonl").read_bytes() == (tmp_path / "dying" / "session.jsonl").read_bytes()


def test_a_line_is_there_before_the_reply(chat: Chat, tmp_path: Path) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]), folder=tmp_path / "new" / "folder")
    assert session.folder == tmp_path / "new" / "folder"
    reply = ask(session, USER, tools=TOOLS)
    ask(session, USER, reply.message(), user("x"), tools=TOOLS)
    header, first, second = lines(tmp_path / "new" / "folder")
    assert header == {
        "format": 1,
        "episode": "e",
        "seed": None,
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        },
    }
    assert (first["turn"]["messages"], first["turn"]["tools"]) == ([USER], TOOLS)
    assert (second["turn"]["messages"], second["turn"]["tools"]) == ([reply.message(), user("x")], None)
    assert second["turn"]["sampled"] == [*chat.encode("two"), chat.stop_ids[0]]


def test_the_file_grows_by_what_is_new(chat: Chat, tmp_path: Path) -> None:
    session = session_of(chat, PlayedEngine(chat, ["said"] * 40), folder=tmp_path)
    messages, sizes = [USER], []
    for _ in range(40):
        messages += [ask(session, *messages, tools=TOOLS).message(), user("more")]
        sizes.append((tmp_path / "session.jsonl").stat().st_size)
    growth = np.diff(sizes)
    assert growth.max() - growth.min() < 20, "each line is as long as the others"


def test_a_cut_turn_is_still_cut_after_a_restart(chat: Chat, tmp_path: Path) -> None:
    first = session_of(chat, PlayedEngine(chat, [Raw([5], "length")]), folder=tmp_path, max_tokens_per_turn=1)
    later: TokenSession | None = None
    for _ in range(2):
        with pytest.raises(EpisodeEnd) as end:
            ask(later or first, USER)
        assert end.value.termination == Termination.MAX_TOKENS_PER_TURN
        later = restored(chat, PlayedEngine(chat, []), tmp_path, max_tokens_per_turn=1)
        assert later.ended == Termination.MAX_TOKENS_PER_TURN
        assert later.trajectories("t", {})[0].n_actions == 1


def test_wherever_the_process_died_the_session_goes_on(chat: Chat, tmp_path: Path) -> None:
    """The file is cut at every byte of its last line and some of the others: no turn is lost that was answered."""
    engine = PlayedEngine(chat, ["one", "two"])
    session = session_of(chat, engine, folder=tmp_path)
    reply = ask(session, USER)
    after_one = whole(session)
    more = (USER, reply.message(), user("x"))
    ask(session, *more)
    after_two, path = whole(session), tmp_path / "session.jsonl"
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) == 3 and ends[-1] == len(data)
    for size in [0, 1, ends[0] - 1, ends[0], ends[0] + 1, *range(ends[1] - 2, len(data))]:
        path.write_bytes(data[:size])
        later = restored(chat, PlayedEngine(chat, ["one", "two"][size >= ends[1] :]), tmp_path)
        assert path.read_bytes() == data[: max([0, *(e for e in ends if e <= size)])]
        assert whole(later) == (after_one if size >= ends[1] else [])
        if size < ends[1]:
            ask(later, USER)
        ask(later, *more)
        assert whole(later) == after_two
        assert path.read_bytes() == data


def test_nothing_there_is_a_fresh_session(chat: Chat, tmp_path: Path) -> None:
    session = restored(chat, PlayedEngine(chat, ["one"]), tmp_path / "not there")
    assert (session.turns, session.ended) == (0, None)
    assert ask(session, USER).content == "one"


def damaged(what: str, record: list[Any]) -> list[Any]:
    """The lines of a file in which something is wrong."""
    header, first, second = record
    turn = second["turn"]
    match what:
        case "no json":
            return [header, "nonsense", second]
        case "no object":
            return [header, [1], second]
        case "empty line":
            return [header, "", second]
        case "unknown entry":
            return [header, first, {"other": {}}]
        case "no header":
            return [first, second]
        case "another format":
            return [header | {"format": 2}, first, second]
        case "a turn is missing":
            return [header, second]
        case "order":
            return [header, second, first]
        case "a turn twice":
            return [header, first, second, second]
        case "a count without a name":
            return [header, first, {"count": {"n": 1}}]
        case "reply":
            return [header, first, {"turn": turn | {"reply": {"content": "x"}}}]
    key, _, value = what.partition("=")
    return [header, first, {"turn": turn | {key: json.loads(value)}}]


@pytest.mark.parametrize(
    "what",
    [
        "no json",
        "no object",
        "empty line",
        "unknown entry",
        "no header",
        "another format",
        "a turn is missing",
        "order",
        "a turn twice",
        "a count without a name",
        "reply",
        "segment=7",
        'segment="x"',
        "segment=-1",
        "observed=[1]",
        'observed=["x"]',
        "observed=[4294967296]",
        "observed=null",
        "sampled=[1, 2]",
        "logprobs=[-0.5]",
        'logprobs=["x", "y"]',
        'versions=["x", "y"]',
        'end="tired"',
        'rendering="odd"',
        "messages=[3]",
        "unknown=1",
    ],
)
def test_what_was_not_written_so_is_one_clear_error(chat: Chat, tmp_path: Path, what: str) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]), folder=tmp_path)
    reply = ask(session, USER)
    ask(session, USER, reply.message(), user("x"))
    text = "".join(x + "\n" if isinstance(x, str) else json.dumps(x) + "\n" for x in damaged(what, lines(tmp_path)))
    (tmp_path / "session.jsonl").write_text(text)
    with pytest.raises(InvariantError) as caught:
        restored(chat, PlayedEngine(chat, []), tmp_path)
    assert str(tmp_path) in caught.value.message
    assert (tmp_path / "session.jsonl").read_text() == text, "it is left for the user to look at"


@pytest.mark.parametrize("change", [{"episode_id": "f"}, {"seed": 2}, {"sampling": SamplingContract(temperature=0.7)}])
def test_the_file_of_another_session_is_refused(chat: Chat, tmp_path: Path, change: dict[str, Any]) -> None:
    ask(session_of(chat, PlayedEngine(chat, ["one"]), folder=tmp_path, seed=1), USER)
    with pytest.raises(InvariantError, match="another episode, seed or sampling contract"):
        restored(chat, PlayedEngine(chat, []), tmp_path, **({"seed": 1} | change))


def test_an_earlier_file_is_never_written_over(chat: Chat, tmp_path: Path) -> None:
    ask(session_of(chat, PlayedEngine(chat, ["one"]), folder=tmp_path), USER)
    before = (tmp_path / "session.jsonl").read_bytes()
    fresh = session_of(chat, PlayedEngine(chat, ["two"]), folder=tmp_path)
    with pytest.raises(InvariantError, match="is there already"):
        ask(fresh, USER)
    assert (tmp_path / "session.jsonl").read_bytes() == before
    assert fresh.trajectories("t", {}) == ()


def test_only_a_fresh_session_with_a_folder_is_restored(chat: Chat, tmp_path: Path) -> None:
    used = session_of(chat, PlayedEngine(chat, ["one"]), folder=tmp_path)
    ask(used, USER)
    for session in (used, session_of(chat, PlayedEngine(chat, []))):
        with pytest.raises(InvariantError, match="only a fresh session"):
            session.restore()
    assert used.turns == 1


def test_a_message_that_is_no_json_is_refused(chat: Chat, tmp_path: Path) -> None:
    session = session_of(chat, PlayedEngine(chat, ["one", "two"]), folder=tmp_path)
    with pytest.raises(ConfigError, match="not JSON"):
        ask(session, {"role": "user", "content": "x", "extra": object()})
    assert session.turns == 0
    assert ask(session, USER).content == "two"


def test_a_disk_that_fails_is_nobodys_fault_and_the_turn_can_be_asked_again(chat: Chat, tmp_path: Path) -> None:
    folder = tmp_path / "episode"
    session = session_of(chat, PlayedEngine(chat, ["one", "lost", "two"]), folder=folder)
    reply = ask(session, USER)
    path = folder / "session.jsonl"
    data = path.read_bytes()
    path.unlink()
    path.mkdir()  # whatever is written fails
    with pytest.raises(InfrastructureError, match="cannot write") as caught:
        ask(session, USER, reply.message(), user("x"))
    assert not isinstance(caught.value, InvariantError)
    assert session.turns == 1
    path.rmdir()
    path.write_bytes(data + b'{"turn":{"seg')  # what a full disk leaves of a line
    assert ask(session, USER, reply.message(), user("x")).content == "two"
    assert whole(restored(chat, PlayedEngine(chat, []), folder)) == whole(session)


DYING = """
import asyncio, os, sys
from pathlib import Path
from harness.chat import Chat
from tests.support import USER, PlayedEngine, session_of

class Dying(PlayedEngine):
    async def generate(self, request):
        return await super().generate(request) if self.turns else os._exit(7)

async def play():
    chat = Chat(Path(sys.argv[1]), ["<|im_end|>"])
    session, messages = session_of(chat, Dying(chat, ["one", "two"]), folder=Path(sys.argv[2])), [USER]
    while True:
        messages += [(await session.complete(messages)).message(), {"role": "user", "content": "x"}]

asyncio.run(play())
"""


def test_a_process_that_dies_in_a_call_leaves_every_answered_turn(chat: Chat, model_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DYING, str(model_folder), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 7
    session = restored(chat, PlayedEngine(chat, ["three"]), tmp_path)
    assert session.turns == 2
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    assert ask(session, USER, said[0], user("x")).content == "two"
    ask(session, USER, said[0], user("x"), said[1], user("x"))
    assert [t.n_turns for t in session.trajectories("t", {})] == [3]
