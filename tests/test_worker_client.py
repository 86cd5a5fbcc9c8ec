"""The coordinator's end of a worker's stream against a worker whose every answer is written by the test.

Guards against answers that reach the wrong task, or the right one after its time; one bad message that ends
the stream for everybody; credits that leak; another life or another model taken for the one that was lost.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc
import pytest
import pytest_asyncio

from coordinator import worker_client
from coordinator.worker_client import WorkerClient
from protos.status import TaskError
from protos.wire import PROTOCOL_VERSION, seal, unseal
from protos.worker_pb2 import (
    DraftResult,
    DraftTask,
    HandshakeRequest,
    PassCost,
    ReplyBatch,
    Sealed,
    SessionState,
    TaskBatch,
    TaskReply,
    VerifyResult,
    VerifyTask,
    WorkerInfo,
)

Role = Literal["draft", "target"]
METHODS = {"draft": ("outrider.v1.Draft", "Propose"), "target": ("outrider.v1.Target", "Verify")}
SOON = 5.0  # bounds every wait for what should happen at once


def worker_info(**fields: Any) -> WorkerInfo:
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "epoch": 1,
        "model": "m",
        "vocab_size": 12,
        "max_length": 4096,
        "dtype": "table",
        "num_slots": 8,
        "task_credits": 100,
        "byte_credits": 1 << 20,
    }
    return WorkerInfo(**{**values, **fields})


class ScriptedWorker:
    """A real gRPC server that takes note of what arrives and says what it is told to say."""

    def __init__(self, role: Role, info: WorkerInfo) -> None:
        self.role = role
        self.info: WorkerInfo | bytes = info
        self.on_task: Callable[[Sealed], None] = lambda sealed: None  # called as each task arrives
        self.batches: list[TaskBatch] = []  # of all streams
        self.tasks: list[Sealed] = []
        self.released: list[str] = []
        self.handshakes: list[HandshakeRequest] = []
        self.num_streams = 0
        self.cost: PassCost | None = None  # told with answers
        self._answers: asyncio.Queue[ReplyBatch | bytes | None] = asyncio.Queue()

    async def start(self, port: int = 0) -> str:
        service, method = METHODS[self.role]
        handlers: dict[str, Any] = {
            "Handshake": grpc.unary_unary_rpc_method_handler(
                self._handshake, HandshakeRequest.FromString, _serialised
            ),
            method: grpc.stream_stream_rpc_method_handler(self._stream, TaskBatch.FromString, _serialised),
        }
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """The address, for as long as it is served."""
        address = await self.start()
        try:
            yield address
        finally:
            await self.stop()

    def answer(self, *replies: Sealed, generation: int | None = None) -> None:
        """Send replies by the stream that is open, in its generation unless told another."""
        generation = self.batches[-1].generation if generation is None else generation
        self._answers.put_nowait(ReplyBatch(generation=generation, replies=replies, cost=self.cost))

    def send_bytes(self, data: bytes) -> None:
        """Send what is no ReplyBatch."""
        self._answers.put_nowait(data)

    def hang_up(self) -> None:
        """End the stream that is open."""
        self._answers.put_nowait(None)

    async def arrived(self, num_tasks: int) -> list[Sealed]:
        """The tasks so far, when there are so many."""
        await eventually(lambda: len(self.tasks) >= num_tasks)
        return self.tasks

    async def _handshake(self, request: HandshakeRequest, context: Any) -> WorkerInfo | bytes:
        self.handshakes.append(request)
        return self.info

    async def _stream(self, batches: AsyncIterator[TaskBatch], context: Any) -> AsyncIterator[Any]:
        self.num_streams += 1
        self._answers = asyncio.Queue()
        reader = asyncio.create_task(self._read(batches))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, batches: AsyncIterator[TaskBatch]) -> None:
        async for batch in batches:
            self.batches.append(batch)
            self.released += batch.released_sessions
            for sealed in batch.tasks:
                self.tasks.append(sealed)
                self.on_task(sealed)


def _serialised(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


async def eventually(condition: Callable[[], bool], within: float = SOON) -> None:
    """Wait for what must happen in a moment."""
    give_up = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        await asyncio.sleep(0.005)


def task(session: str = "s", epoch: int = 1, padding: int = 0) -> VerifyTask:
    return VerifyTask(state=SessionState(session=session, epoch=epoch, tokens=b"\0" * padding))


def verdict(task_id: int, token: int) -> Sealed:
    return seal(task_id, TaskReply(verify=VerifyResult(token=token)))


def session_of(sealed: Sealed) -> str:
    return unseal(sealed, VerifyTask).state.session


async def ask(client: WorkerClient, session: str = "s", patience: float = SOON, **fields: Any) -> int:
    """The token of the verdict."""
    return (await client.ask(task(session, **fields), patience)).verify.token


async def failure(asking: "asyncio.Task[int]") -> TaskError:
    with pytest.raises(TaskError) as caught:
        await asyncio.wait_for(asking, SOON)
    return caught.value


@contextlib.asynccontextmanager
async def connected(role: Role = "target", **info: Any) -> AsyncIterator[tuple[ScriptedWorker, WorkerClient]]:
    worker = ScriptedWorker(role, worker_info(**info))
    async with worker.served() as address:
        client = WorkerClient(role, address, "coordinator-1")
        await client.start()
        try:
            await eventually(lambda: worker.num_streams == 1)
            yield worker, client
        finally:
            await client.stop()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[ScriptedWorker, WorkerClient]]:
    async with connected() as both:
        yield both


Pair = tuple[ScriptedWorker, WorkerClient]

# ---- answers find their askers


async def test_answers_find_their_askers_in_any_order(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(5)]
    tasks = await worker.arrived(5)
    for sealed in reversed(tasks):
        worker.answer(verdict(sealed.task_id, int(session_of(sealed)[1:])))
    assert await asyncio.gather(*asking) == [0, 1, 2, 3, 4]


async def test_answers_of_one_message_find_their_askers(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(5)]
    tasks = await worker.arrived(5)
    worker.answer(*(verdict(sealed.task_id, int(session_of(sealed)[1:])) for sealed in reversed(tasks)))
    assert await asyncio.gather(*asking) == [0, 1, 2, 3, 4]


async def test_sessions_that_ask_in_the_same_moment_share_a_message(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(20)]
    tasks = await worker.arrived(20)
    assert len([batch for batch in worker.batches if batch.tasks]) == 1
    worker.answer(*(verdict(sealed.task_id, 0) for sealed in tasks))
    await asyncio.gather(*asking)


async def test_a_duplicated_answer_is_counted_and_reaches_nobody_else(pair: Pair) -> None:
    worker, client = pair
    first = asyncio.create_task(ask(client))
    (sealed,) = await worker.arrived(1)
    worker.answer(verdict(sealed.task_id, 3), verdict(sealed.task_id, 4))
    assert await first == 3
    second = asyncio.create_task(ask(client))
    _, again = await worker.arrived(2)
    worker.answer(verdict(sealed.task_id, 5))
    worker.answer(verdict(again.task_id, 6))
    assert await second == 6
    assert client.num_stale_replies == 2


async def test_an_answer_behind_its_deadline_is_counted_and_never_used(pair: Pair) -> None:
    worker, client = pair
    asking = asyncio.create_task(ask(client, patience=0.05))
    assert (await failure(asking)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    (late,) = await worker.arrived(1)
    again = asyncio.create_task(ask(client))
    _, fresh = await worker.arrived(2)
    assert fresh.task_id != late.task_id
    worker.answer(verdict(late.task_id, 3))
    await eventually(lambda: client.num_stale_replies == 1)
    assert not again.done()
    worker.answer(verdict(fresh.task_id, 4))
    assert await again == 4


async def test_answers_of_an_older_stream_are_counted_and_never_used(pair: Pair) -> None:
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    (sealed,) = await worker.arrived(1)
    worker.answer(verdict(sealed.task_id, 3), generation=worker.batches[0].generation - 1)
    worker.answer(verdict(sealed.task_id, 3), generation=worker.batches[0].generation + 1)
    await eventually(lambda: client.num_stale_replies == 2)
    assert not asking.done()
    worker.answer(verdict(sealed.task_id, 4))
    assert await asking == 4


async def test_an_answer_to_a_task_that_nobody_asked_is_counted(pair: Pair) -> None:
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    (sealed,) = await worker.arrived(1)
    worker.answer(verdict(0, 1), verdict(2**64 - 1, 1))
    worker.answer(verdict(sealed.task_id, 4))
    assert await asking == 4
    assert client.num_stale_replies == 2


# ---- what is damaged on the way


async def test_a_damaged_answer_fails_its_task_alone(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(3)]
    flipped, cut, whole = await worker.arrived(3)
    bad_bits = verdict(flipped.task_id, 5)
    bad_bits.body = bad_bits.body[:-1] + bytes([bad_bits.body[-1] ^ 1])
    no_message = Sealed(task_id=cut.task_id, body=b"\xff\xff")
    no_message.crc32c = seal_of_bytes(cut.task_id, b"\xff\xff")
    worker.answer(bad_bits, no_message, verdict(whole.task_id, 7))
    for asked in asking[:2]:
        assert (await failure(asked)).code is grpc.StatusCode.DATA_LOSS
    assert await asking[2] == 7
    assert worker.num_streams == 1, "the stream goes on"


def seal_of_bytes(task_id: int, body: bytes) -> int:
    """The checksum of a body that is no message."""

    class Bytes:
        def SerializeToString(self) -> bytes:
            return body

    sealed: Any = seal
    return int(sealed(task_id, Bytes()).crc32c)


async def test_an_answer_under_another_task_s_number_is_not_taken_for_that_task_s(pair: Pair) -> None:
    """The checksum covers the number."""
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    (sealed,) = await worker.arrived(1)
    stray = verdict(sealed.task_id + 1, 5)
    stray.task_id = sealed.task_id
    worker.answer(stray)
    assert (await failure(asking)).code is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("junk", [b"\xff\xff\xff", b"\x0a\x05"])
async def test_a_message_that_does_not_parse_costs_the_stream_not_the_client(pair: Pair, junk: bytes) -> None:
    """Guards against a client that never connects again."""
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    await worker.arrived(1)
    worker.send_bytes(junk)
    assert (await failure(asking)).code is grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: worker.num_streams == 2)
    again = asyncio.create_task(ask(client))
    _, sealed = await worker.arrived(2)
    worker.answer(verdict(sealed.task_id, 4))
    assert await again == 4


async def test_an_error_inside_an_answer_is_raised_with_its_details(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(2)]
    first, second = await worker.arrived(2)
    worker.answer(seal(first.task_id, TaskReply(error=TaskError.out_of_step(17, "behind").to_status())))
    error = await failure(asking[0])
    assert (error.code, error.message) == (grpc.StatusCode.FAILED_PRECONDITION, "behind")
    assert error.worker_length == 17
    worker.answer(verdict(second.task_id, 4))
    assert await asking[1] == 4


async def test_an_answer_of_the_other_kind_is_the_asker_s_to_judge(pair: Pair) -> None:
    worker, client = pair
    asking = asyncio.create_task(client.ask(task(), SOON))
    (sealed,) = await worker.arrived(1)
    worker.answer(seal(sealed.task_id, TaskReply(draft=DraftResult())))
    assert (await asking).WhichOneof("outcome") == "draft"


# ---- lost streams and other lives


async def test_a_lost_stream_fails_what_is_in_flight_and_is_opened_again(pair: Pair) -> None:
    worker, client = pair
    asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(3)]
    await worker.arrived(3)
    first = worker.batches[0].generation
    worker.hang_up()
    for asked in asking:
        error = await failure(asked)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "target" in error.message
    await eventually(lambda: worker.num_streams == 2)
    again = asyncio.create_task(ask(client))
    sealed = (await worker.arrived(4))[3]
    assert worker.batches[-1].generation > first
    worker.answer(verdict(sealed.task_id, 4))
    assert await again == 4
    assert len(worker.handshakes) == 2, "a handshake before every stream"


async def test_what_a_worker_tells_of_its_passes_is_kept_for_its_life_unless_it_cannot_be(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    worker, client = pair
    assert client.cost is None
    tells = [
        PassCost(rows=[1, 4], seconds=[0.25, 0.5], seconds_per_sequence=0.125),
        PassCost(rows=[1, 4], seconds=[0.5, float("nan")]),
        None,
    ]
    for i, worker.cost in enumerate(tells):
        asking = asyncio.create_task(ask(client))
        await worker.arrived(i + 1)
        worker.answer(verdict(worker.tasks[i].task_id, 3))
        assert await asking == 3
        assert client.cost is not None
        assert (client.cost.rows, client.cost.seconds) == ((1, 4), (0.25, 0.5))
    assert "impossible cost" in caplog.text
    worker.info = worker_info(epoch=2)
    worker.hang_up()
    await eventually(lambda: worker.num_streams == 2)
    assert client.cost is None


async def test_while_the_worker_is_away_asking_fails_at_once() -> None:
    async with connected() as (worker, client):
        await worker.stop()
        await eventually(lambda: not is_connected(client))
        started = time.monotonic()
        with pytest.raises(TaskError) as caught:
            await ask(client, patience=30.0)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert client.address in caught.value.message
        assert time.monotonic() - started < 1.0


def is_connected(client: WorkerClient) -> bool:
    with contextlib.suppress(TaskError):
        return client.info is not None
    return False


async def test_a_worker_that_was_away_is_found_again_soon_after_it_is_back() -> None:
    """Guards against gRPC's own pauses between attempts, which grow to two minutes."""
    async with connected() as (worker, client):
        await worker.stop()
        await asyncio.sleep(3.0)
        assert not is_connected(client)
        await worker.start(worker.port)
        await eventually(lambda: is_connected(client), within=worker_client.LONGEST_PAUSE_SECONDS + 0.2)


