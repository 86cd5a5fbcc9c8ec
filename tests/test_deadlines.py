"""One timer tells of every deadline, soon after it and once, and of none that is no longer waited for."""

import asyncio
import random

from coordinator.deadlines import Deadlines


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_each_key_that_still_waits_is_told_once_after_its_time() -> None:
    draw, loop = random.Random(7), asyncio.get_running_loop()
    waiting: dict[int, float] = {}
    told: dict[int, float] = {}

    def expire(key: int) -> None:
        assert key not in told
        told[key] = loop.time()
        del waiting[key]

    deadlines = Deadlines(waiting, expire)
    due: dict[int, float] = {}
    for key in range(2000):
        seconds = draw.choice([0.0, 0.02, 0.1, 0.3, 60.0])
        waiting[key] = due[key] = loop.time() + seconds
        deadlines.add(key, due[key])
        if draw.random() < 0.5:  # answered
            del waiting[key], due[key]
        if key % 100 == 0:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # beyond all but the longest
    assert told.keys() == {key for key, when in due.items() if when < loop.time() + 30}
    assert all(when >= due[key] for key, when in told.items())
    deadlines.close()


async def test_keys_that_were_answered_are_not_kept_until_their_time() -> None:
    waiting: dict[int, None] = {}
    deadlines = Deadlines(waiting, lambda key: None)
    for key in range(10_000):
        waiting[key] = None
        deadlines.add(key, _in(3600.0))
        if key >= 10:
            del waiting[key]
    assert len(deadlines._due) < 1000
    assert set(waiting) <= {key for _, key in deadlines._due}
    deadlines.close()


async def test_an_earlier_deadline_is_not_kept_waiting_by_a_later_one() -> None:
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    deadlines = Deadlines({1, 2}, told.set_result)
    deadlines.add(1, _in(3600.0))
    deadlines.add(2, _in(0.01))
    async with asyncio.timeout(5):
        assert await told == 2
    deadlines.close()
