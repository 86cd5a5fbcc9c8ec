"""What round trips take is known before the first task, and no single one counts for much."""

import asyncio

import pytest

from coordinator.wire_time import WireTime
from tests.laws import random_table
from tests.pipelines import generate, pipeline
from workers.table_model import TableModel

V = 4
SOON = 20.0


def test_it_follows_the_round_trips_and_one_that_hangs_moves_little() -> None:
    wire = WireTime()
    wire.learn(0.002)
    assert wire.seconds == pytest.approx(0.002)
    wire.learn(60.0)
    assert wire.seconds < 0.0025
    for _ in range(100):
        wire.learn(0.0005)
    assert wire.seconds == pytest.approx(0.0005, rel=0.05)
    wire.learn(-5.0)
    assert wire.seconds > 0


async def test_empty_round_trips_tell_it_of_a_silent_worker() -> None:
    target, draft = TableModel(random_table(V, 1), V), TableModel(random_table(V, 2), V)
    async with pipeline(target, draft) as running:
        clients = running.coordinator._clients
        async with asyncio.timeout(SOON):
            while not all(client.wire.seconds for client in clients):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        assert all(client.wire.seconds < SOON for client in clients)
        answer = await generate(running.stub, [1], max_tokens=20)  # the streams carry tasks all the same
        assert len(answer.ids()) == 20
