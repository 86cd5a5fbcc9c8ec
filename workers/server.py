"""A worker as a gRPC server: handshake, one task stream a coordinator, health and reflection.

Knows configuration and life cycle; streams, passes and jobs have modules of their own.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from pydantic import Field, SecretStr

from protos import worker_pb2, worker_pb2_grpc
from protos.authorization import require
from protos.binding import Binding
from protos.parsing import ParsedRequests
from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, SERVER_OPTIONS, MessageType, unpack_tokens
from protos.worker_pb2 import (
    DraftTask,
    GetStatusRequest,
    HandshakeRequest,
    PrefixCache,
    ReplyBatch,
    ScoreReply,
    ScoreRequest,
    SessionState,
    TaskBatch,
    TaskReply,
    VerifyTask,
    WorkerInfo,
    WorkerStatus,
)
from workers.jobs import DraftJob, Job, ScoreJob, ScoreTask, VerifyJob
from workers.language_model import LanguageModel
from workers.passes import PassLoop
from workers.slots import MIN_SHARED_TOKENS, SlotTable, check_ids
from workers.task_stream import TaskStream
from workers.work import Work

logger = logging.getLogger(__name__)

Role = Literal["draft", "target"]
SCORE_SECONDS = 60.0  # for a caller without a deadline
LONGEST_SCORE_SECONDS = 3600.0  # callers may name thousands of years


class WorkerConfig(Binding):
    """How a worker serves."""

    max_pass_tokens: int = Field(default=256, ge=1)  # of a pass that takes in prompts
    # From a round's arrival to its verdict, while prompts are taken in beside it: they go in chunks that keep
    # it, by what passes were measured to take, or of 32 tokens where not even these do.
    max_step_seconds: float = Field(default=0.5, gt=0)
    calibration_seconds: float = Field(default=2.0, ge=0)  # of passes that measure while nothing is asked
    lease_seconds: float = Field(default=600.0, gt=0)  # an idle session's slot is freed after this
    # Sessions take over prefixes of at least so many tokens that others, also past ones, have computed. None:
    # each computes its own, and nobody can tell from how long it takes what others have asked.
    min_shared_tokens: int | None = Field(default=MIN_SHARED_TOKENS, ge=1)
    task_credits: int = Field(default=1024, ge=1)
    byte_credits: int = Field(default=MAX_MESSAGE_BYTES // 2, ge=1)
    computes_on: str = ""  # names what passes compute on where other workers may share it
    # Who shows it may ask a target for p; None: nobody may.
    control_token: SecretStr | None = Field(default=None, min_length=1)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a worker tells of its model beside sizes."""

    name: str
    tokenizer_fingerprint: str  # "" when the model came without a tokenizer
    end_token_ids: tuple[int, ...]
    dtype: str


