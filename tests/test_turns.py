"""A group at a time is at the drafter: those who came together, up to the limit; nobody waits for ever."""

import asyncio
import random

from coordinator.turns import Turns


class Crowd:
    """Members that stay until they are told to go."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.inside: set[int] = set()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._go: dict[int, asyncio.Event] = {}

    async def _visit(self, number: int) -> None:
        await self.turns.enter()
        try:
            self.inside.add(number)
            await self._go[number].wait()
        finally:
            self.inside.discard(number)
            self.turns.leave()

    async def come(self, *numbers: int) -> None:
        for number in numbers:
            self._go[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._visit(number))
        await turn_over()

    async def go(self, *numbers: int) -> None:
        for number in numbers:
            self._go[number].set()
        await turn_over()


async def turn_over() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_limit_all_may_at_any_time() -> None:
    crowd = Crowd(Turns())
    await crowd.come(1, 2)
    await crowd.come(3)
    assert crowd.inside == {1, 2, 3}
    await crowd.go(1, 2, 3)


async def test_a_group_is_who_came_together_up_to_the_limit() -> None:
    crowd = Crowd(Turns())
    crowd.turns.limit = 3
    await crowd.come(1, 2, 3, 4)
    assert crowd.inside == {1, 2, 3}
    await crowd.come(5)
    await crowd.go(1)
    await crowd.come(6)
    assert crowd.inside == {2, 3}, "a group at work takes nobody in"
    await crowd.go(2, 3)
    assert crowd.inside == {4, 5, 6}, "first come, first served"
    await crowd.go(4, 5, 6)
    await crowd.come(7)
    assert crowd.inside == {7}, "nobody waits for a group to be full"
    await crowd.go(7)


async def test_who_gives_up_waiting_leaves_his_place_to_others() -> None:
    crowd = Crowd(Turns())
    crowd.turns.limit = 1
    await crowd.come(1, 2, 3)
    crowd.tasks[2].cancel()
    await turn_over()
    await crowd.go(1)
    assert crowd.inside == {3}
    await crowd.go(3)


async def test_a_turn_that_comes_as_its_task_is_cancelled_is_passed_on() -> None:
    crowd = Crowd(Turns())
    crowd.turns.limit = 1
    await crowd.come(1, 2, 3)
    crowd.tasks[1].cancel()
    await asyncio.sleep(0)
    crowd.tasks[2].cancel()  # its turn has come, it has not run yet
    await turn_over()
    assert crowd.inside == {3}
    await crowd.go(3)


async def test_a_turn_is_not_given_to_who_gave_up_in_the_same_moment() -> None:
    crowd = Crowd(Turns())
    crowd.turns.limit = 1
    await crowd.come(1, 2, 3)
    crowd.tasks[2].cancel()  # it has not run since
    crowd.turns.leave()
    crowd.turns._num_in += 1  # 1 is still there and leaves below
    await turn_over()
    assert 3 in crowd.inside
    await crowd.go(1, 3)
    assert crowd.turns._num_in == 0


async def test_whatever_happens_no_group_is_too_large_and_all_are_served() -> None:
    draw = random.Random(7)
    crowd = Crowd(Turns())
    outside = 0
    for number in range(600):
        if draw.random() < 0.1:
            crowd.turns.limit = draw.choice([1, 2, 5, float("inf")])
        await crowd.come(*([number] if number not in crowd.tasks else []))
        limit = crowd.turns.limit
        if draw.random() < 0.5 and crowd.inside:
            await crowd.go(*draw.sample(sorted(crowd.inside), draw.randint(1, len(crowd.inside))))
            assert len(crowd.inside) <= max(limit, outside)
        if draw.random() < 0.2:
            draw.choice(sorted(crowd.tasks.items()))[1].cancel()
        outside = len(crowd.inside)
    for _ in range(1000):
        if not crowd.inside:
            break
        await crowd.go(*crowd.inside)
    await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
    assert all(task.done() for task in crowd.tasks.values())