async def test_an_epoch_that_was_damaged_on_its_way_is_asked_for_again(pair: Pair) -> None:
    """Guards against a worker that refuses every task for good, since a handshake has no checksum."""
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    (sealed,) = await worker.arrived(1)
    worker.info = worker_info(epoch=2)  # as it was all along
    refusal = TaskError.other_life("epoch is 1; this worker lives in 2")
    worker.answer(seal(sealed.task_id, TaskReply(error=refusal.to_status())))
    assert (await failure(asking)).code is grpc.StatusCode.ABORTED
    await eventually(lambda: worker.num_streams == 2)
    assert client.info.epoch == 2


async def test_a_task_for_an_earlier_life_is_not_sent(pair: Pair) -> None:
    worker, client = pair
    worker.info = worker_info(epoch=2)
    worker.hang_up()
    await eventually(lambda: worker.num_streams == 2)
    asking = asyncio.create_task(ask(client, epoch=1))
    assert (await failure(asking)).code is grpc.StatusCode.ABORTED
    assert worker.tasks == []
    assert client.info.epoch == 2


@pytest.mark.parametrize(
    "other",
    [
        {"vocab_size": 13},
        {"model": "n"},
        {"tokenizer_fingerprint": "f"},
        {"max_length": 100},
        {"end_token_ids": [3]},
        {"dtype": "float16"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_another_model_behind_the_same_address_is_not_taken_for_the_lost_one(
    pair: Pair, other: dict[str, Any]
) -> None:
    """A text begun with one model must not go on with another."""
    worker, client = pair
    worker.info = worker_info(epoch=2, **other)
    worker.hang_up()
    await eventually(lambda: len(worker.handshakes) >= 3)  # it is asked, and asked again
    with pytest.raises(TaskError) as caught:
        await ask(client, epoch=2)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert worker.num_streams == 1
    worker.info = worker_info(epoch=3, num_slots=1, task_credits=5)
    await eventually(lambda: worker.num_streams == 2)
    assert client.info.epoch == 3


async def test_stopping_fails_what_is_in_flight(pair: Pair) -> None:
    worker, client = pair
    asking = asyncio.create_task(ask(client))
    await worker.arrived(1)
    await client.stop()
    assert (await failure(asking)).code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(TaskError):
        await ask(client)


# ---- handshakes


async def test_the_handshake_tells_version_and_coordinator(pair: Pair) -> None:
    worker, client = pair
    assert worker.handshakes == [
        HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="coordinator-1")
    ]
    assert client.info == worker_info()


async def refused_start(role: Role, address: str) -> TaskError:
    client = WorkerClient(role, address, "coordinator-1")
    with pytest.raises(TaskError) as caught:
        await asyncio.wait_for(client.start(), SOON)
    return caught.value


async def test_a_worker_of_another_protocol_version_is_refused_with_both_versions() -> None:
    worker = ScriptedWorker("target", worker_info(protocol_version=PROTOCOL_VERSION + 1))
    async with worker.served() as address:
        error = await refused_start("target", address)
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert str(PROTOCOL_VERSION) in error.message
    assert str(PROTOCOL_VERSION + 1) in error.message


async def test_a_worker_that_cannot_be_reached_is_refused_with_its_address() -> None:
    error = await refused_start("draft", "127.0.0.1:9")
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "draft" in error.message
    assert "127.0.0.1:9" in error.message


async def test_a_worker_of_the_other_role_is_refused() -> None:
    async with ScriptedWorker("target", worker_info()).served() as address:
        error = await refused_start("draft", address)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_handshake_that_does_not_parse_is_refused() -> None:
    worker = ScriptedWorker("target", worker_info())
    worker.info = b"\xff\xff\xff"
    async with worker.served() as address:
        await refused_start("target", address)


# ---- silence


async def test_a_worker_that_is_silent_is_given_up_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is stopped: its connection stands, and nobody answers."""
    monkeypatch.setattr(worker_client, "SILENCE_SECONDS", 0.1)
    async with connected() as (worker, client):
        asking = asyncio.create_task(ask(client))
        error = await failure(asking)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "silent for 0.1 s" in error.message
        await eventually(lambda: worker.num_streams == 2)


async def test_a_worker_that_says_other_things_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "SILENCE_SECONDS", 0.3)
    async with connected() as (worker, client):
        for i in range(8):
            asking = asyncio.create_task(ask(client, f"s{i}"))
            sealed = (await worker.arrived(i + 1))[-1]
            await asyncio.sleep(0.1)
            worker.answer(verdict(sealed.task_id, i))
            assert await asking == i
        assert worker.num_streams == 1


# ---- credits and releases


async def test_no_more_tasks_are_in_flight_than_the_worker_gives_credit_for() -> None:
    async with connected(task_credits=2) as (worker, client):
        asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(5)]
        for done in range(5):
            tasks = await worker.arrived(min(done + 2, 5))
            await asyncio.sleep(0.02)
            assert len(worker.tasks) == min(done + 2, 5)
            worker.answer(verdict(tasks[done].task_id, done))
        assert await asyncio.gather(*asking) == [0, 1, 2, 3, 4]


async def test_bytes_in_flight_are_bounded_and_a_task_above_the_bound_goes_alone() -> None:
    async with connected(byte_credits=1000) as (worker, client):
        sizes = {"a": 600, "b": 600, "c": 5000}
        asking = [asyncio.create_task(ask(client, name, padding=size)) for name, size in sizes.items()]
        for done in range(3):
            tasks = await worker.arrived(done + 1)
            await asyncio.sleep(0.02)
            assert len(worker.tasks) == done + 1
            worker.answer(verdict(tasks[done].task_id, done))
        assert sorted(await asyncio.gather(*asking)) == [0, 1, 2]


async def test_tasks_that_failed_in_any_way_give_their_credit_back() -> None:
    async with connected(task_credits=1) as (worker, client):
        late = asyncio.create_task(ask(client, patience=0.03))
        await failure(late)
        cancelled = asyncio.create_task(ask(client))
        await worker.arrived(2)
        cancelled.cancel()
        refused = asyncio.create_task(ask(client))
        sealed = (await worker.arrived(3))[2]
        worker.answer(seal(sealed.task_id, TaskReply(error=TaskError.internal("no").to_status())))
        await failure(refused)
        lost = asyncio.create_task(ask(client))
        await worker.arrived(4)
        worker.hang_up()
        await failure(lost)
        await eventually(lambda: worker.num_streams == 2)
        good = asyncio.create_task(ask(client))
        sealed = (await worker.arrived(5))[4]
        worker.answer(verdict(sealed.task_id, 4))
        assert await good == 4


async def test_waiting_for_credit_counts_towards_the_timeout() -> None:
    async with connected(task_credits=1) as (worker, client):
        first = asyncio.create_task(ask(client))
        await worker.arrived(1)
        second = asyncio.create_task(ask(client, "other", patience=0.05))
        assert (await failure(second)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(worker.tasks) == 1
        worker.answer(verdict(worker.tasks[0].task_id, 1))
        assert await first == 1


async def test_what_waiting_for_credit_took_is_not_given_again() -> None:
    async with connected(task_credits=1) as (worker, client):
        first = asyncio.create_task(ask(client))
        await worker.arrived(1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        second = asyncio.create_task(ask(client, "other", patience=4.0))
        await asyncio.sleep(3.0)
        worker.answer(verdict(worker.tasks[0].task_id, 1))
        assert await first == 1
        await worker.arrived(2)
        assert (await failure(second)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert loop.time() - begun < 6.0  # not 3 + 4


async def test_a_release_travels_without_waiting_for_any_credit() -> None:
    async with connected(task_credits=1) as (worker, client):
        asking = [asyncio.create_task(ask(client, f"s{i}")) for i in range(3)]
        await worker.arrived(1)
        await asyncio.sleep(0.02)  # nothing is being written
        client.release("gone")
        await eventually(lambda: worker.released == ["gone"])
        for asked in asking:
            asked.cancel()


async def test_a_cancelled_task_is_not_sent_behind_its_release(pair: Pair) -> None:
    """It would claim a slot that nobody frees."""
    worker, client = pair
    asking = asyncio.create_task(ask(client, "gone"))
    await asyncio.sleep(0)  # it is queued; the writer has not run
    asking.cancel()
    client.release("gone")
    await eventually(lambda: worker.released == ["gone"])
    assert worker.tasks == []


async def test_a_session_that_comes_back_after_its_release_is_sent_behind_it(pair: Pair) -> None:
    """As one that moves to another worker, and back again."""
    worker, client = pair
    client.release("back")
    asking = asyncio.create_task(ask(client, "back"))
    [sealed] = await worker.arrived(1)
    assert worker.released == ["back"]
    worker.answer(verdict(sealed.task_id, 3))
    assert await asking == 3


@pytest.mark.parametrize("same_life", [True, False])
async def test_sessions_that_end_while_the_worker_is_away_are_released_when_the_same_life_is_back(
    same_life: bool,
) -> None:
    async with connected() as (worker, client):
        await worker.stop()
        await eventually(lambda: not is_connected(client))
        client.release("gone")
        worker.info = worker_info(epoch=1 if same_life else 2)
        await worker.start(worker.port)
        await eventually(lambda: is_connected(client))
        client.release("over")
        await eventually(lambda: "over" in worker.released)
        assert worker.released == (["gone", "over"] if same_life else ["over"])


async def test_a_draft_worker_is_asked_over_its_own_service() -> None:
    async with connected("draft") as (worker, client):
        asking = asyncio.create_task(client.ask(DraftTask(state=SessionState(epoch=1)), SOON))
        (sealed,) = await worker.arrived(1)
        worker.answer(seal(sealed.task_id, TaskReply(draft=DraftResult())))
        assert (await asking).HasField("draft")