class WorkerServer:
    """Serves one model in one role, from `start` to `stop`, within one event loop."""

    def __init__(
        self,
        role: Role,
        model: LanguageModel,
        identity: ModelIdentity,
        config: WorkerConfig,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """A new life: the epoch is drawn here. A target must score the whole vocabulary.

        `thread` is the one that loaded the model: see `workers.passes.model_thread`.
        """
        if role == "target" and model.output_ids is not None:
            raise ValueError(f"{identity.name} scores {model.output_ids.size} ids only; a target scores all")
        self.epoch = secrets.randbits(64)
        self._role = role
        self._config = config
        self._model = model
        slots = SlotTable(
            model,
            epoch=self.epoch,
            lease_seconds=config.lease_seconds,
            clock=time.monotonic,
            min_shared=math.inf if config.min_shared_tokens is None else config.min_shared_tokens,
        )
        self._slots = slots
        self._scoring = asyncio.Lock()

        def open_job(work: Work) -> Job:
            match work.task:
                case DraftTask():
                    return DraftJob(work.task, slots, model, work.out_of_time)
                case ScoreTask():
                    return ScoreJob(work.task, slots, model)
                case _:
                    return VerifyJob(work.task, slots, model)

        self._passes = PassLoop(
            model,
            slots,
            open_job,
            max_pass_tokens=config.max_pass_tokens,
            max_step_seconds=config.max_step_seconds,
            calibration_seconds=config.calibration_seconds,
            thread=thread,
        )
        self.info = WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            epoch=self.epoch,
            model=identity.name,
            vocab_size=model.vocab_size,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            max_length=model.max_length,
            end_token_ids=identity.end_token_ids,
            dtype=identity.dtype,
            num_slots=model.num_slots,
            task_credits=config.task_credits,
            byte_credits=config.byte_credits,
            computes_on=config.computes_on,
        )

    @property
    def num_slots_used(self) -> int:
        """Slots that hold a session."""
        return self._slots.num_used

    async def start(self) -> str:
        """Bind, serve, and return the address."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ParsedRequests()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        servicer = _Servicer(self)
        if self._role == "draft":
            worker_pb2_grpc.add_DraftServicer_to_server(servicer, self._server)
        else:
            worker_pb2_grpc.add_TargetServicer_to_server(servicer, self._server)
        service = worker_pb2.DESCRIPTOR.services_by_name["Draft" if self._role == "draft" else "Target"]
        self._service_names = ["", service.full_name]
        if self._config.is_loopback:
            reflection.enable_server_reflection(
                (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
        port = self._server.add_insecure_port(self._config.address(self._config.port))
        await self._server.start()
        self._running = asyncio.create_task(self._passes.run(), name=f"{self._role} passes")
        self._running.add_done_callback(self._passes_ended)
        await self._report(health_pb2.HealthCheckResponse.SERVING)
        return self._config.address(port)

    async def stop(self, grace_seconds: float) -> None:
        """Report not serving, let the tasks at hand finish within the grace, and close."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._passes.close()
        with contextlib.suppress(TimeoutError):  # what is left is answered by the closing stream
            async with asyncio.timeout(grace_seconds):
                await self._passes.drained()
        await self._server.stop(grace=0.1)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _passes_ended(self, running: asyncio.Task[None]) -> None:
        """Nobody would be answered any more: close, so that coordinators and health checks see it."""
        if not running.cancelled():
            logger.critical(
                "the %s worker's loop has ended; it stops", self._role, exc_info=running.exception()
            )
            self._stopping = asyncio.create_task(self.stop(0.0))

    async def serve_stream(
        self, batches: AsyncIterator[TaskBatch], kind: MessageType[DraftTask | VerifyTask]
    ) -> AsyncGenerator[ReplyBatch, None]:
        """One coordinator's stream: tasks in as they come, replies out as they are ready."""
        stream = TaskStream(self._passes, kind, self._config.task_credits, self._config.byte_credits)
        reader = asyncio.create_task(stream.read(batches))
        try:
            while (batch := await stream.next_replies()) is not None:
                yield batch
            await reader  # raises what ended the stream
        finally:
            reader.cancel()

    async def score(self, request: ScoreRequest, timeout_seconds: float) -> ScoreReply:
        """The rows of p that are asked for. Calls take turns, in one slot. Raises TaskError."""
        tokens = unpack_tokens(request.tokens, "tokens")
        if not 1 <= len(tokens) <= self._model.max_length:
            limit = self._model.max_length
            raise TaskError.invalid("tokens", f"are {len(tokens)} ids; it takes 1 to {limit}")
        check_ids(tokens, "tokens", self._model.vocab_size)
        state = SessionState(
            session=f"score/{secrets.token_hex(8)}",
            epoch=self.epoch,
            round=1,
            base_length=len(tokens),
            start_hash=TokenPrefix().hash_at(0),
            tokens=request.tokens,
            timeout_ns=int(min(timeout_seconds, LONGEST_SCORE_SECONDS) * 1e9),
        )
        answer: asyncio.Future[TaskReply] = asyncio.get_running_loop().create_future()

        def reply(outcome: TaskReply) -> None:
            if not answer.done():  # the caller may have gone
                answer.set_result(outcome)

        async with self._scoring:
            self._passes.submit(Work(ScoreTask(state, request.num_rows, request.sampling), b"", reply))
            try:
                outcome = await answer
            finally:
                self._passes.release(state.session)
        if outcome.HasField("error"):
            raise TaskError.from_status(outcome.error)
        return outcome.score

    def greet(self) -> WorkerInfo:
        """Who the worker is, for a coordinator that begins."""
        self._passes.greet()
        return self.info

    def status(self) -> WorkerStatus:
        """How the worker is doing."""
        cost = self._passes.cost
        prefixes = None
        if self._config.min_shared_tokens is not None:
            prefixes = PrefixCache(**asdict(self._slots.counts))
        return WorkerStatus(
            epoch=self.epoch,
            num_slots=self._model.num_slots,
            num_slots_used=self._slots.num_used,
            num_tasks=self._passes.num_tasks,
            process_id=os.getpid(),
            num_broken_rows=self._passes.num_broken_rows,
            cost=None if cost is None else cost.to_message(),
            busy=self._passes.busy.to_message(),
            prefixes=prefixes,
        )

    def require_control_token(self, shown: Any) -> None:
        """Raise TaskError unless the call's metadata shows the control token."""
        require(self._config.control_token, shown)

    async def _report(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for name in self._service_names:
            await self._health.set(name, status)


class _Servicer(worker_pb2_grpc.DraftServicer, worker_pb2_grpc.TargetServicer):
    """Both services' methods; a server registers the one of its role."""

    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker

    async def Handshake(
        self, request: HandshakeRequest, context: grpc.aio.ServicerContext[HandshakeRequest, WorkerInfo]
    ) -> WorkerInfo:
        if request.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol_version is {request.protocol_version}; this worker speaks {PROTOCOL_VERSION}",
            )
        return self._worker.greet()

    async def Propose(
        self, batches: AsyncIterator[TaskBatch], context: grpc.aio.ServicerContext[TaskBatch, ReplyBatch]
    ) -> None:
        await self._serve(batches, context, DraftTask)

    async def Verify(
        self, batches: AsyncIterator[TaskBatch], context: grpc.aio.ServicerContext[TaskBatch, ReplyBatch]
    ) -> None:
        await self._serve(batches, context, VerifyTask)

    async def _serve(
        self,
        batches: AsyncIterator[TaskBatch],
        context: grpc.aio.ServicerContext[TaskBatch, ReplyBatch],
        kind: MessageType[DraftTask | VerifyTask],
    ) -> None:
        """A coroutine that writes, as a generator would outlive a call that is cancelled while it sends."""
        async with contextlib.aclosing(self._worker.serve_stream(batches, kind)) as stream:
            async for replies in stream:
                await context.write(replies)

    async def GetStatus(
        self, request: GetStatusRequest, context: grpc.aio.ServicerContext[GetStatusRequest, WorkerStatus]
    ) -> WorkerStatus:
        return self._worker.status()

    async def Score(
        self, request: ScoreRequest, context: grpc.aio.ServicerContext[ScoreRequest, ScoreReply]
    ) -> ScoreReply:
        try:
            self._worker.require_control_token(context.invocation_metadata())
            return await self._worker.score(request, context.time_remaining() or SCORE_SECONDS)
        except TaskError as error:
            await context.abort_with_status(rpc_status.to_status(error.to_status()))
