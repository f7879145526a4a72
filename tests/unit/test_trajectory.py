"""Trajectories: spans tile, the mask is derived, and every way to break an invariant is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import InvariantError
from harness.trajectory import Span, Trajectory, TrajectoryBuilder
from tests.support import trajectory

NAN = math.nan


def fields(**changes: Any) -> dict[str, Any]:
    """Two observation tokens, an action of two, an observation, an action of one; with `changes`."""
    base: dict[str, Any] = {
        "episode_id": "e",
        "task_id": "t",
        "tokens": np.arange(6, dtype=np.int32),
        "turn_ids": np.array([-1, -1, 0, 0, -1, 1], np.int32),
        "rollout_logprobs": np.array([NAN, NAN, -0.1, -0.7, NAN, -0.2], np.float32),
        "policy_versions": np.array([-1, -1, 4, 5, -1, 5], np.int32),
    }
    return base | changes


def test_the_example_of_the_docstring() -> None:
    t = Trajectory(**fields(reward=1.0))
    assert t.spans == (
        Span("observation", 0, 2),
        Span("action", 2, 4, 0),
        Span("observation", 4, 5),
        Span("action", 5, 6, 1),
    )
    assert t.loss_mask.tolist() == [False, False, True, True, False, True]
    assert (len(t), t.n_actions, t.n_turns) == (6, 3, 2)
    assert t.token_rewards().tolist() == [0, 0, 0, 0, 0, 1]


def changed(name: str, index: int, value: float) -> dict[str, Any]:
    array = fields()[name].copy()
    array[index] = value
    return fields(**{name: array})


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (changed("rollout_logprobs", 2, NAN), "no finite rollout_logprob"),
        (changed("rollout_logprobs", 2, -math.inf), "no finite rollout_logprob"),
        (changed("rollout_logprobs", 3, 0.5), "above 0"),
        (changed("rollout_logprobs", 0, 0.0), "observation token has a log-prob"),
        (changed("rollout_logprobs", 4, -1.0), "observation token has a log-prob"),
        (changed("policy_versions", 5, -1), "no policy_version"),
        (changed("policy_versions", 4, 0), "observation token has a log-prob or a version"),
        (changed("turn_ids", 5, 2), "do not count up"),
        (changed("turn_ids", 0, -2), "turn other than -1"),
        (fields(turn_ids=np.array([-1, -1, 1, 1, -1, 2], np.int32)), "do not count up"),
        (fields(turn_ids=np.array([-1, -1, 1, 1, -1, 0], np.int32)), "do not count up"),
        (fields(tokens=np.arange(5, dtype=np.int32)), "shape"),
        (fields(policy_versions=np.zeros((6, 1), np.int32)), "shape"),
        (fields(turn_rewards={2: 1.0}), "turn 2"),
        (fields(turn_rewards={-1: 1.0}), "turn -1"),
        (fields(reward=NAN), "reward"),
        (fields(reward=math.inf), "reward"),
        (fields(turn_rewards={0: NAN}), "reward"),
    ],
)
def test_broken_ones_are_refused(broken: dict[str, Any], says: str) -> None:
    with pytest.raises(InvariantError, match=says):
        Trajectory(**broken)


def test_a_logprob_a_rounding_error_above_zero_is_not_a_bug() -> None:
    Trajectory(**changed("rollout_logprobs", 2, 1e-6))


def test_terminal_reward_is_on_the_last_action_token_not_on_a_trailing_observation() -> None:
    assert trajectory("oaaoaaoo", reward=0.5).token_rewards().tolist() == [0, 0, 0, 0, 0, 0.5, 0, 0]


def test_turn_rewards_sit_on_the_last_token_of_their_turn_and_add_to_the_terminal_one() -> None:
    judged = trajectory("oaaoaao").judged(1.0, {0: 0.25, 1: -0.5})
    assert judged.token_rewards().tolist() == [0, 0, 0.25, 0, 0, 0.5, 0]


def test_turns_that_touch_stay_two_spans() -> None:
    t = trajectory("oaa|aa", reward=1.0).judged(1.0, {0: 2.0})
    assert [(s.start, s.stop, s.turn) for s in t.spans] == [(0, 1, -1), (1, 3, 0), (3, 5, 1)]
    assert t.token_rewards().tolist() == [0, 0, 2, 0, 1]


@pytest.mark.parametrize("t", [trajectory("oa"), trajectory("ooo", reward=1.0)])
def test_unjudged_or_without_action_has_no_token_rewards(t: Trajectory) -> None:
    with pytest.raises(InvariantError, match="cannot be trained"):
        t.token_rewards()


def test_empty() -> None:
    t = trajectory("")
    assert (t.spans, t.n_actions, t.n_turns, len(t)) == ((), 0, 0, 0)


def test_judged_keeps_the_tokens_and_adds_facts() -> None:
    t = trajectory("oa", info={"a": 1, "b": 1})
    judged = t.judged(0.0, b=2)
    assert judged.info == {"a": 1, "b": 2}
    assert judged.reward == 0.0
    assert judged.tokens is t.tokens
    assert (t.reward, t.info) == (None, {"a": 1, "b": 1})


def test_builder_refuses_lists_that_do_not_match() -> None:
    with pytest.raises(InvariantError, match="2 sampled tokens, 1 log-probs, 2 versions"):
        TrajectoryBuilder().act([1, 2], [-0.1], [0, 0])


def test_builder_does_not_count_an_empty_turn() -> None:
    builder = TrajectoryBuilder()
    builder.observe([1])
    builder.act([], [], [])
    builder.act([2], [-0.1], [0])
    assert builder.n_turns == 1
    assert builder.build("e", "t").turn_ids.tolist() == [-1, 0]


def test_builder_owns_its_record() -> None:
    builder, given = TrajectoryBuilder(), [1, 2]
    builder.observe(given)
    given.append(3)
    built = builder.build("e", "t")
    builder.observe([9])
    assert built.tokens.tolist() == [1, 2]


def test_save_leaves_only_the_whole_file(tmp_path: Path) -> None:
    trajectory("oa").save(tmp_path / "x-1.0.parquet")
    trajectory("oa", segment=1).save(tmp_path / "x-1.1.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-1.0.parquet", "x-1.1.parquet"]


def test_load_refuses_what_is_not_a_trajectory(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"token": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InvariantError, match="not a trajectory"):
        Trajectory.load(tmp_path / "other.parquet")


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_load_refuses_a_torn_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.parquet"
    trajectory("oaoa").save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvariantError, match="not a trajectory"):
        Trajectory.load(path)


def test_load_refuses_another_format(tmp_path: Path) -> None:
    """The header carries a format number; a reader that ignores it would misread a later one."""
    import json

    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    trajectory("oa").save(path)
    table = pq.read_table(path, partitioning=None)
    header = json.loads(table.schema.metadata[b"trajectory"]) | {"format": 999}
    pq.write_table(table.replace_schema_metadata({"trajectory": json.dumps(header)}), path)
    with pytest.raises(InvariantError, match="format"):
        Trajectory.load(path)
