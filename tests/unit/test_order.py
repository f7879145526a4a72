"""The order of tasks: epochs without replacement, weights that hold in every stretch, draws that a resume repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.order import Share, TaskOrder, first, turns


class Several(Sequence[int]):
    """A sequence of several sources."""

    def __init__(self, *shares: tuple[int, float]) -> None:
        self.shares = [Share(f"s{i}", size, weight) for i, (size, weight) in enumerate(shares)]

    def __len__(self) -> int:
        return sum(share.size for share in self.shares)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return range(len(self))[index]


def test_epochs_are_without_replacement_and_differ() -> None:
    order = TaskOrder(range(7), seed=1)
    epochs = [[next(order) for _ in range(7)] for _ in range(4)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert len({tuple(e) for e in epochs}) > 1
    other = TaskOrder(range(7), 2)
    assert [next(other) for _ in range(28)] != [i for e in epochs for i in e]


@pytest.mark.parametrize("drawn", [0, 1, 6, 7, 13, 20])
def test_a_resumed_order_goes_on_where_it_was(drawn: int) -> None:
    whole, resumed = TaskOrder(range(7), 5), TaskOrder(range(7), 5, drawn)
    straight = [next(whole) for _ in range(30)]
    assert [next(resumed) for _ in range(30 - drawn)] == straight[drawn:]


mixes = st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), min_size=1, max_size=4)


@given(mixes)
def test_every_stretch_is_mixed_by_weight(mix: list[tuple[int, float]]) -> None:
    shares = Several(*mix).shares
    whole = sum(share.weight for share in shares)
    had = Counter[int]()
    for n, turn in enumerate(islice(turns(shares), 200), 1):
        had[turn] += 1
        for i, share in enumerate(shares):
            assert had[i] < share.weight / whole * n + 1 + 1e-9
            assert had[i] > share.weight / whole * n - len(shares)


@given(mixes, st.integers(0, 60))
def test_sources_have_epochs_of_their_own_and_a_resume_repeats_nothing(mix: list[tuple[int, float]], drawn: int) -> None:
    tasks = Several(*mix)
    order, resumed = TaskOrder(tasks, 3), TaskOrder(tasks, 3, drawn)
    draws = [next(order) for _ in range(120)]
    assert [next(resumed) for _ in range(120 - drawn)] == draws[drawn:]
    start = 0
    for share in tasks.shares:
        own = [i - start for i in draws if start <= i < start + share.size]
        for epoch in range(len(own) // share.size):
            assert sorted(own[epoch * share.size : (epoch + 1) * share.size]) == list(range(share.size))
        start += share.size


def test_two_sources_of_one_size_are_shuffled_apart() -> None:
    tasks = Several((50, 1.0), (50, 1.0))
    draws = list(islice(iter(TaskOrder(tasks, 0).__next__, None), 100))
    assert [i for i in draws if i < 50] != [i - 50 for i in draws if i >= 50]


def test_an_evaluation_asks_the_first_of_each_source() -> None:
    assert first(range(9), 4) == [0, 1, 2, 3]
    assert first(range(3), 10) == [0, 1, 2]
    assert first(range(3), 0) == []
    tasks = Several((2, 1.0), (10, 3.0))
    assert sorted(first(tasks, 4)) == [0, 2, 3, 4]
    assert sorted(first(tasks, 99)) == list(range(12)), "an exhausted source leaves its turns to the others"


def test_an_empty_source_is_named() -> None:
    with pytest.raises(ConfigError, match="the environment has no task"):
        TaskOrder(range(0), 0)
    with pytest.raises(ConfigError, match="'s1' has no task"):
        TaskOrder(Several((3, 1.0), (0, 1.0)), 0)


class Stream(Several):
    """A sequence that is drawn in its order."""

    ordered = True


def test_a_stream_is_drawn_in_its_order_unless_it_is_to_be_shuffled() -> None:
    tasks = Stream((7, 1.0))
    order, resumed, shuffled = TaskOrder(tasks, 5), TaskOrder(tasks, 5, 9), TaskOrder(tasks, 5, shuffled=True)
    assert [next(order) for _ in range(14)] == [*range(7), *range(7)]
    assert next(resumed) == 2
    drawn = [next(shuffled) for _ in range(7)]
    assert sorted(drawn) == list(range(7)) and drawn != list(range(7))
