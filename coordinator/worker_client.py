"""The coordinator's end of one worker's stream: tasks of many sessions go out together, answers come back.

Knows streams, credits, generations and deadlines; not what a task means. What has piled up while the last
message was written goes into the next one: batching without timers.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc

from coordinator.credits import Credits
from coordinator.deadlines import Deadlines
from coordinator.handshake import model_of, shake_hands
from coordinator.wire_time import WireTime
from protos import worker_pb2_grpc
from protos.pass_cost import PassCost
from protos.status import TaskError
from protos.wire import CHANNEL_OPTIONS, checksum, unseal
from protos.worker_pb2 import (
    DraftTask,
    GetStatusRequest,
    ReplyBatch,
    TaskBatch,
    TaskReply,
    VerifyTask,
    WorkerInfo,
    WorkerStatus,
)
from protos.worker_pb2 import PassCost as PassCostMessage

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
ECHO_SECONDS = 1.0  # between empty round trips
SILENCE_SECONDS = 10.0  # without an answer to them, as of a process that is stopped: the stream is given up
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 2.0
MAX_KEPT_RELEASES = 4096  # for a worker that is away; further slots are freed by their lease
RECONNECT_OPTIONS: list[tuple[str, int]] = [  # gRPC's own pauses between attempts grow to two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_PAUSE_SECONDS * 500)),
]


class WorkerClient:
    """One worker, reconnected for as long as the client lives."""

    def __init__(self, role: Literal["draft", "target"], address: str, coordinator: str) -> None:
        """`address` is host:port; `coordinator` names this coordinator and its life."""
        self.role = role
        self.address = address
        self._name = f"the {role} worker at {address}"
        self.num_stale_replies = 0
        self.cost: PassCost | None = None  # what its passes take, as last told in this life
        self.wire = WireTime()
        self._coordinator = coordinator
        self._info: WorkerInfo | None = None
        self._generation = 0
        self._epoch, self._computes_on = 0, ""
        self._task_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[TaskReply]] = {}
        self._deadlines = Deadlines(self._waiting, self._expire)
        self._outgoing: list[tuple[str, int, bytes]] = []  # session, number and body of each task
        self._flushed = asyncio.Event()
        self._released: list[str] = []
        self._echo = 0  # to be asked for
        self._is_silent = False  # since the last one
        self._echoes: dict[int, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._credits = Credits()

    @property
    def info(self) -> WorkerInfo:
        """The worker as it said at the last handshake. Raises TaskError(UNAVAILABLE) while disconnected."""
        if self._info is None:
            raise TaskError.unavailable(f"{self._name} is not connected")
        return self._info

    @property
    def is_connected(self) -> bool:
        """Whether tasks can be sent now."""
        return self._info is not None

    @property
    def model_name(self) -> str:
        """The model that the worker serves in all its lives."""
        return self._model.model

    @property
    def computes_on(self) -> str:
        """What names the machine's cores that the worker computes on, as it last said; empty when unknown."""
        return self._computes_on

    async def start(self) -> WorkerInfo:
        """Connect and keep connected. Raises TaskError when the first handshake fails."""
        options = [*CHANNEL_OPTIONS, *RECONNECT_OPTIONS]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        stub: Any  # the generated stubs give their calls no types
        if self.role == "draft":
            stub = worker_pb2_grpc.DraftStub(self._channel)
            self._open_stream = stub.Propose
        else:
            stub = worker_pb2_grpc.TargetStub(self._channel)
            self._open_stream = stub.Verify
        self._handshake = stub.Handshake
        self._get_status = stub.GetStatus
        try:
            info = await shake_hands(self._handshake, self._name, self._coordinator)
        except TaskError:
            await self._channel.close()
            raise
        self._model = model_of(info)
        self._adopt(info)
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"{self.role} client")
        return info

    async def stop(self) -> None:
        """Send the releases that wait and close the stream; what is in flight fails with UNAVAILABLE."""
        if self._info is not None and self._released:
            self._flushed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._flushed.wait()
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._deadlines.close()
        await self._channel.close()

    async def ask(self, task: DraftTask | VerifyTask, timeout_seconds: float) -> TaskReply:
        """Send a task and wait for its answer.

        Raises TaskError: what the worker said, UNAVAILABLE when the stream breaks first, DEADLINE_EXCEEDED
        when neither happens in time.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + timeout_seconds
        body = task.SerializeToString()
        size = len(body)
        if not self._credits.take(size):
            try:
                async with asyncio.timeout_at(due):
                    await self._credits.wait(size)
            except TimeoutError:
                raise self._too_late(timeout_seconds) from None
        task_id = next(self._task_ids)
        try:
            state = task.state
            if state.epoch != self.info.epoch:
                raise TaskError.stale(f"{self._name} began another life")
            future: asyncio.Future[TaskReply] = loop.create_future()
            self._waiting[task_id] = future
            self._deadlines.add(task_id, due)
            asked_ns = time.monotonic_ns()
            self._outgoing.append((state.session, task_id, body))
            self._wake.set()
            reply = await future
        except TimeoutError:
            raise self._too_late(timeout_seconds) from None
        finally:
            self._waiting.pop(task_id, None)
            self._credits.give_back(size)
        outcome = reply.WhichOneof("outcome")
        if outcome == "error":
            raise TaskError.from_status(reply.error)
        worker_ns = (reply.draft if outcome == "draft" else reply.verify).times.total_ns
        if worker_ns:
            self.wire.learn((time.monotonic_ns() - asked_ns - worker_ns) / 1e9)
        return reply

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        """What the worker says of itself. Raises TaskError when it does not."""
        try:
            status: WorkerStatus | None = await self._get_status(GetStatusRequest(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TaskError.deadline(f"does not answer within {timeout_seconds:g} s") from None
            raise TaskError(error.code(), f"{error.code().name}: {error.details()}") from None
        if status is None:  # so grpc.aio says that it does not parse
            raise TaskError.data_loss("what it says of itself is damaged")
        return status

    def release(self, session: str) -> None:
        """Tell the worker that the session is over; its tasks that wait to be sent are not sent any more.

        The session may come back, in tasks that are asked later.
        """
        self._outgoing = [entry for entry in self._outgoing if entry[0] != session]
        if self._info is not None or len(self._released) < MAX_KEPT_RELEASES:
            self._released.append(session)
            self._wake.set()

    async def echo(self) -> float:
        """Seconds of an empty round trip. Raises TaskError(UNAVAILABLE) when there is no stream for it."""
        if self._info is None:
            raise TaskError.unavailable(f"{self._name} is not connected")
        asked_ns, number = time.monotonic_ns(), next(self._task_ids)
        self._echoes[number] = answered = asyncio.get_running_loop().create_future()
        self._echo = number
        self._wake.set()
        try:
            await answered
        finally:
            del self._echoes[number]
        return (time.monotonic_ns() - asked_ns) / 1e9

    def _expire(self, task_id: int) -> None:
        future = self._waiting[task_id]
        if not future.done():
            future.set_exception(TimeoutError())

    def _too_late(self, timeout_seconds: float) -> TaskError:
        return TaskError.deadline(f"{self._name} did not answer within {timeout_seconds:g} s")

    def _adopt(self, info: WorkerInfo) -> None:
        """A life of the worker to send tasks to."""
        self._generation += 1
        if info.epoch != self._epoch:
            self._released.clear()  # another life holds no session
            self.cost = None
        self._epoch, self._computes_on = info.epoch, info.computes_on
        self._info = info
        self._credits.grant(info.task_credits, info.byte_credits)

    async def _keep_connected(self) -> None:
        try:
            while True:
                try:
                    await self._run_stream()
                except Exception:  # a fault of ours must not leave the worker unconnected for good
                    logger.exception("the stream to the %s worker at %s failed", self.role, self.address)
                    self._disconnected("the coordinator's end failed")
                self._adopt(await self._shake_hands_again())
        finally:
            self._disconnected("the coordinator is stopping")

    async def _shake_hands_again(self) -> WorkerInfo:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            with contextlib.suppress(TaskError):
                info = await shake_hands(self._handshake, self._name, self._coordinator)
                if model_of(info) == self._model:
                    return info
                logger.error("at %s there is another %s model now: %s", self.address, self.role, info.model)

    async def _run_stream(self) -> None:
        """Until the stream breaks, or nobody answers at its other end."""
        call = self._open_stream()
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        timer = asyncio.create_task(self._ask_for_echoes())
        try:
            await asyncio.wait([reader, timer], return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                await reader
                reason = "the worker closed the stream"
            else:
                reason = f"it has been silent for {SILENCE_SECONDS:g} s"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TaskError as error:
            reason = error.message
        finally:
            for task in (writer, reader, timer):
                task.cancel()
            call.cancel()
        logger.warning("lost the %s worker at %s: %s", self.role, self.address, reason)
        self._disconnected(reason)

    async def _ask_for_echoes(self) -> None:
        """Empty round trips tell what the wire takes while no tasks do. Returns when the worker is silent."""
        while True:
            is_idle, self._is_silent = not self._waiting, True
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    seconds = await self.echo()
            except TimeoutError:
                if self._is_silent:
                    return
                continue  # it has much to say
            if is_idle:
                self.wire.learn(seconds)
            await asyncio.sleep(ECHO_SECONDS)

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader says why
            while True:
                await self._wake.wait()
                self._wake.clear()  # sessions that were woken by the same message have asked by now
                released, self._released = self._released, []
                outgoing, self._outgoing = self._outgoing, []
                echo, self._echo = self._echo, 0
                batch = TaskBatch(generation=self._generation, released_sessions=released, echo=echo)
                for _, task_id, body in outgoing:
                    if task_id in self._waiting:
                        batch.tasks.add(task_id=task_id, body=body, crc32c=checksum(task_id, body))
                await call.write(batch)
                if not self._released:
                    self._flushed.set()

    async def _read(self, call: Any) -> None:
        batches: AsyncIterator[ReplyBatch | None] = aiter(call)
        async for batch in batches:
            self._is_silent = False
            if batch is None:  # so grpc.aio says that it does not parse
                raise TaskError.data_loss("a message does not parse")
            if batch.generation != self._generation:
                self.num_stale_replies += len(batch.replies)
                continue
            for number, answered in self._echoes.items():
                if number <= batch.echo and not answered.done():
                    answered.set_result(None)
            if batch.HasField("cost"):
                self._learn(batch.cost)
            for sealed in batch.replies:
                future = self._waiting.get(sealed.task_id)
                if future is None or future.done():
                    self.num_stale_replies += 1  # nobody waits for it any more
                    continue
                try:
                    reply = unseal(sealed, TaskReply)
                except TaskError as error:
                    future.set_exception(error)
                    continue
                future.set_result(reply)
                if reply.HasField("error") and TaskError.from_status(reply.error).is_other_life:
                    # All tasks of this stream name the epoch of its handshake, so that was damaged.
                    raise TaskError.data_loss("it lives in another epoch than it said")

    def _learn(self, message: PassCostMessage) -> None:
        """Keep what the worker tells of its passes, unless it cannot be: only speed hangs on it."""
        try:
            self.cost = PassCost.from_message(message)
        except ValueError as error:
            logger.error("the %s worker at %s tells an impossible cost: %s", self.role, self.address, error)

    def _disconnected(self, reason: str) -> None:
        self._info = None
        self._outgoing.clear()
        futures: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._echoes.values()]
        for future in futures:
            if not future.done():
                error = TaskError.unavailable(f"lost {self._name}: {reason}")
                future.set_exception(error)
