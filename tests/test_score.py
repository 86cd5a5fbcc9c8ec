"""Target.Score: the very rows that verification uses, for whoever shows the control token, and no slot kept.

Guards against a proof that compares with other numbers than the verifier's, and against an open door.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import SecretStr

from protos import worker_pb2_grpc
from protos.authorization import metadata
from protos.wire import MAX_MESSAGE_BYTES, pack_tokens
from protos.worker_pb2 import (
    GetStatusRequest,
    ProbabilityRow,
    Sampling,
    ScoreReply,
    ScoreRequest,
    WorkerStatus,
)
from tests.laws import random_table
from workers.jobs import BYTES_PER_PROBABILITY
from workers.sampling import SamplingSettings, probabilities
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import TableModel

V, MAX_LENGTH = 11, 40
SECRET = "cuckoo-7"
TABLE = random_table(V, 5, zero_share=0.2)


class _Target:
    """A served target and its stub."""

    def __init__(self, server: WorkerServer, stub: Any) -> None:
        self.server = server
        self._stub = stub

    async def score(
        self,
        tokens: Sequence[int],
        num_rows: int,
        sampling: dict[str, float] | None = None,
        *,
        token: str | None = SECRET,
    ) -> ScoreReply:
        request = ScoreRequest(
            tokens=pack_tokens(tokens),
            num_rows=num_rows,
            sampling=Sampling(**{"temperature": 1.0, "top_p": 1.0, **(sampling or {})}),  # type: ignore[arg-type]
        )
        shown = metadata(token) if token is not None else ()
        reply: ScoreReply = await self._stub.Score(request, metadata=shown, timeout=20)
        return reply

    async def idle_status(self) -> WorkerStatus:
        """Its status once nothing is at work, or after four seconds: slots are freed behind the answer."""
        for _ in range(200):
            status = await self.status()
            if status.num_slots_used == status.num_tasks == 0:
                break
            await asyncio.sleep(0.02)
        return status

    async def status(self) -> WorkerStatus:
        status: WorkerStatus = await self._stub.GetStatus(GetStatusRequest(), timeout=20)
        return status


async def _serve(token: str | None, **latency: Any) -> AsyncIterator[_Target]:
    model = TableModel(TABLE, V, num_slots=2, max_length=MAX_LENGTH, **latency)
    secret = None if token is None else SecretStr(token)
    server = WorkerServer(
        "target",
        model,
        ModelIdentity("t", "", (), "table"),
        WorkerConfig(max_pass_tokens=8, control_token=secret),
    )
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield _Target(server, worker_pb2_grpc.TargetStub(channel))
    await server.stop(0.1)


@pytest.fixture
async def target() -> AsyncIterator[_Target]:
    async for served in _serve(SECRET):
        yield served


def _dense(row: ProbabilityRow) -> NDArray[np.float64]:
    dense = np.zeros(V)
    dense[np.frombuffer(row.ids, "<u4")] = np.frombuffer(row.probabilities, "<f8")
    return dense


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0}]
)
@pytest.mark.parametrize("num_rows", [1, 3, 37])
async def test_rows_are_the_verifiers_own_to_the_last_bit(
    target: _Target, sampling: dict[str, float], num_rows: int
) -> None:
    tokens = [i * 7 % V for i in range(37)]  # longer than a pass
    reply = await target.score(tokens, num_rows, sampling)
    logits = np.stack([TABLE(tuple(tokens[:end])) for end in range(len(tokens) - num_rows + 1, 38)])
    settings = SamplingSettings(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    assert np.array_equal(np.stack([_dense(row) for row in reply.rows]), probabilities(logits, settings))
    assert all(len(row.ids) // 4 < V for row in reply.rows)  # entries of probability zero are left out
    assert (await target.idle_status()).num_slots_used == 0


@pytest.mark.parametrize("shown", [None, "another token", "", "cuckoo-"])
async def test_without_the_token_nobody_gets_a_row(target: _Target, shown: str | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await target.score([1], 1, token=shown)
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in str(refusal.value.details())


async def test_it_is_off_where_there_is_no_token() -> None:
    async for target in _serve(None):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await target.score([1], 1)
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("tokens", "num_rows", "sampling", "words"),
    [
        ([], 1, {}, f"tokens are 0 ids; it takes 1 to {MAX_LENGTH}"),
        ([1, 2], 0, {}, "num_rows is 0; it must lie in 1..2"),
        ([1, 2], 3, {}, "num_rows is 3; it must lie in 1..2"),
        ([1, V], 1, {}, f"tokens has token id {V}"),
        ([1] * (MAX_LENGTH + 1), 1, {}, f"tokens are {MAX_LENGTH + 1} ids; it takes 1 to {MAX_LENGTH}"),
        ([1], 1, {"temperature": -1.0}, "sampling.temperature"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    target: _Target, tokens: list[int], num_rows: int, sampling: dict[str, float], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await target.score(tokens, num_rows, sampling)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(refusal.value.details())
    assert (await target.idle_status()).num_slots_used == 0


def test_the_rows_of_the_largest_reply_fit_a_message() -> None:
    vocab_size = 152_064
    limit = MAX_MESSAGE_BYTES // 2 // (BYTES_PER_PROBABILITY * vocab_size)
    assert limit >= 8
    row = ProbabilityRow(ids=b"i" * 4 * vocab_size, probabilities=b"p" * 8 * vocab_size)
    assert ScoreReply(rows=[row] * limit).ByteSize() < MAX_MESSAGE_BYTES


async def test_a_caller_that_runs_out_of_time_leaves_no_slot_behind() -> None:
    async for target in _serve(SECRET, latency_seconds=lambda _: 0.3):
        request = ScoreRequest(tokens=pack_tokens([1] * 30), num_rows=1, sampling=Sampling(top_p=1.0))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await target._stub.Score(request, metadata=metadata(SECRET), timeout=0.1)
        assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        status = await target.idle_status()
        assert (status.num_slots_used, status.num_tasks) == (0, 0)
