"""K is what the closed form says for the measured times, is kept for a reason, and tried now and then."""

import itertools

import pytest

from coordinator.acceptance import Likeness, PositionRates
from coordinator.draft_length import (
    EXPLORING_SHARE,
    MIN_EXPLORING_ROUNDS,
    DraftLength,
    Exploration,
    draft_limit,
    promised_rates,
)


@pytest.mark.parametrize(
    ("wanted", "num_remaining", "length", "draft_max_length", "expected"),
    [
        (4, 100, 10, 100, 4),  # nothing stands in the way
        (0, 100, 10, 100, 0),
        (4, 5, 10, 100, 4),  # four drafts and the token that every round adds
        (4, 4, 10, 100, 3),
        (4, 2, 10, 100, 1),
        (4, 1, 10, 100, 0),  # the round's own token is the last
        (4, 0, 10, 100, 0),
        (4, 100, 97, 100, 4),  # the drafter holds 97 + 3 positions: all drafts but the last
        (4, 100, 98, 100, 3),
        (4, 100, 100, 100, 1),
        (4, 100, 101, 100, 0),
        (4, 100, 500, 100, 0),  # a drafter with a shorter context than the target's
    ],
)
def test_k_keeps_within_what_is_wanted_what_remains_and_the_drafters_context(
    wanted: int, num_remaining: int, length: int, draft_max_length: int, expected: int
) -> None:
    assert min(wanted, draft_limit(num_remaining, length, draft_max_length)) == expected


def test_rates_are_the_closed_form() -> None:
    seconds = [0.042 + 0.003 * k for k in range(6)]
    rates = promised_rates(seconds, [0.7] * 5)
    for k, rate in enumerate(rates):
        assert rate == pytest.approx((1 - 0.7 ** (k + 1)) / (1 - 0.7) / seconds[k])
    rates = promised_rates(seconds, [0.9, 0.5, 0.1])
    assert rates[3] == pytest.approx((1 + 0.9 + 0.45 + 0.045) / seconds[3])


def test_what_drafts_cost_beforehand_counts_by_token() -> None:
    """Here 100 tokens with a K of 1: 50 rounds of 0.02 s, and half a second before them."""
    rates = promised_rates([0.01, 0.02], [1.0], entry_seconds=0.5 / 100)
    assert rates == pytest.approx([100.0, 100 / 1.5])


def test_the_best_k_is_chosen_and_kept_until_another_is_clearly_better() -> None:
    length = DraftLength()
    assert length.choose([10.0, 12.0, 11.0]) == 1
    assert length.choose([10.0, 12.0, 12.2]) == 1
    assert length.choose([10.0, 12.0, 12.5]) == 2
    assert length.choose([10.0, 12.0, 12.0]) == 2
    assert length.choose([10.0, 12.0]) == 1  # 2 is more than may be drafted now
    assert length.choose([20.0, 12.0], least=1) == 1
    assert length.choose([10.0]) == 0
    assert length.choose([10.0, 10.1], least=1) == 1  # although 0 was the last


@pytest.mark.parametrize("num_sessions", [1, 5])
@pytest.mark.parametrize(("lost", "rounds"), [(0.01, MIN_EXPLORING_ROUNDS), (4.0, 4 / EXPLORING_SHARE)])
def test_where_drafting_does_not_pay_it_is_tried_as_rarely_as_it_costs(
    lost: float, rounds: float, num_sessions: int
) -> None:
    """By one session at a time, once for all of them."""
    lengths, exploration = [DraftLength() for _ in range(num_sessions)], Exploration()
    tried = []
    for number in range(2000 * num_sessions):
        if exploration.is_due(lengths[number % num_sessions], lost, num_sessions):
            tried.append(number)
            exploration.drafted()
    assert {b - a for a, b in itertools.pairwise(tried)} == {rounds * num_sessions}
    assert tried[0] == rounds * num_sessions - 1


def test_a_try_that_the_drafter_is_not_ready_for_is_made_again_by_the_same_session() -> None:
    lengths, exploration = [DraftLength() for _ in range(3)], Exploration()

    def turn() -> list[bool]:
        return [exploration.is_due(length, 0.01, 3) for length in lengths]

    while not any(first := turn()):
        pass
    assert sum(first) == 1
    assert [turn() for _ in range(3)] == [first] * 3
    exploration.drafted()
    assert turn() == [False] * 3


def test_a_try_that_comes_to_nothing_is_left_to_another_session() -> None:
    gone, others, exploration = DraftLength(), [DraftLength() for _ in range(2)], Exploration()
    while not exploration.is_due(gone, 0.01, 3):
        pass
    assert any(exploration.is_due(length, 0.01, 3) for _ in range(100) for length in others)


def test_chances_follow_the_verdicts_by_position_and_guesses_go_on_from_them() -> None:
    rates = PositionRates()
    for i in range(1000):  # 0.8, then 0.5 of these
        accepted = 0 if i % 5 == 0 else 1 if i % 2 else 2
        rates.learn(2, accepted)
    first, second, third = rates.chances(3)
    assert first == pytest.approx(0.8, abs=0.02)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(second)  # nobody has seen it
    assert rates.chances(1, 0.5) == [pytest.approx(first / 2)]
    assert max(rates.chances(3, 9.0)) < 1.0


def test_a_draft_behind_a_rejection_tells_nothing() -> None:
    rates = PositionRates()
    before = rates.chances(3)
    for _ in range(100):
        rates.learn(3, 0)
    assert rates.chances(3)[0] < 0.05
    one = PositionRates()
    for _ in range(100):
        one.learn(1, 0)
    assert rates.chances(3)[1:] == one.chances(3)[1:] < before[1:]


def test_what_was_learnt_long_ago_fades() -> None:
    rates = PositionRates()
    for accepted in [1] * 3000 + [0] * 3000:
        rates.learn(1, accepted)
    assert rates.chances(1)[0] < 0.1


def test_a_session_that_is_accepted_twice_as_often_has_twice_the_chances() -> None:
    likeness = Likeness()
    assert likeness.factor == 1.0
    likeness.learn(0.6, [0.3])
    assert 1.0 < likeness.factor < 0.6 / 0.3
    for _ in range(500):
        likeness.learn(1.2, [0.3, 0.3])
    assert likeness.factor == pytest.approx(2.0, abs=0.2)
