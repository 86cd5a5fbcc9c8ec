"""When a worker that failed is asked again, and how long its answers may take. No clock but the test's."""

import random

import pytest

from coordinator.acceptance import BLOCK_TOKENS, FAR_BELOW, History
from coordinator.circuit import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Circuit
from coordinator.patience import Patience
from protos.control_pb2 import CIRCUIT_CLOSED, CIRCUIT_HALF_OPEN, CIRCUIT_OPEN


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entered(circuit: Circuit) -> int:
    attempt = circuit.enter()
    assert attempt is not None
    return attempt


def test_a_closed_circuit_lets_everybody_in(clock: Clock) -> None:
    circuit = Circuit(clock)
    attempts = [entered(circuit) for _ in range(5)]
    for attempt in attempts:
        circuit.succeeded(attempt)
        circuit.leave(attempt)
    assert (circuit.state, circuit.problem) == (CIRCUIT_CLOSED, "")


def test_pauses_double_with_failures_in_a_row_up_to_the_longest(clock: Clock) -> None:
    circuit = Circuit(clock)
    pauses = []
    for _ in range(12):
        pause = circuit.failed(entered(circuit), "broken")
        assert pause is not None
        assert circuit.state == CIRCUIT_OPEN
        assert "broken" in circuit.problem
        clock.now += 0.99 * pause
        assert circuit.enter() is None
        clock.now += 0.02 * pause
        assert circuit.state == CIRCUIT_HALF_OPEN
        pauses.append(pause)
    doubled = [FIRST_PAUSE_SECONDS * 2.0**i for i in range(12)]
    assert pauses == [min(pause, LONGEST_PAUSE_SECONDS) for pause in doubled]


def test_failures_that_began_together_are_one(clock: Clock) -> None:
    circuit = Circuit(clock)
    attempts = [entered(circuit) for _ in range(1000)]
    pauses = [circuit.failed(attempt, "broken") for attempt in attempts]
    assert pauses == [FIRST_PAUSE_SECONDS, *[None] * 999]
    clock.now += FIRST_PAUSE_SECONDS
    assert circuit.state == CIRCUIT_HALF_OPEN


def test_half_open_it_lets_in_one_at_a_time(clock: Clock) -> None:
    circuit = Circuit(clock)
    circuit.failed(entered(circuit), "broken")
    clock.now += FIRST_PAUSE_SECONDS
    first = entered(circuit)
    assert circuit.enter() is None
    circuit.leave(first)  # it came to nothing
    second = entered(circuit)
    circuit.succeeded(second)
    circuit.leave(second)
    assert circuit.state == CIRCUIT_CLOSED
    assert [circuit.enter() for _ in range(3)] == [entered(circuit)] * 3


def test_what_an_attempt_from_before_says_counts_no_longer(clock: Clock) -> None:
    circuit = Circuit(clock)
    late, other = entered(circuit), entered(circuit)
    circuit.failed(other, "broken")
    circuit.succeeded(late)
    assert circuit.state == CIRCUIT_OPEN
    clock.now += FIRST_PAUSE_SECONDS
    trial = entered(circuit)
    circuit.leave(late)
    assert circuit.enter() is None, "the trial goes on"
    circuit.open(30.0, "at fault")
    circuit.succeeded(trial)
    assert circuit.state == CIRCUIT_OPEN


def test_an_answer_closes_it_but_only_success_makes_up_for_failures(clock: Clock) -> None:
    """As of a drafter that reads prompts and draws nothing: its pauses must grow."""
    circuit = Circuit(clock)
    for i in range(4):
        assert circuit.failed(entered(circuit), "broken") == FIRST_PAUSE_SECONDS * 2.0**i
        clock.now += LONGEST_PAUSE_SECONDS
        circuit.answered(entered(circuit))
        assert circuit.state == CIRCUIT_CLOSED
    circuit.succeeded(entered(circuit))
    assert circuit.failed(entered(circuit), "broken") == FIRST_PAUSE_SECONDS


def test_patience_is_above_what_is_usual_and_follows_it() -> None:
    dice = random.Random(1)
    patience = Patience()
    assert patience.seconds == 0.0
    for mean in (0.02, 0.4, 0.05):
        for _ in range(100):
            patience.learn(mean * dice.uniform(0.7, 1.3))
        assert 1.1 * mean < patience.seconds < 3 * mean


def test_a_block_far_below_those_before_it_is_a_warning_once() -> None:
    history = History()
    assert not any(history.learn(4, 4 * 0.6) for _ in range(2000))
    num_warnings = sum(history.learn(4, 4 * 0.6 * FAR_BELOW * 0.9) for _ in range(3 * BLOCK_TOKENS // 4))
    assert num_warnings == 1
    assert "27%" in history.warning
    assert not any(history.learn(4, 4 * 0.6) for _ in range(2 * BLOCK_TOKENS // 4))
    assert history.warning == ""


def test_a_drafter_that_was_never_better_is_no_reason_for_a_warning() -> None:
    history = History()
    assert not any(history.learn(4, 0.01) for _ in range(5000))
    assert history.warning == ""


def test_the_first_blocks_warn_of_nothing() -> None:
    history = History()
    assert not history.learn(BLOCK_TOKENS, 0.9 * BLOCK_TOKENS)
    assert not history.learn(BLOCK_TOKENS, 0.0)
