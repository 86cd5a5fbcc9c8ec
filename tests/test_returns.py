"""A pass waits for sessions that are about to come back where one pass of all saves more than that costs."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from protos.pass_cost import PassCost, PassShape
from protos.worker_pb2 import TaskReply
from tests.test_jobs import Bench, law, state, verify_task
from workers.returns import MAX_KEPT, WORTH, Returns
from workers.work import Work

FLAT = PassCost((1, 64), (0.040, 0.046), 0.0, 0.0)  # half the rows take nearly as long
STEEP = PassCost((1, 64), (0.001, 0.064), 0.0, 0.0)  # rows take their time wherever they are
ONE = PassShape().with_feed(10, 1)


def away(*usual: float) -> Returns:
    """Sessions that were answered at 100 s and are away for so long as a rule."""
    returns = Returns()
    for number, seconds in enumerate(usual):
        returns.answered(str(number), 1, 10, 50.0)
        returns.arrived(str(number), 50.0 + seconds)
        returns.answered(str(number), 1, 10, 100.0)
    return returns


def test_who_is_back_soon_is_waited_for() -> None:
    seconds = away(0.002).worth_waiting(ONE, FLAT, 100.0)
    assert 0.002 < seconds < WORTH * 0.04


@pytest.mark.parametrize(
    ("returns", "cost", "now"),
    [
        (away(), FLAT, 100.0),
        (away(0.030), FLAT, 100.0),  # the wait would cost more than half of what it saves
        (away(0.002), STEEP, 100.0),  # two passes take no longer than one
        (away(0.002), FLAT, 100.5),  # it is overdue: it may not come at all
    ],
)
def test_nobody_else_is(returns: Returns, cost: PassCost, now: float) -> None:
    assert returns.worth_waiting(ONE, cost, now) == 0.0


def test_a_session_that_never_came_back_or_is_over_is_not_waited_for() -> None:
    returns = Returns()
    returns.answered("new", 1, 10, 100.0)
    assert returns.worth_waiting(ONE, FLAT, 100.0) == 0.0
    returns = away(0.002)
    returns.forget("0")
    assert returns.worth_waiting(ONE, FLAT, 100.0) == 0.0


def test_the_wait_is_for_those_who_are_worth_it() -> None:
    both = away(0.002, 0.015)
    assert both.worth_waiting(ONE, FLAT, 100.0) == pytest.approx(away(0.002).worth_waiting(ONE, FLAT, 100.0))


def test_sessions_that_nobody_ends_are_not_kept_for_ever() -> None:
    returns = Returns()
    for number in range(3 * MAX_KEPT):
        returns.answered(str(number), 1, 10, 100.0)
        returns.arrived(str(number), 100.002)
        returns.answered(str(number), 1, 10, 100.01)
    assert max(len(returns._away), len(returns._usual)) <= MAX_KEPT


async def test_sessions_out_of_step_find_together() -> None:
    """Two sessions, each asked for again as soon as it is answered, begin half a pass apart."""

    def latency(lengths: Sequence[int]) -> float:
        fed.append(len(lengths))
        return 0.02

    fed: list[int] = []
    async with Bench(law(1)) as bench:
        bench.model._latency_seconds = latency

        async def decode(name: str, num_rounds: int) -> None:
            tokens = [3, 1, 4]
            for round in range(1, num_rounds + 1):
                answered: asyncio.Future[TaskReply] = asyncio.get_running_loop().create_future()
                where = state(tokens, session=name, round=round, start=max(0, len(tokens) - 1))
                bench.passes.submit(Work(verify_task(where), b"", answered.set_result))
                reply = await asyncio.wait_for(answered, 10)
                tokens.append(reply.verify.token)
                await asyncio.sleep(0.002)

        begun = time.monotonic()
        first = asyncio.create_task(decode("a", 30))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, decode("b", 30))
        assert time.monotonic() - begun < 10
    assert fed[10:-5].count(2) >= len(fed[10:-5]) - 2
