"""`sao verify`: a clean run passes; every way to tamper with one fails exactly the invariant that it breaks, by name."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.chat import Chat
from harness.cli import main
from harness.config import Config
from harness.episode import Episode
from harness.errors import ConfigError
from harness.ledger import Ledger, Slot
from harness.rundir import RunDir
from harness.task import Termination
from harness.trajectory import Trajectory
from harness.verify import Check, lines, verify
from tests.support import USER, PlayedEngine, Raw, session_of


def played(chat: Chat, name: str, task: str, reward: float, version: int, forks: int = 0) -> Episode:
    """Three turns of a real session, the last by newer weights; each fork is a conversation of its own with two more."""
    texts = [f"{name} turn {i}" for i in range(3 + 2 * forks)]
    ids = [[*chat.encode(text), chat.stop_ids[0]] for text in texts]
    turns = [
        Raw(x, logprobs=list(-np.linspace(0.1, 2.0, len(x))), versions=[version + (i == 2)] * len(x)) for i, x in enumerate(ids)
    ]
    engine = PlayedEngine(chat, turns)
    session = session_of(chat, engine, name)

    async def talk(opening: str, count: int) -> None:
        messages: list[dict[str, Any]] = [USER, {"role": "user", "content": opening}]
        for i in range(count):
            reply = await session.complete(messages)
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": f"and then {i}"}]

    async def all_of_it() -> None:
        await talk("start", 3)
        for fork in range(forks):
            await talk(f"again {fork}", 2)

    asyncio.run(all_of_it())
    made = tuple(t.judged(reward, termination="finished") for t in session.trajectories(task, {}))
    assert len(made) == 1 + forks
    return Episode(name, task, Termination.FINISHED, made, reward)


def make_run(folder: Path, chat: Chat) -> Path:
    """A stopped run: two batches of two episodes, one that waits, and every other outcome."""
    config = Config(
        run_dir=str(folder),
        environment={"id": "toy_repair"},
        algorithm={"batch": 2, "loss_norm": "token_global"},
        trainer={"micro_batch_tokens": 300},
    )
    run = RunDir.create(config, "train")
    ledger = Ledger(run.path)
    names = ("a", "b", "c", "d", "waits", "stale", "runs", "lost", "judged", "value", "silent")
    purposes = {"judged": "eval-before", "silent": "eval-before", "value": "value"}
    for draw, name in enumerate(names):
        ledger.dispatch(name, purposes.get(name, "train"), f"task/{name}", Slot(draw, draw), 0)

    def store(name: str, reward: float, version: int, forks: int = 0) -> None:
        episode = played(chat, name, f"task/{name}", reward, version, forks)
        for t in episode.trajectories:
            t.save(ledger.path(name, t.segment))
        ledger.complete(episode, version, "pending")

    store("value", 0.5, 0)
    ledger.retire("value")
    for name, reward in (("a", 1.0), ("b", 0.0), ("stale", 1.0)):
        store(name, reward, 0, forks=name == "b")
    ledger.drop("stale", None, "too stale")
    ledger.consume(1, ["b", "a"], 1)
    ledger.finish_batch(1)
    for name, reward in (("c", 0.25), ("d", 0.75)):
        store(name, reward, 1)
    ledger.consume(2, ["c", "d"], 2)
    store("waits", 1.0, 2)
    ledger.drop("lost", Termination.SANDBOX_LOST, "gone")
    ledger.complete(played(chat, "judged", "task/judged", 1.0, 0), 0, "evaluated")  # its trajectory is not stored
    ledger.complete(Episode("silent", "task/silent", Termination.MAX_CONTEXT, (), 0.0), 0, "evaluated")  # it has none
    ledger.put("checkpoint", {"batches": 1, "version": 2, "path": "checkpoints/x"})
    ledger.close()
    run.close()
    return run.path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, chat: Chat) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), chat)


@pytest.fixture
def run(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "run"))


def failed(checks: list[Check]) -> dict[int, list[str]]:
    return {check.invariant: check.faults for check in checks if check.faults}


def rewrite(path: Path, header: Callable[[dict[str, Any]], Any] | None = None, **columns: Callable[[Any], Any]) -> None:
    """Change a trajectory file as no `Trajectory` would allow."""
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[b"trajectory"])
    arrays = {name: table[name].to_numpy().copy() for name in table.column_names}
    for name, change in columns.items():
        change(arrays[name])
    if header is not None:
        header(meta)
    pq.write_table(pa.table(arrays).replace_schema_metadata({"trajectory": json.dumps(meta)}), path)


def sql(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        assert db.execute(statement).rowcount > 0


def file(run: Path, name: str, segment: int = 0) -> Path:
    return run / "trajectories" / f"{name}.{segment}.parquet"


def actions(run: Path, name: str) -> np.ndarray:
    return np.flatnonzero(Trajectory.load(file(run, name)).loss_mask)


def test_a_clean_run_passes(clean: Path) -> None:
    checks = verify(clean)
    assert failed(checks) == {}
    assert checks[0].proved == "8 trajectories, 23 turns" and not checks[0].unproved
    assert "11 episodes" in checks[5].proved and "2 batches" in checks[5].proved
    assert [check.state for check in checks[:3]] == ["ok"] * 3 and checks[5].state == "ok"
    assert {check.state for check in checks[3:5]} <= {"ok", "not checked"}


def put(where: Any, value: Any) -> Callable[[Any], None]:
    def change(array: Any) -> None:
        assert array[where] != value
        array[where] = value

    return change


def swap(run: Path) -> None:
    a, b, spare = file(run, "a"), file(run, "d"), run / "spare"
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


def cut(path: Path, n: int) -> None:
    path.write_bytes(path.read_bytes()[:n])


TAMPERED: dict[str, tuple[Callable[[Path], Any], int, Sequence[str]]] = {
    "a prompt token": (lambda r: rewrite(file(r, "a"), token=put(2, 999)), 1, ["a.0.parquet", "positions 0 to"]),
    "a sampled token": (
        lambda r: rewrite(file(r, "b", 1), token=put(-1, 1)),
        1,
        ["b.1.parquet", "sampled in turn 1"],
    ),
    "a later prompt's token": (
        lambda r: rewrite(file(r, "a"), token=put(actions(r, "a")[-1] - len(actions(r, "a")), 7)),
        1,
        ["a.0.parquet"],
    ),
    "a call's length": (lambda r: rewrite(file(r, "a"), lambda h: put(0, 3)(h["info"]["calls"][1])), 1, ["sent 3 tokens"]),
    "a call's digest": (lambda r: rewrite(file(r, "a"), lambda h: put(1, "0")(h["info"]["calls"][0])), 1, ["turn 0"]),
    "a call too few": (lambda r: rewrite(file(r, "a"), lambda h: h["info"]["calls"].pop()), 1, ["a.0.parquet", "3 turns"]),
    "calls that are none": (lambda r: rewrite(file(r, "a"), lambda h: put("calls", [1, 2, {}])(h["info"])), 1, ["no record"]),
    "a turn that jumps": (lambda r: rewrite(file(r, "a"), turn=put(-1, 7)), 2, ["a.0.parquet", "count up"]),
    "a first turn of 1": (
        lambda r: rewrite(file(r, "a"), turn=put(actions(r, "a")[0], 1)),
        2,
        ["a.0.parquet", "position", "count up"],
    ),
    "an observation's turn": (lambda r: rewrite(file(r, "a"), turn=put(1, -2)), 2, ["position 1:", "other than -1"]),
    "a turn in two pieces": (
        lambda r: rewrite(
            file(r, "a"),
            turn=put(actions(r, "a")[1], -1),
            rollout_logprob=lambda x: x.__setitem__(actions(r, "a")[1], np.nan),
            policy_version=put(actions(r, "a")[1], -1),
        ),
        2,
        ["a.0.parquet", "goes on behind an observation"],
    ),
    "half a file": (lambda r: cut(file(r, "a"), 700), 2, ["a.0.parquet"]),
    "an empty file": (lambda r: cut(file(r, "a"), 0), 2, ["a.0.parquet"]),
    "another table": (lambda r: pq.write_table(pa.table({"x": [1]}), file(r, "a")), 2, ["a.0.parquet", "not a trajectory"]),
    "a header without fields": (lambda r: rewrite(file(r, "a"), lambda h: h.pop("segment")), 2, ["a.0.parquet", "segment"]),
    "a log-prob lost": (
        lambda r: rewrite(file(r, "a"), rollout_logprob=put(-1, np.nan)),
        3,
        ["a.0.parquet", "no finite log-prob"],
    ),
    "a log-prob above 0": (lambda r: rewrite(file(r, "a"), rollout_logprob=put(-1, 0.5)), 3, ["above 0"]),
    "an observation's log-prob": (lambda r: rewrite(file(r, "a"), rollout_logprob=put(3, -1.0)), 3, ["position 3:"]),
    "an observation's version": (lambda r: rewrite(file(r, "a"), policy_version=put(3, 0)), 3, ["position 3:"]),
    "a version lost": (
        lambda r: rewrite(file(r, "a"), policy_version=put(actions(r, "a")[0], -1)),
        3,
        ["a.0.parquet", "no version"],
    ),
    "a version that falls": (lambda r: rewrite(file(r, "c"), policy_version=put(-1, 1)), 3, ["c.0.parquet", "falls"]),
    "a version of the future": (lambda r: rewrite(file(r, "c"), policy_version=put(-1, 9)), 3, ["c.0.parquet", "1 to 9"]),
    "the ledger's version": (
        lambda r: sql(r, "UPDATE episodes SET min_version = 0 WHERE id = 'c'"),
        3,
        ["c.0.parquet", "in the ledger 0 to 2"],
    ),
    "a batch of older weights": (
        lambda r: sql(r, "UPDATE batches SET version = 1 WHERE number = 2"),
        3,
        ["c.0.parquet", "sampled by version 2, when 1"],
    ),
    "a file's reward": (lambda r: rewrite(file(r, "a"), put("reward", 0.5)), 6, ["a.0.parquet", "reward 0.5"]),
    "the ledger's reward": (lambda r: sql(r, "UPDATE episodes SET reward = 0.5 WHERE id = 'waits'"), 6, ["waits.0.parquet"]),
    "a file gone": (lambda r: file(r, "b", 1).unlink(), 6, ["b.1.parquet", "missing"]),
    "a pending file gone": (lambda r: file(r, "waits").unlink(), 6, ["waits.0.parquet", "missing"]),
    "an orphan": (lambda r: shutil.copy(file(r, "a"), file(r, "nobody")), 6, ["nobody.0.parquet", "no episode"]),
    "a conversation": (lambda r: shutil.copy(file(r, "a"), file(r, "conversation-1")), 6, ["conversation-1.0.parquet"]),
    "a segment too many": (lambda r: shutil.copy(file(r, "a"), file(r, "a", 1)), 6, ["a.1.parquet", "1 segments"]),
    "two files swapped": (swap, 6, ["a.0.parquet: holds segment 0 of episode d", "d.0.parquet: holds"]),
    "another task": (
        lambda r: sql(r, "UPDATE episodes SET task_id = 'x' WHERE id = 'a'"),
        6,
        ["a.0.parquet", "in the ledger x"],
    ),
    "tokens": (lambda r: sql(r, "UPDATE episodes SET tokens = tokens + 1 WHERE id = 'a'"), 6, ["a.0.parquet"]),
    "action tokens": (lambda r: sql(r, "UPDATE episodes SET action_tokens = 1 WHERE id = 'a'"), 6, ["a.0.parquet"]),
    "turns": (lambda r: sql(r, "UPDATE episodes SET turns = 9 WHERE id = 'b'"), 6, ["b.0.parquet", "5 turns"]),
    "no segment": (lambda r: sql(r, "UPDATE episodes SET segments = 0 WHERE id = 'a'"), 6, ["a.0.parquet", "episode a"]),
    "an outcome that is none": (lambda r: sql(r, "UPDATE episodes SET status = 'x' WHERE id = 'runs'"), 6, ["runs", "'x'"]),
    "a drop without a reason": (lambda r: sql(r, "UPDATE episodes SET reason = NULL WHERE id = 'lost'"), 6, ["lost"]),
    "an episode in the other batch": (lambda r: sql(r, "UPDATE episodes SET batch = 2 WHERE id = 'a'"), 6, ["batch 1 has 1"]),
    "a batch nobody made": (lambda r: sql(r, "UPDATE episodes SET batch = 7 WHERE id = 'c'"), 6, ["episode c", "batch 7"]),
    "a batch twice": (lambda r: sql(r, "INSERT INTO batches VALUES (3, 2, 0)"), 6, ["batch 3 has 0", "batch 2 was not"]),
    "a batch lost": (lambda r: sql(r, "DELETE FROM batches WHERE number = 1"), 6, ["batch 1 is missing"]),
    "a pending one in a batch": (lambda r: sql(r, "UPDATE episodes SET batch = 1 WHERE id = 'waits'"), 6, ["waits"]),
    "a slot played twice": (lambda r: sql(r, "UPDATE episodes SET draw = 0 WHERE id = 'b'"), 6, ["member 0 of draw 0"]),
    "a checkpoint ahead": (
        lambda r: sql(r, """UPDATE facts SET value = '{"batches": 5, "version": 2}' WHERE key = 'checkpoint'"""),
        6,
        ["covers 5"],
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_fails_its_invariant_alone(run: Path, what: str) -> None:
    tamper, invariant, words = TAMPERED[what]
    tamper(run)
    faults = failed(verify(run))
    assert list(faults) == [invariant]
    for word in words:
        assert word in "\n".join(faults[invariant])


def test_the_digests_are_of_what_the_engine_was_sent(chat: Chat) -> None:
    """Written out here, so that writer and reader cannot agree on a mistake."""
    made = played(chat, "x", "t", 1.0, 0).trajectories[0]
    for k, (n, prompt, whole) in enumerate(made.info["calls"]):
        tokens = made.tokens.tolist()
        stop = 1 + max(np.flatnonzero(made.turn_ids == k))
        for count, digest in ((n, prompt), (stop, whole)):
            raw = b"".join(int(token).to_bytes(4, "little", signed=True) for token in tokens[:count])
            assert hashlib.sha256(raw).hexdigest()[:16] == digest


def test_older_files_are_not_provable_and_no_failure(run: Path) -> None:
    for path in (run / "trajectories").iterdir():
        rewrite(path, lambda header: header["info"].pop("calls"))
    checks = verify(run)
    assert failed(checks) == {}
    assert (checks[0].state, checks[0].unproved[:2]) == ("not checked", "8 ")
    assert list(lines(checks))[-1].startswith("ok; not checked: 1")


def test_an_evaluation_has_the_files_of_what_it_played(run: Path) -> None:
    sql(run, "INSERT INTO facts VALUES ('records', 'true')")
    assert failed(verify(run)) == {6: ["judged.0.parquet: the file is missing"]}, "`silent` has said nothing"


def test_given_conversations_have_no_episode(run: Path) -> None:
    t = Trajectory.load(file(run, "a"))
    replace(t, episode_id="conversation-1", task_id="conversation-1", reward=None).save(file(run, "conversation-1"))
    with (run / "config.toml").open("a") as config:
        config.write('\n[sft]\nconversations = "given.jsonl"\n')
    assert failed(verify(run)) == {}


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_nothing_is_written(run: Path) -> None:
    before = contents(run)
    verify(run)
    assert contents(run) == before


def test_a_run_that_is_written_meanwhile(run: Path) -> None:
    """The writer holds the ledger and the lock; what is only in the write-ahead log is read, half a file is ignored."""
    ledger = Ledger(run)
    held = (run / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    ledger.dispatch("new", "train", "task/new", Slot(50, 1), 2)
    (run / "trajectories" / "new.0.part").write_bytes(b"half")
    replace(Trajectory.load(file(run, "waits")), episode_id="new", task_id="task/new").save(file(run, "new"))
    before = contents(run)
    checks = verify(run)
    assert failed(checks) == {} and "12 episodes" in checks[5].proved
    assert contents(run).keys() == before.keys()
    held.close()
    ledger.close()


def test_a_killed_run_that_was_copied_without_its_shared_memory(run: Path, tmp_path: Path) -> None:
    ledger = Ledger(run)
    ledger.drop("runs", Termination.ABORTED, "only in the log")
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    ledger.close()
    (copy / "ledger.sqlite-shm").unlink()
    before = contents(copy)
    checks = verify(copy)
    assert failed(checks) == {} and "running" not in checks[5].proved
    assert contents(copy) == before


@settings(max_examples=150, database=None)
@given(data=st.data())
def test_a_damaged_file_is_a_fault_and_no_traceback(clean: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    from harness.verify import read

    raw = bytearray(file(clean, "b").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    trajectory, faults = read(path)
    assert (trajectory is None) == bool(faults)


def test_without_torch_the_files_are_checked_all_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "torch" or name.split(".")[0] == "trainer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = verify(run)
    assert failed(checks) == {}
    assert [check.unproved for check in checks[3:5]] == ["needs torch and transformers"] * 2
    assert list(lines(checks))[-1] == "ok; not checked: 4, 5"


def proving(monkeypatch: pytest.MonkeyPatch, prove: Callable[..., Any]) -> list[tuple[list[str], bool]]:
    """What the trainer is asked to prove: (trajectories, whether also the estimator)."""
    asked: list[tuple[list[str], bool]] = []

    def called(trajectories: list[Trajectory], config: Config, *, estimator: bool) -> Any:
        asked.append(([f"{t.episode_id}.{t.segment}" for t in trajectories], estimator))
        return prove()

    monkeypatch.setattr("harness.verify.load_object", lambda path: called)
    return asked


def fine() -> dict[int, Any]:
    return {4: ("all", "", []), 5: ("", "not this", ["a fault"])}


def test_the_sample_is_of_whole_episodes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = proving(monkeypatch, fine)
    assert failed(verify(run)) == {5: ["a fault"]}
    assert asked == [(["a.0", "b.0", "b.1", "c.0", "d.0", "waits.0"], True)]
    monkeypatch.setattr("harness.verify.SAMPLE", 2)
    verify(run)
    monkeypatch.setattr("harness.verify.SAMPLE_TOKENS", 1)
    verify(run)
    assert asked[1:] == [(["a.0"], True)] * 2
    rewrite(file(run, "a"), turn=put(1, -2))
    verify(run)
    assert asked[3:] == [(["b.0", "b.1"], True)], "what cannot be read cannot be a sample"


def test_the_sample_of_a_group_arm_is_of_whole_groups(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = proving(monkeypatch, fine)
    config = run / "config.toml"
    text = config.read_text().replace("group = 1", "group = 2")
    config.write_text(text.replace('id = "skip_observation"', 'id = "grpo"'))
    verify(run)
    assert asked == [(["a.0", "b.0", "b.1", "c.0", "d.0", "waits.0"], False)]
    sql(run, "UPDATE episodes SET draw = 2, member = 1 WHERE id = 'd'")
    verify(run)
    assert asked[1:] == [(["c.0", "d.0"], True)]


def test_an_objective_that_fails_is_a_fault_and_one_that_cannot_be_built_is_not_checked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise ZeroDivisionError("by nothing")

    proving(monkeypatch, fails)
    assert list(failed(verify(run))) == [4, 5]

    def refuses() -> Any:
        raise ConfigError("no compiler")

    proving(monkeypatch, refuses)
    checks = verify(run)
    assert failed(checks) == {} and [check.unproved for check in checks[3:5]] == ["no compiler"] * 2


@pytest.mark.parametrize("what", ["no ledger", "no ledger table", "noise", "no config", "bad config", "text for a number"])
def test_no_run_folder_is_one_clear_error(run: Path, what: str) -> None:
    ledger = run / "ledger.sqlite"
    if what == "no ledger":
        ledger.unlink()
    elif what == "no ledger table":
        sql(run, "UPDATE facts SET value = '[]' WHERE key = 'checkpoint'")
    elif what == "noise":
        ledger.write_bytes(b"noise" * 1000)
    elif what == "no config":
        (run / "config.toml").unlink()
    elif what == "bad config":
        (run / "config.toml").write_text("steps = 'many'\n")
    else:
        sql(run, "UPDATE episodes SET draw = 'x' WHERE id = 'a'")
    with pytest.raises(ConfigError):
        verify(run)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["sao", "verify", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def test_the_command(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, str(run)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 tokens never re-made") and said[0].endswith("  ok")
    assert len(said) == 7 and said[-1].startswith("ok")
    for path in (run / "trajectories").iterdir():
        for segment in range(2, 6):
            shutil.copy(path, f"{path}.{segment}.parquet")
    assert command(monkeypatch, str(run)) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("FAILED: 6") and sum(line.startswith("    ") for line in said) == 21
    assert "    and 12 more" in said
    assert command(monkeypatch, "--json", str(run)) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and len(answer["checks"][5]["faults"]) == 32
    assert [check["invariant"] for check in answer["checks"]] == [1, 2, 3, 4, 5, 6]
    assert command(monkeypatch, str(run / "nothing")) == 2
