"""Sessions go to the connected worker with the most free slots, and leave it however they end."""

from dataclasses import dataclass

import pytest

from coordinator.spreading import Spread


@dataclass
class Worker:
    num_slots: int
    is_connected: bool = True


def test_sessions_fill_workers_in_proportion_to_their_slots() -> None:
    small, large = Worker(2), Worker(4)
    spread = Spread([small, large])
    places = [spread.place() for _ in range(6)]
    for place in places:
        place.__enter__()
    assert [spread.num_sessions(0), spread.num_sessions(1)] == [2, 4]
    for place in places:
        place.__exit__(None, None, None)
    assert [spread.num_sessions(0), spread.num_sessions(1)] == [0, 0]


def test_a_lost_worker_gets_no_new_session_while_another_can_be_reached() -> None:
    lost, other = Worker(8, is_connected=False), Worker(1)
    spread = Spread([lost, other])
    with spread.place() as first, spread.place() as second:
        assert first is second is other
    other.is_connected = False
    with spread.place() as third:  # it waits for whichever comes back
        assert third is lost


def test_a_session_that_fails_leaves_its_worker() -> None:
    spread = Spread([Worker(1)])
    with pytest.raises(RuntimeError), spread.place():
        raise RuntimeError
    assert spread.num_sessions(0) == 0
