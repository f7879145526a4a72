"""Invariants 2 and 3 over random trajectories: spans tile, the mask is their union, a saved file is the same trajectory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import InvariantError
from harness.trajectory import Trajectory, TrajectoryBuilder

TOKEN = st.integers(0, 2**31 - 1)
LOGPROB = st.floats(-1e4, 0, width=32)
VERSION = st.integers(0, 2**31 - 1)
RUN = st.one_of(
    st.tuples(st.just("o"), st.lists(TOKEN, max_size=5)),
    st.tuples(st.just("a"), st.lists(st.tuples(TOKEN, LOGPROB, VERSION), max_size=5)),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def built(draw: Any) -> tuple[Trajectory, list[Any]]:
    """A trajectory and the runs it was built from."""
    builder, runs = TrajectoryBuilder(), draw(st.lists(RUN, max_size=8))
    for kind, items in runs:
        if kind == "o":
            builder.observe(list(items))
        else:
            builder.act([i[0] for i in items], [i[1] for i in items], [i[2] for i in items])
    reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32))
    turns = draw(st.dictionaries(st.integers(0, builder.n_turns - 1), st.floats(-9, 9, width=32))) if builder.n_turns else {}
    fields = {
        "reward": reward,
        "turn_rewards": turns,
        "segment": draw(st.integers(0, 5)),
        "info": draw(st.dictionaries(st.text(), JSON, max_size=3)),
    }
    return builder.build(draw(st.text()), draw(st.text()), **fields), runs


@given(built())
def test_spans_tile_and_the_mask_is_their_union(pair: tuple[Trajectory, list[Any]]) -> None:
    t, runs = pair
    covered = [i for span in t.spans for i in range(span.start, span.stop)]
    assert covered == list(range(len(t)))
    mask = np.zeros(len(t), bool)
    for span in t.spans:
        assert span.start < span.stop
        mask[span.start : span.stop] = span.kind == "action"
        assert (span.turn >= 0) == (span.kind == "action")
    assert (mask == t.loss_mask).all()
    assert all(a.turn != b.turn for a, b in zip(t.spans, t.spans[1:], strict=False)), "spans are maximal"
    assert [s.turn for s in t.spans if s.kind == "action"] == list(range(t.n_turns))
    flat = [("o", i, None, None) if kind == "o" else ("a", *i) for kind, items in runs for i in items]
    assert [("a" if m else "o", int(x)) for m, x in zip(t.loss_mask, t.tokens, strict=True)] == [f[:2] for f in flat]
    assert t.rollout_logprobs[t.loss_mask].tolist() == [f[2] for f in flat if f[0] == "a"]
    assert t.policy_versions[t.loss_mask].tolist() == [f[3] for f in flat if f[0] == "a"]


@given(built())
@settings(max_examples=60)
def test_a_saved_trajectory_is_the_same(pair: tuple[Trajectory, list[Any]]) -> None:
    t, _ = pair
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a=b.0.parquet"
        t.save(path)
        back = Trajectory.load(path)
    for name in ("tokens", "turn_ids", "rollout_logprobs", "policy_versions"):
        a, b = getattr(t, name), getattr(back, name)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), name
    for name in ("episode_id", "task_id", "reward", "turn_rewards", "segment", "info"):
        assert getattr(t, name) == getattr(back, name), name


@given(built(), st.data())
def test_one_wrong_cell_is_always_noticed(pair: tuple[Trajectory, list[Any]], data: st.DataObject) -> None:
    """Moving the border of the mask without moving log-probs and versions breaks an invariant."""
    t, _ = pair
    if not len(t):
        return
    i = data.draw(st.integers(0, len(t) - 1))
    turn_ids = t.turn_ids.copy()
    turn_ids[i] = -1 if turn_ids[i] >= 0 else t.n_turns
    with pytest.raises(InvariantError):
        Trajectory(t.episode_id, t.task_id, t.tokens, turn_ids, t.rollout_logprobs, t.policy_versions)


@given(built())
def test_rewards_are_on_action_tokens_only_and_sum_up(pair: tuple[Trajectory, list[Any]]) -> None:
    t, _ = pair
    if t.reward is None or not t.n_actions:
        with pytest.raises(InvariantError):
            t.token_rewards()
        return
    rewards = t.token_rewards()
    assert not rewards[~t.loss_mask].any()
    expected = np.zeros(len(t))
    expected[t.spans[-1 if t.spans[-1].kind == "action" else -2].stop - 1] += t.reward
    for span in t.spans:
        if span.turn in t.turn_rewards:
            expected[span.stop - 1] += t.turn_rewards[span.turn]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
