"""A worker that learns what its passes take: while nothing is asked, and from what it is asked.

The model is a table that takes as long as its law says; what is compared are sizes, never times.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from protos.pass_cost import PassCost
from protos.worker_pb2 import WorkerStatus
from tests.laws import random_table
from tests.test_jobs import PROMPT, V, draft_task, judged, proposed, verdict_of
from tests.test_worker_server import Gate, Worker, at, plain, serving, until
from workers.jobs import Job
from workers.pass_plan import MIN_PREFILL_TOKENS
from workers.passes import PassLoop
from workers.slots import SlotTable
from workers.table_model import TableModel
from workers.work import Work


class Clockwork(Gate):
    """Half a millisecond a token, and one more a pass."""

    def __call__(self, lengths: Sequence[int]) -> float:
        super().__call__(lengths)
        return self.seconds_of(lengths)

    @staticmethod
    def seconds_of(lengths: Sequence[int]) -> float:
        return 0.001 + 0.0005 * sum(lengths)


def cost_of(status: WorkerStatus) -> PassCost:
    return PassCost.from_message(status.cost)


async def measured(worker: Worker, gate: Gate) -> None:
    """Until the passes that an idle worker begins with are over."""
    await until(lambda: len(gate.passes) >= 8)
    assert gate.passes == [[1], [2], [4], [1], [2], [4], [8], [1] * 4]


async def test_an_idle_worker_measures_its_passes_and_its_status_tells_them() -> None:
    gate = Clockwork()
    async with serving(gate=gate, calibration_seconds=2.0) as worker:
        assert not worker.server.status().HasField("cost")
        await measured(worker, gate)
        await until(lambda: cost_of(worker.server.status()).rows == (1, 2, 4, 8))
        stream = worker.connect()
        (reply,) = await stream.ask(plain(PROMPT, "s"))
        assert judged(reply) == verdict_of(PROMPT, [], [])
        assert worker.held("s") == PROMPT


async def test_large_passes_are_measured_once_a_coordinator_is_there_and_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.calibration.QUIET_SECONDS", 0.0)
    gate = Clockwork()
    async with serving(gate=gate, calibration_seconds=2.0) as worker:
        await measured(worker, gate)
        await until(lambda: cost_of(worker.server.status()).rows == (1, 2, 4, 8))
        await worker.shake_hands()
        await until(lambda: cost_of(worker.server.status()).rows[-1] == 256)
        await until(lambda: not any(worker.model._slots))


async def test_a_task_waits_for_no_more_than_the_one_measuring_pass_that_runs() -> None:
    gate = Gate()
    gate.hold()
    async with serving(gate=gate, calibration_seconds=2.0) as worker:
        await gate.entered()
        stream = worker.connect()
        (task,) = await stream.send(plain(PROMPT, "s"))
        await until(lambda: len(worker.server._passes._arrived) == 1)
        gate.open()
        assert judged(await stream.reply(task)) == verdict_of(PROMPT, [], [])
        assert gate.passes[:2] == [[1], [len(PROMPT)]]


async def test_sessions_are_not_pushed_out_of_their_slots_to_measure() -> None:
    gate = Gate()
    gate.hold()
    async with serving(gate=gate, calibration_seconds=2.0, num_slots=1) as worker:
        await gate.entered()
        stream = worker.connect()
        (task,) = await stream.send(plain(PROMPT, "s"))
        await until(lambda: len(worker.server._passes._arrived) == 1)
        gate.open()
        judged(await stream.reply(task))
        await asyncio.wait_for(worker.server._passes.drained(), 5)
        await stream.ask(plain([*PROMPT, 1], "s", 2))
        assert gate.passes == [[1], [len(PROMPT)], [1]]
        await stream.send(released=["s"])
        await until(lambda: len(gate.passes) > 3)  # now there is a place for it


async def test_chunks_beside_decoding_sessions_keep_the_step_and_others_are_large() -> None:
    gate = Clockwork()
    step = 0.12  # 238 tokens
    async with serving(gate=gate, max_step_seconds=step, calibration_seconds=2.0, max_length=4096) as worker:
        await measured(worker, gate)
        stream = worker.connect()
        prompt = np.random.default_rng(1).integers(0, V, size=1500).tolist()
        del gate.passes[:]
        (alone,) = await stream.ask(plain(prompt[::-1], "alone"))
        assert judged(alone) == verdict_of(prompt[::-1], [], [])
        assert max(map(sum, gate.passes)) == 256
        await stream.send(released=["alone"])
        text = list(PROMPT)
        (first,) = await stream.ask(plain(text, "quick"))
        text.append(judged(first).token)
        del gate.passes[:]
        (long,) = await stream.send(plain(prompt, "long"))
        for round in range(2, 6):
            (reply,) = await stream.ask(plain(text, "quick", round))
            text.append(judged(reply).token)
        assert judged(await stream.reply(long)) == verdict_of(prompt, [], [])
        together = [lengths for lengths in gate.passes if len(lengths) == 2]
        assert together
        for lengths in gate.passes:  # half of a step between the rounds of a session that will come back
            limit = step if len(lengths) == 2 else step / 2
            assert gate.seconds_of(lengths) <= 1.25 * limit  # by what was learnt, which is not exact
        assert max(map(sum, gate.passes)) > MIN_PREFILL_TOKENS


async def test_the_passes_of_a_draft_share_its_step() -> None:
    gate = Clockwork()
    step, num_draft_tokens = 0.2, 4  # 398 tokens in all
    async with serving(role="draft", gate=gate, max_step_seconds=step, max_length=4096) as worker:
        stream = worker.connect()
        prompt = np.random.default_rng(1).integers(0, V, size=4000).tolist()
        await stream.ask(draft_task(at(prompt[:500], "first"), num_draft_tokens))
        await stream.ask(draft_task(at(PROMPT, "quick"), num_draft_tokens))
        await stream.send(draft_task(at(prompt, "long"), num_draft_tokens))
        for round in range(2, 4):
            del gate.passes[:]
            (reply,) = await stream.ask(
                draft_task(at([*PROMPT, *range(round)], "quick", round), num_draft_tokens)
            )
            assert len(proposed(reply)[0]) == num_draft_tokens
            together = [lengths for lengths in gate.passes if len(lengths) == 2]
            assert len(together) == num_draft_tokens
            assert all(max(lengths) >= MIN_PREFILL_TOKENS for lengths in together)
            smallest = gate.seconds_of([MIN_PREFILL_TOKENS, 1])
            assert sum(map(gate.seconds_of, together)) <= 1.25 * step + (num_draft_tokens - 1) * smallest


async def test_replies_bring_the_cost_at_first_and_then_now_and_again() -> None:
    async with serving() as worker:
        stream = worker.connect()
        for round in range(1, 6):
            await stream.ask(plain([*PROMPT, *range(round)], "s", round))
        (cost,) = stream.costs
        assert cost.rows == (1, 4, 8)  # around the passes before the first answer
        other = worker.connect()
        await other.ask(plain(PROMPT, "t"))
        assert len(other.costs) == 1


@pytest.mark.parametrize("num_turns", range(3))
async def test_a_loop_that_is_cancelled_as_something_arrives_ends(num_turns: int) -> None:
    """Python 3.11's asyncio.wait_for loses such a cancellation."""
    model = TableModel(random_table(V, 1), V)
    slots = SlotTable(model, epoch=1, lease_seconds=60.0, clock=time.monotonic)

    def no_job(_: Work) -> Job:
        raise AssertionError("nothing is asked")

    passes = PassLoop(model, slots, no_job, max_pass_tokens=8)
    running = asyncio.create_task(passes.run())
    await until(lambda: bool(passes._wake._waiters))
    passes.release("nobody")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    _, unended = await asyncio.wait([running], timeout=5)
    assert not unended
    assert running.cancelled()
