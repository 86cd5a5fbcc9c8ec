"""Control.GetStatus: workers, sessions and counts, told only to whoever shows the control token."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import SecretStr

from coordinator import acceptance
from coordinator.server import CoordinatorConfig, CoordinatorServer, check_alike
from protos import control_pb2_grpc, inference_pb2_grpc
from protos.authorization import metadata
from protos.control_pb2 import (
    CIRCUIT_CLOSED,
    CIRCUIT_OPEN,
    CIRCUIT_UNSPECIFIED,
    DeploymentStatus,
    GetDeploymentStatusRequest,
)
from protos.pass_cost import PassCost
from protos.status import TaskError
from protos.worker_pb2 import WorkerInfo
from tests.laws import random_table
from tests.pipelines import Pipeline, generate, pipeline
from workers.counts import CountRow
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import TableModel

V, TOKEN = 6, "secret"
TARGET, DRAFT = random_table(V, 1), random_table(V, 2)


async def _status(address: str, token: str | None = TOKEN) -> DeploymentStatus:
    async with grpc.aio.insecure_channel(address) as channel:
        call = control_pb2_grpc.ControlStub(channel).GetStatus
        shown = metadata(token) if token is not None else ()
        status: DeploymentStatus = await call(GetDeploymentStatusRequest(), metadata=shown, timeout=20)
        return status


@pytest.fixture
async def served() -> AsyncIterator[Pipeline]:
    target, draft = TableModel(TARGET, V, num_slots=3), TableModel(DRAFT, V, num_slots=2)
    async with pipeline(target, draft, control_token=TOKEN, num_draft_tokens=2) as running:
        yield running


async def test_it_tells_workers_slots_sessions_and_what_all_requests_counted(served: Pipeline) -> None:
    usages = [(await generate(served.stub, [1, 2], max_tokens=30, n=n)).usage for n in (1, 3)]
    status = await _status(served.address)
    assert [(w.role, w.model, w.is_healthy, w.problem) for w in status.workers] == [
        ("target", "t", True, ""),
        ("draft", "d", True, ""),
    ]
    assert [(w.circuit, w.notice) for w in status.workers] == [
        (CIRCUIT_UNSPECIFIED, ""),
        (CIRCUIT_CLOSED, ""),
    ]
    assert [(w.num_slots, w.num_sessions) for w in status.workers] == [(3, 0), (2, 0)]
    assert {w.process_id for w in status.workers} == {os.getpid()}
    assert (status.num_running_sessions, status.num_waiting_sessions) == (0, 0)
    assert status.uptime_seconds > 0
    assert all(0 < w.busy.busy_seconds < w.busy.serving_seconds for w in status.workers)
    assert all(PassCost.from_message(w.cost).seconds[0] > 0 for w in status.workers)
    assert all(w.prefixes.num_hits > 0 for w in status.workers)  # the samples of one prompt
    assert status.totals.num_requests == 2
    for name in ("num_completion_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(status.totals, name) == sum(getattr(usage, name) for usage in usages) > 0


async def test_running_requests_are_counted_while_they_run(served: Pipeline) -> None:
    running = asyncio.create_task(generate(served.stub, [1], max_tokens=1000, n=5))
    while (await _status(served.address)).totals.num_completion_tokens == 0:
        assert not running.done()
    # Once more: that one may have asked the workers before they had anything to do.
    status = await _status(served.address)
    assert (status.num_running_sessions, status.num_waiting_sessions) == (3, 2)
    assert [w.num_sessions for w in status.workers] == [3, 3]
    assert status.workers[0].num_slots_used == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_is_gone_is_said_to_be(served: Pipeline) -> None:
    assert served.draft is not None
    await served.draft.stop(0.1)
    [target, draft] = (await _status(served.address)).workers
    assert target.is_healthy
    assert not draft.is_healthy
    assert draft.problem
    assert draft.process_id == 0


@pytest.mark.parametrize(("configured", "shown"), [(TOKEN, None), (TOKEN, "other"), (None, TOKEN)])
async def test_nobody_else_is_told(configured: str | None, shown: str | None) -> None:
    async with pipeline(TableModel(TARGET, V), None, control_token=configured) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await _status(running.address, shown)
    expected = grpc.StatusCode.UNAUTHENTICATED if configured else grpc.StatusCode.PERMISSION_DENIED
    assert refusal.value.code() is expected


async def test_a_drafter_whose_drafts_are_kept_far_less_than_before_is_reported_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose weights or cache went wrong: it keeps the law and is slow."""
    monkeypatch.setattr(acceptance, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(acceptance, "USUAL_TOKENS", 128)
    is_wrong = False

    def drafts(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        return -4.0 * TARGET(prefix) if is_wrong else TARGET(prefix)

    target, draft = TableModel(TARGET, V), TableModel(drafts, V)
    async with pipeline(target, draft, control_token=TOKEN, num_draft_tokens=3) as running:
        await generate(running.stub, [1], max_tokens=400, seed=1)
        [_, before] = (await _status(running.address)).workers
        is_wrong = True
        usage = (await generate(running.stub, [1], max_tokens=200, seed=2)).usage
        [_, after] = (await _status(running.address)).workers
    assert before.notice == ""
    assert "before it was" in after.notice
    assert after.is_healthy
    assert after.circuit == CIRCUIT_CLOSED
    assert usage.num_drafts > 100
    assert sum("drafts are accepted" in record.getMessage() for record in caplog.records) == 1


# ---- several workers of a role


@contextlib.asynccontextmanager
async def _many(
    num_targets: int, num_drafters: int, **coordinator: float
) -> AsyncIterator[tuple[str, list[WorkerServer]]]:
    """The coordinator's address, and its workers, targets first; keyword arguments configure the first."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            *(
                WorkerServer(
                    "target",
                    TableModel(TARGET, V, num_slots=2),
                    ModelIdentity("t", "", (), "table"),
                    WorkerConfig(),
                )
                for _ in range(num_targets)
            ),
            *(
                WorkerServer(
                    "draft",
                    TableModel(DRAFT, V, num_slots=2),
                    ModelIdentity("d", "", (), "table"),
                    WorkerConfig(),
                )
                for _ in range(num_drafters)
            ),
        ]
        addresses = []
        for worker in workers:
            addresses.append(await worker.start())
            stack.push_async_callback(worker.stop, 0.1)
        config = CoordinatorConfig(
            targets=tuple(addresses[:num_targets]),
            drafts=tuple(addresses[num_targets:]),
            control_token=SecretStr(TOKEN),
            draft_timeout_seconds=10.0,  # however busy the machine is
            **coordinator,  # type: ignore[arg-type]
        )
        server = CoordinatorServer(config)
        address = await server.start()
        stack.push_async_callback(server.stop, 0.1)
        yield address, workers


async def test_sessions_use_all_workers_and_stay_where_they_are() -> None:
    async with _many(2, 2) as (address, workers), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = asyncio.create_task(generate(stub, [1], max_tokens=150, n=4, temperature=0.0))
        while [worker.num_slots_used for worker in workers] != [2, 2, 2, 2]:
            assert not running.done()
            await asyncio.sleep(0.001)
        answer = await running
        assert len({answer.ids(choice) for choice in range(4)}) == 1  # greedy: each target says the same
        alone = await generate(stub, [1], max_tokens=150, num_draft_tokens=0, temperature=0.0)
        assert answer.ids() == alone.ids()
        assert answer.usage.num_fallbacks == 0
    assert [worker.num_slots_used for worker in workers] == [0, 0, 0, 0]


async def test_when_a_target_is_lost_its_streams_end_and_the_others_take_turns_in_the_slots_left() -> None:
    async with (
        _many(2, 1, target_patience_seconds=0.2) as (address, workers),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def run(max_tokens: int) -> grpc.StatusCode:
            try:
                await generate(stub, [1], max_tokens=max_tokens, temperature=0.0)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        running = [asyncio.create_task(run(600)) for _ in range(4)]
        while [worker.num_slots_used for worker in workers[:2]] != [2, 2]:
            assert not any(task.done() for task in running)
            await asyncio.sleep(0.001)
        await workers[0].stop(0.0)
        ends, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert {end.result() for end in ends} == {grpc.StatusCode.UNAVAILABLE}
        later = [asyncio.create_task(run(30)) for _ in range(6)]  # with the other target's two, for 2 slots
        outcomes = await asyncio.gather(*running, *later)
        assert outcomes.count(grpc.StatusCode.UNAVAILABLE) == 2  # those that were on the lost one
        assert outcomes.count(grpc.StatusCode.OK) == 8


async def test_a_drafter_at_fault_is_said_to_be_and_gets_no_session() -> None:
    async with _many(1, 2, num_draft_tokens=3) as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CountRow, "draw", lambda row, coin: int(row.ids[0]))  # at both ends
            patch.setattr("workers.jobs.VerifyJob._num_mismatches", lambda job: 1)
            await generate(stub, [1], max_tokens=10)
        [_, *drafters] = (await _status(address)).workers
        assert [d.is_healthy for d in drafters].count(False) == 1
        assert {d.is_healthy: d.circuit for d in drafters} == {True: CIRCUIT_CLOSED, False: CIRCUIT_OPEN}
        [problem] = [d.problem for d in drafters if d.problem]
        assert "not those of their rows" in problem
        answer = await generate(stub, [1], max_tokens=20)
        assert answer.usage.num_drafts > 0  # the other one's
        assert answer.usage.num_fallbacks == 0


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "u"),
        ("vocab_size", 9),
        ("tokenizer_fingerprint", "f"),
        ("end_token_ids", [1]),
        ("dtype", "x"),
    ],
)
def test_targets_must_be_one_model(field: str, other: object) -> None:
    first = WorkerInfo(model="t", vocab_size=8, dtype="float32", num_slots=1, epoch=1)
    second = WorkerInfo(model="t", vocab_size=8, dtype="float32", num_slots=5, epoch=2)
    check_alike([first, second])
    if isinstance(other, list):
        second.end_token_ids.extend(other)
    else:
        setattr(second, field, other)
    with pytest.raises(TaskError, match=field):
        check_alike([first, second])
