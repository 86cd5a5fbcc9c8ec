"""Rounds tell how those with drafts compare with those without, whatever was computed of either."""

import pytest

from coordinator.round_times import RoundTimes, TimesBySessions


def test_nothing_is_known_at_first_and_one_kind_alone_tells_nothing_of_the_other() -> None:
    times = RoundTimes()
    assert times.excess == 1.0
    for _ in range(100):
        times.learn(False, 1.3, 1)
    assert times.excess == 1.0


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_the_factors_of_both_kinds_are_learnt_from_few_rounds(num_sessions: int) -> None:
    times = RoundTimes()
    for _ in range(30 * num_sessions):
        times.learn(False, 1.1, num_sessions)
        times.learn(True, 1.3, num_sessions)
    assert times.excess == pytest.approx(1.3 / 1.1, rel=0.02)


def test_one_round_beside_a_long_prompt_moves_little() -> None:
    times = RoundTimes()
    for _ in range(100):
        times.learn(False, 1.0, 1)
        times.learn(True, 1.0, 1)
    times.learn(True, 50.0, 1)
    assert 1.0 < times.excess < 1.05


def test_what_is_not_tried_any_more_is_forgotten_slowly() -> None:
    times = RoundTimes()
    for _ in range(100):
        times.learn(False, 1.0, 1)
        times.learn(True, 1.2, 1)
    for _ in range(100):
        times.learn(False, 1.0, 1)
    assert times.excess > 1.15
    for _ in range(20_000):
        times.learn(False, 1.0, 1)
    assert times.excess == pytest.approx(1.0, abs=0.01)


def test_few_sessions_and_many_are_different_matters() -> None:
    times = TimesBySessions()
    for _ in range(100):
        times.of(16).learn(False, 1.0, 16)
        times.of(17).learn(True, 1.4, 17)
    assert times.of(31).excess > 1.1
    assert times.of(1).excess == times.of(8).excess == 1.0
