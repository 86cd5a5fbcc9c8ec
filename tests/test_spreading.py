"""Sessions go to the ready worker with the most free slots, and leave it however they end.

Guards against workers that are left being overrun when another one is lost.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from coordinator.spreading import Spread


@dataclass
class Worker:
    num_slots: int
    is_ready: bool = True
    num_sessions: int = 0


def test_sessions_fill_workers_in_proportion_to_their_slots() -> None:
    small, large = Worker(2), Worker(4)
    spread = Spread([small, large])
    places = [spread.place() for _ in range(6)]
    for place in places:
        place.__enter__()
    assert [spread.workers[0].num_sessions, spread.workers[1].num_sessions] == [2, 4]
    for place in places:
        place.__exit__(None, None, None)
    assert [spread.workers[0].num_sessions, spread.workers[1].num_sessions] == [0, 0]


def test_a_lost_worker_gets_no_new_session_while_another_is_ready() -> None:
    lost, other = Worker(8, is_ready=False), Worker(1)
    spread = Spread([lost, other])
    with spread.place() as first, spread.place() as second:
        assert first.worker is second.worker is other
    other.is_ready = False
    with spread.place() as third:  # it waits for whichever comes back
        assert third.worker is lost


async def test_who_needs_a_slot_waits_until_one_is_free() -> None:
    spread = Spread([Worker(4, is_ready=False), Worker(2)])
    order: list[int] = []

    async def run(number: int, hold: asyncio.Event) -> None:
        async with spread.place_in_slot() as place:
            order.append(number)
            assert place.worker is spread.workers[1]
            assert spread.workers[1].num_sessions <= 2
            await hold.wait()

    holds = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(run(i, hold)) for i, hold in enumerate(holds)]
    await asyncio.sleep(0.01)
    assert order == [0, 1]
    for i, hold in enumerate(holds):
        hold.set()
        await asyncio.sleep(0.01)
        assert len(order) == min(4, 3 + i)
    await asyncio.gather(*tasks)
    assert spread.workers[1].num_sessions == 0


async def test_nobody_waits_for_a_slot_where_no_worker_is_ready() -> None:
    spread = Spread([Worker(1, is_ready=False)])
    async with spread.place_in_slot(), spread.place_in_slot():  # the worker's silence ends them, not ours
        assert spread.workers[0].num_sessions == 2


def test_a_session_that_fails_leaves_its_worker() -> None:
    spread = Spread([Worker(1)])
    with pytest.raises(RuntimeError), spread.place():
        raise RuntimeError
    assert spread.workers[0].num_sessions == 0


def test_a_session_moves_only_to_a_ready_worker_with_a_free_slot() -> None:
    first, full, away, other = Worker(4), Worker(1, num_sessions=1), Worker(9, is_ready=False), Worker(1)
    spread = Spread([first, full, away, other])
    with spread.place() as place, spread.place() as second:
        assert place.worker is second.worker is first
        assert place.move()
        assert place.worker is other
        assert (first.num_sessions, other.num_sessions) == (1, 1)
        assert not second.move()
        assert second.worker is first
    assert [worker.num_sessions for worker in spread.workers] == [0, 1, 0, 0]


async def test_sessions_of_a_lost_worker_come_before_new_ones() -> None:
    lost, other = Worker(2), Worker(2)
    spread = Spread([lost, other])
    stack = contextlib.AsyncExitStack()
    with spread.place() as first, spread.place(), spread.place(), spread.place() as last:
        assert (lost.num_sessions, other.num_sessions) == (2, 2)
        lost.is_ready = False
        new = asyncio.create_task(stack.enter_async_context(spread.place_in_slot()))
        other.num_sessions -= 1
        spread.has_left.set()
        await asyncio.sleep(0.01)
        assert not new.done()
        assert first.worker is lost
        assert first.move()
        assert not last.move()
        lost.is_ready = True
        spread.has_left.set()
        assert (await new).worker is lost
        other.num_sessions += 1
        await stack.aclose()
