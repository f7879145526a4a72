"""The router alone: who goes where, in which order, and how many; and the figures that it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines import routing
from harness.engines.load import Load, read_load
from harness.engines.routing import Lane, Place, Router, session_of
from harness.errors import EngineError

CALM, CROWDED = Load(1.0, 0.0, 0.5), Load(1.0, 3.0, 0.5)


def router(*windows: int) -> Router:
    return Router([Lane(window) for window in windows])


def homes(made: Router, *sessions: str, tokens: int = 10) -> list[int | None]:
    """Where each goes, one after the other, if all stay."""
    places = [made.ask(session, tokens) for session in sessions]
    made.admit()
    return [place.replica for place in places]


def test_the_session_is_the_episode() -> None:
    assert [session_of(name) for name in ("run/7/3", "e/0", "lonely", "")] == ["run/7", "e", "", ""]


def test_new_sessions_go_to_the_least_loaded_and_stay() -> None:
    made = router(9, 9, 9)
    first = [made.ask("a", 500), made.ask("b", 100), made.ask("c", 50)]
    made.admit()
    assert [place.replica for place in first] == [0, 1, 2]
    assert homes(made, "d", "a", "b") == [2, 0, 1]
    assert homes(made, "", "") == [2, 2], "without a session it is the load alone"


def test_a_session_waits_for_its_replica_but_moves_when_that_is_gone() -> None:
    made = router(1, 1)
    place = made.ask("a", 10)
    made.admit()
    made.lanes[0].state = "held"
    made.leave(place, completed=True)
    assert homes(made, "a") == [None]
    made.lanes[0].state = "out"
    assert [place.replica for place in made.admit()] == [1]
    made.lanes[0].state = "open"
    assert homes(made, "a") == [None], "its prefix is on the other one now"
    made.forget("a")
    assert [place.replica for place in made.admit()] == [0]


def test_work_that_goes_on_keeps_its_turn() -> None:
    made = router(1)
    running, second = made.ask("a", 10), made.ask("b", 10)
    made.admit()
    made.leave(running)
    again = made.ask("a", 20, running.number)
    assert made.admit() == [again] and second.replica is None


def test_a_window_grows_when_it_is_the_limit_and_the_replica_is_at_ease() -> None:
    made = router(2)

    def complete(load: Load | None, in_flight: int) -> int:
        made.lanes[0].load = load
        places = [made.ask(f"s{i}", 1) for i in range(in_flight)]
        made.admit()
        for place in places:
            made.leave(place, completed=True)
        return made.lanes[0].window

    assert complete(None, 2) == 2, "nothing is known yet"
    assert complete(CALM, 1) == 2
    assert complete(Load(1.0, 0.0, 0.92), 2) == 2 and complete(CROWDED, 2) == 2
    assert complete(CALM, 2) == 3
    places = [made.ask(f"s{i}", 1) for i in range(3)]
    made.admit()
    made.leave(places[0])
    assert made.lanes[0].window == 3, "it did not complete"


def test_a_window_is_halved_once_per_drain() -> None:
    made = router(16)
    places = [made.ask(f"s{i}", 1) for i in range(12)]
    made.admit()
    for load in (CROWDED, CALM, CROWDED):
        made.report(0, load)
        assert made.lanes[0].window == 16, "a burst, not a queue"
    for load in (CROWDED, CROWDED, Load(1.0, 0.0, 0.96)):
        made.report(0, load)
        assert made.lanes[0].window == 6
    for place in places[:7]:
        made.leave(place, completed=True)
    made.report(0, CROWDED)
    made.report(0, CROWDED)
    assert made.lanes[0].window == 2
    for place in places[7:]:
        made.leave(place)
    made.report(0, CROWDED)
    assert made.lanes[0].window == 1
    made.lanes[0] = Lane(8, "held", in_flight=8)
    made.report(0, CROWDED)
    assert made.lanes[0].window == 8, "while it is paused it queues, of course"


def test_old_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SESSIONS", 10)
    made = router(1_000)
    homes(made, *(f"s{i}" for i in range(50)), "s45")
    assert list(made._homes) == ["s40", "s41", "s42", "s43", "s44", "s46", "s47", "s48", "s49", "s45"]


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 8), st.integers(1, 100)),
    st.tuples(st.just("leave"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("load"), st.integers(0, 2), st.sampled_from([CALM, CROWDED, Load(0.0, 0.0, 0.99)])),
    st.tuples(st.just("state"), st.integers(0, 2), st.sampled_from(["open", "held", "out"])),
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(STEPS, max_size=60))
def test_no_window_is_exceeded_and_nobody_starves(windows: list[int], steps: list[tuple[str, int, int]]) -> None:
    made = router(*windows)
    here: list[Place] = []

    def admit() -> None:
        before = [lane.in_flight for lane in made.lanes]
        waiting = list(made.queue)
        admitted = made.admit()
        for index, lane in enumerate(made.lanes):
            assert lane.in_flight <= max(lane.window, before[index])
            assert lane.in_flight == before[index] or lane.state == "open"
            assert lane.window >= 1
            came = [place.number for place in admitted if place.replica == index]
            kept = [place.number for place in waiting if place.replica is None and made._homes.get(place.session) == index]
            assert not came or not kept or max(came) < min(kept) or lane.in_flight < lane.window, "who came first goes first"
        if any(lane.has_room for lane in made.lanes):
            assert all(made._homes.get(place.session) is not None for place in made.queue), "only a home is worth waiting for"

    for kind, a, b in steps:
        if kind == "ask":
            here.append(made.ask(f"s{a}" if a else "", b))
        elif kind == "leave" and here:
            made.leave(here.pop(a % len(here)), bool(b))
        elif kind == "load" and a < len(made.lanes):
            made.report(a, b)  # type: ignore[arg-type]
        elif kind == "state" and a < len(made.lanes):
            made.lanes[a].state = b  # type: ignore[assignment]
        admit()
        assert sum(lane.in_flight for lane in made.lanes) + len(made.queue) == len(here)
        assert [place.number for place in made.queue] == sorted(place.number for place in made.queue)
    for lane in made.lanes:
        lane.state = "open"
    for _ in range(len(here) + 1):
        admit()
        for place in [place for place in here if place.replica is not None]:
            made.leave(place, completed=True)
            here.remove(place)
    assert not here and not made.queue
    assert all(lane.in_flight == lane.tokens == 0 for lane in made.lanes)


# --- figures ---------------------------------------------------------------------------------------------------------

TEXT = """
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a } b {"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b {"} 4.0 1700000000000
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 50.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prefix_cache_hits_total 1.5e+06
vllm:prefix_cache_hits_created 1.7e+09
vllm:prefix_cache_queries_total 3e+06
vllm:num_preemptions_total 0.0
vllm:generation_tokens_total 12.0
"""


def test_figures_of_all_engines_of_a_server() -> None:
    assert read_load(TEXT) == Load(7.0, 1.0, 0.75, 1.5e6, 3e6, 0.0, 12.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vllm:num_requests_waiting{", "vllm:other{", "lack waiting"),
        ("0.25", "NaN", "no numbers"),
        ("3e+06", "-1", "no numbers"),
        ("12.0", "many", "line that is none"),
        (" 12.0", "", "line that is none"),
        ('_waiting{engine="0"} 1.0', '_waiting{engine="0"}', "line that is none"),
    ],
)
def test_figures_that_are_none_are_an_error(old: str, new: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_load(TEXT.replace(old, new))
