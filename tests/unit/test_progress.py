"""How far an evaluation is: counts, share of successes, and the time that is left."""

from __future__ import annotations

import logging

import pytest

from evals import progress as module
from evals.progress import Progress
from harness.episode import Episode
from harness.task import Termination, Usage


class Clock:
    """Seconds that the test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def episode(reward: float | None, tokens: int = 500) -> Episode:
    ended = Termination.ENGINE_ERROR if reward is None else Termination.FINISHED
    return Episode("e", "t", ended, reward=reward, usage=Usage(turns=1, tokens=tokens, action_tokens=1))


def test_a_line_by_hand(clock: Clock) -> None:
    with Progress("sums", 10, 0) as progress:
        assert progress.line() == "sums: 0 of 10, success -, 0 tokens, 0 s left"
        clock.now += 6
        for reward in (1.0, 0.5, None, 0.6):
            progress.heed(episode(reward))
        assert progress.line() == "sums: 4 of 10, success 0.667, 1 missing, 2,000 tokens, 9 s left"
        clock.now += 12
        for _ in range(6):
            progress.heed(episode(0.0))
        assert progress.line() == "sums: 10 of 10, success 0.222, 1 missing, 5,000 tokens, 0 s left"


def test_what_was_there_before_takes_no_time(clock: Clock) -> None:
    """A resumed evaluation: 90 of 100 are known, and the rate is that of this process."""
    with Progress("sums", 100, 90) as progress:
        clock.now += 8
        progress.heed(episode(1.0))
        progress.heed(episode(1.0))
        assert progress.line() == "sums: 92 of 100, success 1.000, 1,000 tokens, 32 s left"


def test_a_log_has_a_line_now_and_then_and_the_last(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sao")
    with Progress("sums", 30, 0) as progress:
        for _ in range(30):
            clock.now += 1
            progress.heed(episode(1.0))
    assert [record.message.split(",")[0] for record in caplog.records] == [f"sums: {n} of 30" for n in (10, 20, 30, 30)]
    caplog.clear()
    with Progress("sums", 5, 5):
        pass
    assert not caplog.records, "nothing was played"


def test_a_terminal_has_a_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Progress("sums", 2, 0) as progress:
        progress.heed(episode(1.0))
        progress.heed(episode(0.0))
    shown = capsys.readouterr().err
    assert "sums: 2 of 2, success 0.500" in shown and "2/2" in shown
